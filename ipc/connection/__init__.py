"""A client's connection to a daemon."""
