"""``odriver doctor``: what would keep a machine from serving, and what its devices can do."""
