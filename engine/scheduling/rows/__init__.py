"""Which rows a step has, and how many tokens each."""
