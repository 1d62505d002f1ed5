"""A file a family: how its config.json comes down to a ModelSpec, and where its checkpoints have each parameter."""
