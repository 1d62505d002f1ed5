"""Programs that others wrote, let loose on the gateway of the model that we ship."""
