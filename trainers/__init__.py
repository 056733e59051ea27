"""TRL trainers with their scripts, one folder per method."""
