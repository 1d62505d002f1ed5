"""The commands that send requests to a daemon."""
