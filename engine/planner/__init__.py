"""Predicts how a model would be served on chips that are absent. No daemon imports it."""
