"""The connections of a socket's process: how many there may be, what waits for room in them, and which are to end."""
