"""README and docs/: what they show exists. scripts/check_docs runs it."""

import ast
import functools
import re
from pathlib import Path

import pytest
from checkpoints import VARIANTS

import odriver
from engine.models.model_config import families_in
from ipc import errors
from ipc.commands.vllm_flags import VLLM_FLAGS
from ipc.service import settings
from scripts.documents import pages, tables
from scripts.documents.commands import WrongCommand, check, flags, subcommand
from scripts.documents.pages import PAGES, ROOT, Block

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
TREE = re.compile(r"(caching|engine|driver|ipc|scripts|tests|docs)/[\w./-]+")
FLAG = re.compile(r"(?<!\S)--[a-z][a-z0-9-]+(?![\w-])")
OTHERS_FLAGS = {"--local-dir", "--build-arg", "--privileged", "--net", *(flag.name for flag in VLLM_FLAGS)}
"""Of programs that are not ours."""
OTHERS_NAMES = {"ODRIVER_SERVICE_HOST", "ODRIVER_PORT_8000_TCP", "convert_tokenizer_to_chat_template", "add_eos_token"}
OTHERS_NAMES |= {"number_of_animals_in_the_story"}
"""The same, and of an example."""
PAGE = """
<!-- file: a.json -->
```json
{}
```

Text.
```console
$ true
$ echo 'a
  b' \\
 c
a
 b c
$ cd /
```
<!-- not run: a TPU -->
```console
host-0$ odriver plan
```

```python
print(1)
```

```text
1
```
"""
PROTOCOL = ROOT / "ipc" / "PROTOCOL.md"
PACKAGES = [ROOT / name for name in ("caching", "engine", "driver", "ipc")]
SUFFIXES = {".py", ".cc", ".h", ".js", ".service"}
MODELS = ROOT / "docs" / "models.md"
"""Its table of what models need takes seconds."""
BLOCKS = [block for page in PAGES for block in pages.blocks(page)]


@pytest.fixture(params=PAGES, ids=lambda page: page.stem)
def page(request: pytest.FixtureRequest) -> Path:
    """Each of the pages."""
    path: Path = request.param
    return path


