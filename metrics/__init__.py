"""`evaluate` modules: each folder loads with `evaluate.load(path)` and imports no hf_ext."""
