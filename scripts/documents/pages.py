"""The pages, and the fenced blocks in them.

A comment in the line before a block says how it is meant:

    <!-- not run: WHY -->       its flags are checked, and nothing is run
    <!-- example output -->     it is run, and its output depends on the machine or on chance
    <!-- file: NAME -->         it is a file that later blocks of the page use
    <!-- settings -->           it is a daemon's configuration

A block ``text`` that directly follows a block ``python`` is what that prints.
"""

import re
import shlex
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
PROMPT = re.compile(r"[\w-]*\$ ")
NOT_RUN, EXAMPLE, FILE, SETTINGS = "not run: ", "example output", "file: ", "settings"


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    place: str
    """PAGE:LINE."""
    language: str
    text: str
    note: str
    """Of the comment before it; may be empty."""
    printed: str | None
    """What a ``python`` block prints, if the page shows it."""

    @property
    def is_run(self) -> bool:
        """Whether it can be run anywhere."""
        return not self.note.startswith(NOT_RUN)

    @property
    def file_name(self) -> str | None:
        """Of the file that it is."""
        return self.note.removeprefix(FILE) if self.note.startswith(FILE) else None

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Those of a ``console`` block, each with the output that is shown after it."""
        commands: list[tuple[str, str]] = []
        for line in self.text.splitlines(keepends=True) if self.language == "console" else []:
            if PROMPT.match(line):
                commands.append((PROMPT.sub("", line, count=1), ""))
            else:
                command, output = commands.pop()
                goes_on = not output and _is_unfinished(command)
                commands.append((command + line, "") if goes_on else (command, output + line))
        return commands


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    found = []
    for fence, following in zip_longest(fences, fences[1:]):
        place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, fence.start('text'))}"
        shown = following is not None and following["language"] == "text" and not following["note"]
        adjoins = shown and not text[fence.end() : following.start()].strip()
        printed = following["text"] if adjoins and fence["language"] == "python" else None
        found.append(Block(place, fence["language"], fence["text"], fence["note"] or "", printed))
    return found


def write_files(page: list[Block], directory: Path) -> None:
    """Write the files among the blocks of a page."""
    for block in page:
        if block.file_name:
            (directory / block.file_name).write_text(block.text, encoding="utf-8")
            (directory / block.file_name).chmod(0o600)


def _is_unfinished(command: str) -> bool:
    """Whether a quote is open at its end, or the last line goes on."""
    try:
        shlex.split(command)
    except ValueError:
        return True
    return command.endswith("\\\n")
