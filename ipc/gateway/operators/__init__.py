"""What an operator does to daemons over HTTP."""
