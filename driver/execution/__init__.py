"""The stage that uses the engine."""
