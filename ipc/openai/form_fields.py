"""The fields of a body that say the form of a text, in errors about it."""

import re
from collections.abc import Mapping
from typing import NamedTuple

FORM = "structured_outputs"
"""The parameter of ours in which the form is."""
_OF_FORM = re.compile(rf"\A{FORM}(?:\.\w+)?")
_AT = re.compile(r": at (?P<line>\d+)\(\d+\)(?P<why>: .*?)(?:\n *\d+ \| .*)?", re.DOTALL)
"""A place in a grammar, what is wrong there, and some lines of the grammar."""
_RULE = re.compile(r"arguments_\d+|said")


class FormFields(NamedTuple):
    """``whole`` is the field, or what several are called. In a grammar that is made of several fields ``by_rule`` is
    the one of which a rule is made."""

    whole: str = FORM
    by_rule: Mapping[str, str] = {}

    def named(self, message: str, grammar: str) -> tuple[str, str] | None:
        """An error of ours about the form and its field, both as the body has them; None for one about something else.

        Of a grammar that the body does not have, no line is told.
        """
        found = _OF_FORM.match(message)
        if found is None or self.whole == FORM:
            return None if found is None else (message, FORM)
        field, why = self.whole, message[found.end() :]
        is_theirs = field.endswith("grammar") and not self.by_rule
        at = None if is_theirs else _AT.fullmatch(why)
        if at is not None:
            field, why = self._field_at(int(at["line"]), grammar), at["why"]
        return f"{field}{why}", field.partition(" ")[0]

    def _field_at(self, line: int, grammar: str) -> str:
        """The one of which a line is made. A rule ``said`` may be many lines."""
        field = self.whole
        for text in grammar.split("\n")[:line]:
            rule = _RULE.match(text)
            field = field if rule is None else self.by_rule.get(rule[0], field)
            if rule is not None and rule[0] == "said":
                break
        return field
