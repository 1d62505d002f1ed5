"""What is seen of a daemon while it serves, and whether it makes progress."""
