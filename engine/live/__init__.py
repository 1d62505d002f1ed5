"""What of an engine may be replaced while it serves."""
