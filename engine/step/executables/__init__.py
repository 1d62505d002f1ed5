"""Executables of earlier starts, on disk."""
