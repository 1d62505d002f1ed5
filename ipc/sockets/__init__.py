"""The processes that own the daemon's sockets."""
