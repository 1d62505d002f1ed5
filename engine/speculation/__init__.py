"""Drafts of tokens that follow, and their verification, on the device."""
