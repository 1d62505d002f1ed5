"""Rows that sample what a constraint allows, and when they do."""
