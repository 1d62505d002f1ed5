"""What `scripts/bench` measures, and how; a file per subcommand."""
