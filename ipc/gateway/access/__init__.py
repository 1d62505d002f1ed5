"""Access to the gateway: API keys, rates and limits."""
