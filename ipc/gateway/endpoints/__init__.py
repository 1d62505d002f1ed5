"""What the gateway answers, an address a file."""
