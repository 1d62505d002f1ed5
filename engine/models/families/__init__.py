"""A file per family: a ModelSpec from its config.json, and the names of its tensors."""
