"""Data sets and environments, one folder per task."""
