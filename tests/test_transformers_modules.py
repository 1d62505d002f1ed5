"""Modules of transformers are imported without their package, which executes more than they need."""

import subprocess
import sys
from pathlib import Path

import pytest

from driver.text import transformers_modules
from driver.text.transformers_modules import transformers_module

DEMO = Path(__file__).parent.parent / "engine" / "models" / "demo"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in the place of transformers, of which nothing is imported yet or stays."""
    name, before = "odriver_test_package", set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(transformers_modules, "PACKAGE", name)
    monkeypatch.setattr(transformers_modules, "version", lambda _: "5.0")
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("executed = True\n__version__ = '5.0'\n")
    yield tmp_path / name
    for module in set(sys.modules) - before:
        del sys.modules[module]


def test_a_module_is_had_without_its_package(package):
    """It finds those that it imports, and the version; who imports the package later gets both."""
    (package / "other.py").write_text("")
    (package / "part.py").write_text("from . import __version__, other")

    part = transformers_module("part")

    assert part.__version__ == "5.0" and package.name not in sys.modules
    assert __import__(package.name).executed
    assert transformers_module("part") is part


def test_a_module_that_needs_its_package_gets_it(package):
    """As another version's may."""
    (package / "part.py").write_text("from . import executed")

    assert transformers_module("part").executed


def test_a_tokenizer_needs_no_more_than_modules():
    """To load it, to encode and to render, in a process that has imported nothing yet."""
    program = f"""
import sys
from pathlib import Path
from driver.text.conversation import checked_chat
from driver.text.tokenizer import HuggingFaceTokenizer
tokenizer = HuggingFaceTokenizer(Path({str(DEMO)!r}))
text = tokenizer.render(checked_chat([{{"role": "user", "content": "hello"}}], None, None))
assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
sys.exit("transformers" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], cwd=DEMO.parents[2], check=True)
