"""``odriver install-service``: systemd units for the daemon and its gateway, and a configuration."""
