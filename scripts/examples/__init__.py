"""Programs to read and change: a client in JavaScript, and trainers in JAX beside the daemon."""
