"""What a tree of this project's source looks like in figures, and how many modules a request and a step run through."""

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from pathlib import Path
from statistics import median, quantiles
from textwrap import wrap

ROOT = Path(__file__).parent.parent
PRODUCTION = ("caching", "engine", "driver", "ipc", "odriver")
MOST_MODULES = 15  # of a folder
MOST_LINES = 300  # of a module
PROSE_COLUMNS = 100
COLUMN = 46  # characters of a column of the table
PARAMETER = re.compile("qkv|q_proj")
"""The parameter of the model whose declarations are counted."""
DIRECTIVE = re.compile("# (type|fmt|noqa)\\b")
"""A comment that is for a tool."""
ARRAY = re.compile(r"Array|ndarray")
SHAPE = re.compile(r"\w\[[^\]]+\]")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Figures = dict[str, str]


@dataclass
class Module:
    """One Python file of a tree."""

    path: Path
    """From the root of the tree."""
    text: str

    @property
    def name(self) -> str:
        """As it is imported."""
        return ".".join(self.path.with_suffix("").parts)

    @property
    def is_init(self) -> bool:
        """Whether it is an ``__init__.py``."""
        return self.path.stem == "__init__"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Everything in its syntax tree."""
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def lines(self) -> list[str]:
        """Its lines, without their ends."""
        return self.text.splitlines()

    @cached_property
    def docstring_lines(self) -> set[int]:
        """The numbers of the lines of docstrings, those of attributes included."""
        values = (node.value for node in self.nodes if isinstance(node, ast.Expr))
        texts = [node for node in values if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        return {number for node in texts for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}

    @cached_property
    def comments(self) -> set[int]:
        """The numbers of the lines that have a comment for people."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        comments = (token for token in tokens if token.type == tokenize.COMMENT)
        return {comment.start[0] for comment in comments if not DIRECTIVE.match(comment.string)}

    @cached_property
    def code_lines(self) -> list[str]:
        """The lines that are neither blank nor comments nor docstrings."""
        numbered = enumerate(self.lines, 1)
        code = [line for number, line in numbered if number not in self.docstring_lines]
        return [line for line in code if line.strip() and not line.lstrip().startswith("#")]

    @property
    def long_prose(self) -> int:
        """How many lines of docstrings and comments go beyond PROSE_COLUMNS."""
        return sum(len(self.lines[number - 1]) > PROSE_COLUMNS for number in self.docstring_lines | self.comments)

    @property
    def functions(self) -> list[Function]:
        """Every function and method, nested ones included."""
        return [node for node in self.nodes if isinstance(node, Function)]

    def imports(self, known: set[str]) -> set[str]:
        """The names of the modules of ``known`` that it imports, anywhere in the file."""
        names = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        return names & known


def read_modules(tree: Path, name: str) -> list[Module]:
    """The modules of a package at the top of the tree, by path, or the one module of that name."""
    paths = sorted([*tree.glob(f"{name}.py"), *(tree / name).rglob("*.py")])
    return [Module(path.relative_to(tree), path.read_text()) for path in paths]


def survey(tree: Path) -> Figures:
    """The figures of a tree's text, by what they are called."""
    packages = {name: read_modules(tree, name) for name in PRODUCTION}
    production = [module for modules in packages.values() for module in modules]
    return {
        **_sizes(tree, packages, production),
        **_imports(packages),
        **_words(production),
        **_functions(production),
        f"prose lines beyond column {PROSE_COLUMNS}": str(sum(module.long_prose for module in production)),
        f"files that name {PARAMETER.pattern}": str(sum(map(_names_the_parameter, production))),
    }


def _sizes(tree: Path, packages: dict[str, list[Module]], production: list[Module]) -> Figures:
    figures = {}
    for name, modules in [*packages.items(), ("production", production)]:
        lines = sum(len(module.lines) for module in modules)
        code = sum(len(module.code_lines) for module in modules)
        figures[f"lines of {name}, with no comment or blank"] = f"{lines:,} {code:,}"
    for name in ("tests", "scripts"):
        figures[f"lines of {name}"] = f"{sum(len(module.lines) for module in read_modules(tree, name)):,}"
    folders = Counter(str(module.path.parent) for module in production if not module.is_init)
    figures["modules"] = str(folders.total())
    figures |= {f"modules in {folder}": str(count) for folder, count in sorted(folders.items())}
    full = [folder for folder, count in folders.items() if count > MOST_MODULES]
    figures[f"folders of more than {MOST_MODULES}"] = str(len(full))
    long = [module for module in production if len(module.lines) > MOST_LINES]
    figures[f"files of more than {MOST_LINES} lines"] = str(len(long))
    return figures


