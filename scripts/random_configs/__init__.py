"""Configs of families as a publisher might write them, drawn at random, for scripts/fuzz_families."""
