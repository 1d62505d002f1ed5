"""From logits to tokens."""
