"""Attention over pages on a TPU."""
