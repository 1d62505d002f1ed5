"""A decoder's weights: declared in its modules, read from a source, served in a few forms."""
