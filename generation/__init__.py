"""Logits processors, stopping criteria and detectors of what models write."""
