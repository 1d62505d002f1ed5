"""The systems that are measured in turns: ours, and other servers on the same checkpoint."""
