"""Who is next: the queue of waiting sequences, and the turns of clients."""
