"""Merging and handling of PEFT adapters, one folder per method."""
