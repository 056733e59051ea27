"""`python -m hf_ext.cli` is the `hf-ext` command."""

from hf_ext.cli import main

if __name__ == "__main__":
    main()
