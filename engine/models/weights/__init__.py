"""A decoder's weights: declared beside the modules that use them, read from a source, served in one of few forms."""
