"""What a step is given: how it is packed on the host, and unpacked beside the state of slots."""
