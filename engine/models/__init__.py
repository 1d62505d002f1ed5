"""The decoder, and how a Hugging Face checkpoint becomes one."""
