"""What speculation is worth: texts that repeat, that do not, and that only seem to."""
