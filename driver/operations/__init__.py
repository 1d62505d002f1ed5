"""What operators do to the engine while it serves."""
