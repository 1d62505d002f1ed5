"""Reasoning as a response's ``encrypted_content``, which a client sends back as it came.

Clients that store nothing (Codex, OpenAI's agents) keep only this of a reasoning item, and a chat
template may want the reasoning between two calls of functions. It is encoded and not encrypted:
the reasoning is in the same item anyway.
"""

from base64 import b64decode, b64encode

PREFIX = "odriver-reasoning:"


def sealed(reasoning: str) -> str:
    """The text for ``opened``."""
    return PREFIX + b64encode(reasoning.encode()).decode()


def opened(content: str) -> str:
    """The reasoning; none of what another server has encrypted, or of what is damaged."""
    if not content.startswith(PREFIX):
        return ""
    try:
        return b64decode(content.removeprefix(PREFIX), validate=True).decode()
    except ValueError:
        return ""
