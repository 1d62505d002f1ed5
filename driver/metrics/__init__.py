"""Numbers about requests."""
