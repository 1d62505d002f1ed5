"""What the scheduler expects, learned from what has been."""
