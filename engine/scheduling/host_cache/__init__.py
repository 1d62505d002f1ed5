"""Prefix hits in the host's memory: what is copied instead of computed, and when."""
