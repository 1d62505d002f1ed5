"""The words in the code of a chat template, which tell what it knows of."""

from contextlib import suppress
from functools import lru_cache

import jinja2


@lru_cache(maxsize=8)
def template_words(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names and the strings in its code, without the text that it writes; raises jinja2's
    TemplateError."""
    words = [(kind, word) for _, kind, word in jinja2.Environment().lex(template)]
    names = frozenset(word for kind, word in words if kind == "name")
    return names, frozenset(word[1:-1] for kind, word in words if kind == "string")


def template_names(templates: str | dict[str, str] | None) -> frozenset[str]:
    """The names in a template, or in all of several; none where one is malformed."""
    sources = templates.values() if isinstance(templates, dict) else [templates or ""]
    with suppress(jinja2.TemplateError):
        return frozenset().union(*(template_words(source)[0] for source in sources))
    return frozenset()
