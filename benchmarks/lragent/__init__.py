"""LRAgent beside full sharing and no sharing: divergence, memory, time to the first token. See run.py."""
