"""Structured outputs: grammars are compiled and followed by processes of their own."""
