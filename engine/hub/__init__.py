"""Models that are not in a directory of this machine yet: the Hugging Face hub, and buckets."""
