"""What a decoder has on a CPU in the place of XLA's operations."""
