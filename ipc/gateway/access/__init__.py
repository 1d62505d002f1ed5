"""Who may use the gateway: API keys, rates and limits."""
