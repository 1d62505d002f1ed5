"""How long steps take, and the gaps between them."""
