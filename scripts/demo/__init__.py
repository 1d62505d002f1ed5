"""How the model we ship is made: what it reads, how it is cut into tokens, how it learns."""
