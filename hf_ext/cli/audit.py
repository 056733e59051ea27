"""`hf-ext audit WHAT`: logs and outputs looked through; each command belongs to the wing that writes them."""

from hf_ext.cli.lazy import lazy_app

COMMANDS = {
    "rewards": ("hf_ext.trainers.cli:audit_rewards", "What a verdict log of the CaT trainer says."),
}
app = lazy_app(
    COMMANDS,
    help="Look through what a method wrote down.",
    epilog="Example: `hf-ext audit rewards OUT/cat_audit.jsonl`",
)
