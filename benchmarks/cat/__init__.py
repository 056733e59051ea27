"""Compute as Teacher beside majority vote, true labels and inference-time aggregation. See run.py."""
