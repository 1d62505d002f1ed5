"""The rules of the work socket: no socket, thread or clock is in any of these files."""
