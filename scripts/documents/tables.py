"""The tables in the pages: the flags of commands, from their parsers, and what models need.

``<!-- table: COMMAND -->`` and ``<!-- end of table -->`` enclose what this writes; the table
``models`` is that of slices.py, and ``flags of vLLM`` has those with another name here.
"""

import argparse
import re

from ipc.commands.vllm_flags import VLLM_FLAGS
from scripts.documents import slices
from scripts.documents.commands import subcommand
from scripts.documents.pages import PAGES

TABLE = re.compile(r"(<!-- table: ([\w -]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
DEFAULT = re.compile(r" \(default: (.*)\)$")
OURS = ("positional arguments", "options")
"""Groups of argparse's own."""


def main() -> None:
    """Write them."""
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


def written(text: str) -> str:
    """A page with its tables as they have to be."""
    return TABLE.sub(lambda match: match[1] + "\n" + _table(match[2]) + "\n" + match[3], text)


def _table(name: str) -> str:
    others = {"models": slices.table, "flags of vLLM": vllm_table}
    return others[name]() if name in others else table(name)


def vllm_table() -> str:
    """A row for each flag of vLLM's that is called otherwise, or is not here."""
    rows = [f"| `{one.name}` | {f'`{one.ours}`' if one.ours else 'none'} | {one.words} |" for one in VLLM_FLAGS]
    return "\n".join(["| vLLM | oDriver | |", "|---|---|---|", *rows]) + "\n"


def table(command: str) -> str:
    """A row for each argument of ``odriver COMMAND``, under the titles of groups."""
    rows = ["| flag | default | |", "|---|---|---|"]
    for group in subcommand(*command.split())._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if actions and group.title not in OURS:
            rows.append(f"| **{group.title}** | | |")
        rows += map(_row, actions)
    return "\n".join(rows) + "\n"


def _row(action: argparse.Action) -> str:
    said = action.help or ""
    default = DEFAULT.search(said)
    shown = default[1] if default else "no" if action.nargs == 0 else ""
    cells = (f"`{_usage(action)}`", {"True": "yes"}.get(shown, shown), DEFAULT.sub("", said))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _usage(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else action.metavar or "|".join(map(str, action.choices or [])) or action.dest
    names = action.option_strings
    flag = names[0].replace("--", "--[no-]") if len(names) == 2 and names[1].startswith("--no-") else ", ".join(names)
    return f"{flag} {value}".strip()


if __name__ == "__main__":
    main()
