"""What this machine's devices are found to do, for the first contact with new hardware."""
