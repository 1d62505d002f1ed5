"""``odriver install-service``: systemd units of the daemon and its gateway, and a configuration."""
