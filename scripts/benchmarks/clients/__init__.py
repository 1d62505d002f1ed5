"""Who asks: our clients and HTTP ones, the prompts they send, and the rates that they see."""
