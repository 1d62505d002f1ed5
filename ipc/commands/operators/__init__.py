"""The commands for those who keep a daemon up: its state, keys, adapters and weights."""
