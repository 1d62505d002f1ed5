"""README and docs/: their blocks, their tables of flags, and the check that what they show is so."""
