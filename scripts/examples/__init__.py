"""Programs to read and to change: a client in JavaScript, and trainers beside the daemon in JAX."""
