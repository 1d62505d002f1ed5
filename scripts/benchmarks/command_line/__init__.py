"""The command line of `scripts/bench`: what can be measured, and by which arguments."""
