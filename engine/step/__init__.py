"""A step of the device: its layout, what is compiled for it, and who runs it."""
