"""Modules of layers that some models have and others not."""
