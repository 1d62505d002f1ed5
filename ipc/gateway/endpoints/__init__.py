"""The gateway's endpoints, one file per address."""
