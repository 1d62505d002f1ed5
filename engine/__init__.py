"""Token ids in, token ids out: no text, no threads, no sockets."""
