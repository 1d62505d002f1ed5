"""Our Pallas kernels for a TPU's products."""
