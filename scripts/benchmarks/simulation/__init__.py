"""The real scheduler on devices that are formulas."""
