"""OpenAI's Responses API: its requests, its items and its events."""
