"""What a process of a daemon ends with."""

import os

STOPPED = os.EX_OK
FAULT = 1
"""A restart may help."""
MISCONFIGURED = os.EX_CONFIG
"""A restart is of no use: the unit of systemd tries none."""
