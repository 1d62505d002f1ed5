"""Draft heads: small modules that draft for a model from its hidden states."""
