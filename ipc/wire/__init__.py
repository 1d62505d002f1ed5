"""The protocol: messages, their bytes, addresses and keys."""
