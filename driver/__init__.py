"""Text and threads; no sockets."""
