"""Bytes: the wire, the daemon and its command line."""
