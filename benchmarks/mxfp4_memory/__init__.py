"""Peak memory of quantising while loading, and of loading a packed checkpoint. See run.py."""
