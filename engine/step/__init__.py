"""A step of the device: its layout, its compiled programs and its execution."""