def test_every_shown_command_is_one_that_its_parser_takes(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that need a TPU, a cluster or a network, and are not run."""
    blocks = pages.blocks(page)
    pages.write_files(blocks, tmp_path)
    monkeypatch.chdir(tmp_path)

    assert {command: wrong for block in blocks for command, _ in block.commands if (wrong := mistake(command))} == {}


def test_every_flag_and_command_in_a_sentence_exists(page: Path) -> None:
    """Those in backticks."""
    codes = CODE.findall(pages.FENCE.sub("", page.read_text(encoding="utf-8")))

    assert {flag for code in codes for flag in FLAG.findall(code)} - flags() - OTHERS_FLAGS == set()
    for name in {name for code in codes for name in re.findall(r"^odriver ([a-z-]+)", code)}:
        subcommand(name)


@functools.cache
def words() -> set[str]:
    """Every word of the sources, of this file alone none."""
    paths = (path for folder in (*PACKAGES, ROOT / "scripts", ROOT / "tests") for path in folder.rglob("*.*"))
    sources = (path for path in paths if path.suffix in SUFFIXES and path != Path(__file__))
    return {word for path in sources for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


def test_every_name_and_file_in_a_sentence_exists(page: Path) -> None:
    """Those in backticks: names of the code, fields, settings, and files from a package on. Metrics are in test_monitoring."""
    codes = CODE.findall(pages.FENCE.sub("", page.read_text(encoding="utf-8")))
    names = {code for code in codes if NAME.fullmatch(code) and not code.startswith("odriver_")}

    assert [code for code in codes if TREE.fullmatch(code) and not (ROOT / code).exists()] == []
    assert {name for name in names if name.rpartition(".")[2] not in words()} - OTHERS_NAMES == set()


def test_every_folder_of_the_packages_has_its_row() -> None:
    """In the picture of rooms."""
    text = (ROOT / "docs" / "how-it-is-built.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/(\w+)`((?:, `\w+`)*) \|", text, re.MULTILINE)
    shown = {f"{package}/{name}" for package, first, others in rows for name in (first, *CODE.findall(others))}
    folders = (path for package in PACKAGES for path in package.iterdir())

    assert shown == {
        str(path.relative_to(ROOT)) for path in folders if any(file.suffix in SUFFIXES for file in path.glob("*"))
    }


@pytest.mark.parametrize("page", [*PAGES, PROTOCOL], ids=lambda path: path.stem)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    """Of the tree; pages elsewhere are not looked at."""
    for target, heading in LINK.findall(page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not heading or heading in headings(path), f"{target}#{heading}"


def test_no_page_has_a_heading_twice(page: Path) -> None:
    """As one has whose section a merge has repeated: a link would lead to the first alone."""
    found = headings(page)

    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.thorough] * (path == MODELS)) for path in PAGES],
    ids=lambda path: path.stem,
)
def test_every_table_is_as_the_parsers_and_the_planner_have_it(path: Path) -> None:
    """scripts/write_tables writes it anew."""
    text = path.read_text(encoding="utf-8")

    assert tables.written(text) == text, "run scripts/write_tables"


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "python"], ids=lambda block: block.place)
def test_every_program_compiles_and_imports_what_there_is(block: Block) -> None:
    """From the one module that is for programs."""
    names = [
        name.name
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.ImportFrom) and node.module == "odriver"
        for name in node.names
    ]

    assert set(names) <= set(odriver.__all__)


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.note == pages.SETTINGS], ids=lambda block: block.place)
def test_every_configuration_is_one(block: Block, tmp_path: Path) -> None:
    """With values that can be."""
    path = tmp_path / "config.toml"
    path.write_text(block.text)

    settings.configs(settings.held({"config": path}))


def test_what_vllms_flags_are_here_exists() -> None:
    """And a flag that has another name has not this one as well."""
    known = {"MODEL", *(setting.flag for name, setting in settings.SETTINGS.items() if name != "model")}

    assert [
        flag for flag in VLLM_FLAGS if flag.name in known or (flag.ours and flag.ours.split()[0] not in known)
    ] == []


def test_programs_find_all_errors_of_clients_in_one_module() -> None:
    """But those of commands alone."""
    names = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }

    assert names - {"AddressInUse", "BatchError"} <= set(odriver.__all__)


def test_the_table_of_models_has_every_family() -> None:
    """By the architecture that config.json names."""
    families = families_in(ROOT / "engine" / "models" / "families").values()

    text = MODELS.read_text(encoding="utf-8")
    assert [family.architecture for family in families if f"`{family.architecture}`" not in text] == []


def test_the_table_of_models_names_every_golden() -> None:
    """In the row of its architecture."""
    rows = MODELS.read_text(encoding="utf-8").splitlines()

    for name, variant in VARIANTS.items():
        (architecture,) = variant.config["architectures"]
        (row,) = (row for row in rows if f"`{architecture}`" in row and row.startswith("|"))
        assert f"`{name}`" in row


def test_readme_is_read_to_its_end() -> None:
    """It has 200 lines at most, and leads to every chapter."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert text.count("\n") <= 200
    assert {target for target, _ in LINK.findall(text)} >= {str(page.relative_to(ROOT)) for page in PAGES[1:]}


def test_a_page_is_read_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands over several lines with their outputs, files, programs with what they print, and what is not run."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(PAGE)

    file, commands, tpu, program, other = pages.blocks(path)

    assert file.file_name == "a.json" and file.is_run
    assert commands.commands == [("true\n", ""), ("echo 'a\n  b' \\\n c\n", "a\n b c\n"), ("cd /\n", "")]
    assert (commands.place, tpu.is_run, tpu.commands) == ("page.md:8", False, [("odriver plan\n", "")])
    assert (program.printed, other.printed) == ("1\n", None)


@pytest.mark.parametrize(
    "command",
    [
        "odriver serve --max-num-sequences 8",
        "sudo odriver reboot",
        "ODRIVER_BIND=x odriver complete hello --top-p much",
        "true && odriver top | cat --nothing; sh -c 'odriver status --xml'",
        "scripts/run --web --port 8000",
        "scripts/bench everything",
        "scripts/no_such_script",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    """Wherever it stands in a line."""
    with pytest.raises(WrongCommand):
        check(command)


def mistake(command: str) -> str | None:
    """What is wrong with it."""
    try:
        check(command)
    except WrongCommand as error:
        return str(error)
    return None


def headings(path: Path) -> list[str]:
    """Of a page, as links name them."""
    titles = re.findall(r"^#+ (.*)$", pages.FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles]
