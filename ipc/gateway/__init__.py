"""The HTTP gateway: a client of daemons, and an OpenAI-compatible server."""
