"""Adapters in the model: their place beside its kernels, and their products."""
