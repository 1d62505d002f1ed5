"""The commands of ``odriver``."""
