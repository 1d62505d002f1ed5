"""Checkpoints that are quantised already: a file for each ``quant_method`` of config.json."""
