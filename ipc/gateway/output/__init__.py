"""A chat's text read as thoughts, content and calls."""
