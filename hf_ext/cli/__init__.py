"""The hf-ext command."""


def main() -> None:
    """Run the command line."""
