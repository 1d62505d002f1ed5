"""The daemon as a service: configuration, start, health, metrics."""
