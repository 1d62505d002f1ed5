"""An engine that runs in several processes, one on each host."""
