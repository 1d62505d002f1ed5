"""Pages in the host's memory: how many there are, and the copies to it and back."""
