"""The daemon's side of the protocol."""
