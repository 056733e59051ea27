"""PatternKV beside its peers: divergence against bits, memory, and the time of a decode step. See run.py."""
