"""Which sequences get which tokens computed, in which step. Numbers only: no jax."""
