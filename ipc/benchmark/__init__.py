"""A load against a running daemon."""
