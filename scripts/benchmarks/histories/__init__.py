"""The model checker of the scheduler, and what stands in for the device's side of it."""
