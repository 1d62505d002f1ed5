"""Attention over pages: what it computes, and the backends that compute it."""