def _imports(packages: dict[str, list[Module]]) -> Figures:
    figures = {}
    known = {module.name for modules in packages.values() for module in modules if not module.is_init}
    arrows = {
        module.name: module.imports(known) - {module.name}
        for modules in packages.values()
        for module in modules
        if not module.is_init
    }
    for name in packages:
        own = {module: {to for to in targets if _top(to) == name} for module, targets in arrows.items()}
        inside = {module: targets for module, targets in own.items() if _top(module) == name}
        count = sum(map(len, inside.values()))
        figures[f"floors and arrows in {name}"] = f"{_longest_chain(inside)} {count}"
    between = {(_wing(module), _wing(to)) for module, targets in arrows.items() for to in targets}
    figures["arrows between folders"] = str(len([pair for pair in between if pair[0] != pair[1]]))
    figures["circles of modules"] = str(_circles(arrows))
    return figures


def _top(module: str) -> str:
    return module.partition(".")[0]


def _wing(module: str) -> str:
    return module.rpartition(".")[0]


def _longest_chain(arrows: dict[str, set[str]]) -> int:
    """Modules on the longest chain of imports; 0 where there is a circle."""
    heights: dict[str, int] = {}
    try:
        for module in TopologicalSorter(arrows).static_order():
            heights[module] = 1 + max((heights[to] for to in arrows.get(module, ())), default=0)
    except CycleError:
        return 0
    return max(heights.values(), default=0)


def _circles(arrows: dict[str, set[str]]) -> int:
    """How many arrows must be taken away, one of each circle that is found, until there is no circle."""
    arrows = {module: set(targets) for module, targets in arrows.items()}
    for number in range(sum(map(len, arrows.values())) + 1):
        try:
            TopologicalSorter(arrows).prepare()
        except CycleError as error:
            target, module = error.args[1][:2]  # each is imported by the next
            arrows[module].remove(target)
        else:
            return number
    raise AssertionError("no arrow is left, but a circle")


def _words(production: list[Module]) -> Figures:
    stems = Counter(module.path.stem for module in production if not module.is_init)
    classes = Counter(node.name for module in production for node in module.nodes if isinstance(node, ast.ClassDef))
    return {
        "base names of several modules": _repeated(stems),
        "names of several classes": _repeated(classes),
    }


def _repeated(names: Counter[str]) -> str:
    repeated = sorted(name for name, count in names.items() if count > 1)
    return " ".join([str(len(repeated)), *repeated])


def _functions(production: list[Module]) -> Figures:
    functions = [function for module in production for function in module.functions]
    lengths = [(function.end_lineno or function.lineno) - function.lineno + 1 for function in functions]
    cuts = quantiles(lengths, n=100) if len(lengths) > 1 else lengths * 99
    over_arrays = [function for function in functions if ARRAY.search(_annotations(function))]
    with_shapes = [function for function in over_arrays if SHAPE.search(ast.get_docstring(function) or "")]
    return {
        "functions": str(len(functions)),
        "lines of one: median p90 p99 max": f"{median(lengths):.0f} {cuts[89]:.0f} {cuts[98]:.0f} {max(lengths)}",
        "functions over arrays that say shapes": f"{len(with_shapes)} of {len(over_arrays)}",
    }


def _annotations(function: Function) -> str:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    hints = [argument.annotation for argument in every] + [function.returns]
    return " ".join(ast.unparse(hint) for hint in hints if hint)


def _names_the_parameter(module: Module) -> bool:
    return bool(PARAMETER.search("\n".join(module.code_lines)))


def trace(tree: Path) -> Figures:
    """How many modules run functions of theirs for one completion of the shipped model, and for one step of it."""
    modules = [module for name in PRODUCTION for module in read_modules(tree, name)]
    tokenizer = next(module.name for module in modules if "class HuggingFaceTokenizer" in module.text)
    tracer = Path(__file__).with_name("trace_request.py")
    command = [sys.executable, "-P", str(tracer), str(tree), tokenizer]
    request, step = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return {"modules that a request runs": request, "modules that a step runs": step}


def trees(revisions: list[str], directory: Path) -> Iterator[tuple[str, Path]]:
    """The name and the root of each tree: of this one as it is, where no revision is given."""
    if not revisions:
        yield "this tree", ROOT
    for number, revision in enumerate(revisions):
        tree = directory / str(number)
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(tree, filter="data")
        yield revision, tree


def table(columns: dict[str, Figures]) -> str:
    """A line for each figure, a column for each tree, and a dash for what a tree has not."""
    labels = dict.fromkeys(label for figures in reversed(columns.values()) for label in figures)
    cells = [["", *columns], *([label, *(f.get(label, "-") for f in columns.values())] for label in labels)]
    rows = [row for cell in cells for row in zip_longest(*(wrap(text, COLUMN) for text in cell), fillvalue="")]
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns) + 1)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="scripts/survey", description=__doc__)
    parser.add_argument("revisions", nargs="*", metavar="REVISION", help="of git (default: this tree as it is)")
    parser.add_argument("--no-trace", action="store_true", help="leave out the request and the step, which are run")
    arguments = parser.parse_args()
    columns = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, tree in trees(arguments.revisions, Path(directory)):
            columns[name] = survey(tree) | ({} if arguments.no_trace else trace(tree))
    print(table(columns))


if __name__ == "__main__":
    main()
