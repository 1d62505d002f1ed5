"""The files of ``odriver batch``."""
