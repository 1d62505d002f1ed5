"""Modules of transformers without its package, whose import is more work than all of a tokenizer's.

``transformers/__init__.py`` reads the 1,600 sources of its models in every process, to know what each of
them has. The modules that a tokenizer is made of import each other by name, and need none of that.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType

PACKAGE = "transformers"


def transformers_module(name: str) -> ModuleType:
    """The module of this name in transformers, as any later import of it gets it.

    The package is executed only where it has been, or where the module turns out to need it. Nothing
    else imports it while the first call runs.
    """
    if (known := sys.modules.get(f"{PACKAGE}.{name}")) is not None:
        return known
    try:
        with _package_left_out():
            return importlib.import_module(f"{PACKAGE}.{name}")
    except (ImportError, AttributeError):
        return importlib.import_module(f"{PACKAGE}.{name}")


@contextmanager
def _package_left_out() -> Iterator[None]:
    """Meanwhile the package is there for its modules to be found in, and is not executed. Who imports
    it later executes it."""
    spec = None if PACKAGE in sys.modules else importlib.util.find_spec(PACKAGE)
    if spec is None:
        yield
        return
    bare = importlib.util.module_from_spec(spec)
    bare.__dict__["__version__"] = version(PACKAGE)
    sys.modules[PACKAGE] = bare
    try:
        yield
    finally:
        del sys.modules[PACKAGE]
