"""scripts/survey: the figures it reads out of a tree, the calls it traces, and its table."""

import sys
from pathlib import Path

import pytest

from scripts.survey_code import survey, table
from scripts.trace_request import Tracer

PAGES = '''"""Pages."""

from engine.top import Top


class Page:
    """One."""

    # a comment

    def read(self, rows: "jax.Array") -> "jax.Array":
        """Of ``rows[T]``."""
        return self.qkv_kernel


def write(rows: "np.ndarray") -> None:
    """{long}"""
'''.replace("{long}", "x" * 100)
TOP = "from caching.pages import write\n\n\nclass Page:\n    pass\n\n\nTop = write\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two modules that import each other, and a test."""
    files = {"caching/pages.py": PAGES, "engine/top.py": TOP, "tests/test_pages.py": "\n\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("label", "figure"),
    [
        ("lines of caching, with no comment or blank", "17 5"),
        ("lines of tests", "2"),
        ("modules", "2"),
        ("modules in engine", "1"),
        ("folders of more than 15", "0"),
        ("files of more than 300 lines", "0"),
        ("floors and arrows in caching", "1 0"),
        ("arrows between folders", "2"),
        ("circles of modules", "1"),
        ("base names of several modules", "0"),
        ("names of several classes", "1 Page"),
        ("functions", "2"),
        ("functions over arrays that say shapes", "1 of 2"),
        ("prose lines beyond column 100", "1"),
        ("files that name qkv|q_proj", "1"),
    ],
)
def test_the_figures_of_a_tree(tree: Path, label: str, figure: str):
    """Lines, folders, imports, names and functions are counted as they are in the tree."""
    assert survey(tree)[label] == figure


def test_calls_belong_to_the_request_and_to_their_step(tmp_path: Path):
    """Files whose functions run are noted once, those below oEngine.step for the step too, and no others of the machine."""
    sources = {
        "caching/below.py": "def below(): pass",
        "engine/oengine.py": "class oEngine:\n    def step(self): below()",
        "driver/beside.py": "def beside(): pass",
    }
    names = {}
    for path, source in sources.items():
        exec(compile(source, str(tmp_path / path), "exec"), names)
    tracer = Tracer(tmp_path)

    before = sys.getprofile()
    sys.setprofile(tracer)
    names["oEngine"]().step()
    names["beside"]()
    sys.setprofile(before)

    in_a_step = {str(tmp_path / "engine/oengine.py"), str(tmp_path / "caching/below.py")}
    assert tracer.steps == [in_a_step]
    assert tracer.files == in_a_step | {str(tmp_path / "driver/beside.py")}


def test_the_table_has_a_column_for_each_tree():
    """What one tree has not is a dash, and long figures are wrapped."""
    text = table({"old": {"modules": "3"}, "new": {"modules": "2", "names": "word " * 10}})

    assert text.splitlines() == [
        "         old  new",
        "modules  3    2",
        "names    -    word word word word word word word word word",
        "              word",
    ]
