"""What is counted and measured of an engine."""
