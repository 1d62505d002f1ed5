"""Adapters by name: which there are, who uses them, and how they come and go."""
