"""What a step's executables are made from, as one number.

Two starts have the same executables if all of these are equal: oDriver's sources and the versions of
what compiles them, the settings of JAX and XLA, the machine, and all that an ExecutionManager is
made from.
"""

import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax
from flax import nnx

import caching
import engine
from caching.instruction_set import processor
from engine.models.weights.store import AnyDecoder
from engine.served_model import Decoders, ServedModel, without_addresses
from engine.step.executables.stored import PREFIX, StoredExecutables
from engine.step.step_shapes import StepShapes

logger = logging.getLogger(__name__)

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
SETTINGS = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "NPROC")
"""How the names of environment variables begin that compilers read."""
CACHE = "jax_compilation_cache_dir"
SOURCES = (".py", ".cc", ".h")


def stored_executables(served: ServedModel, decoders: Decoders, shapes: StepShapes) -> StoredExecutables | None:
    """Those of earlier starts that had the same identity, in the directory of JAX's cache; None where
    that is not used, is no directory of this machine, or cannot be written."""
    cache: str = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if "://" in cache or not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return None
    directory = Path(cache, f"{PREFIX}{identity(served, decoders, shapes)}")
    try:
        return StoredExecutables(directory, served.mesh.devices)
    except OSError as error:
        logger.warning("executables cannot be kept in %s: %s", directory, error)
        return None


def identity(served: ServedModel, decoders: Decoders, shapes: StepShapes) -> str:
    """In hexadecimal."""
    digest = hashlib.sha256()
    for part in _parts(served, decoders, shapes):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _parts(served: ServedModel, decoders: Decoders, shapes: StepShapes) -> Iterator[bytes]:
    for package in (engine, caching):
        yield from _sources(Path(str(package.__file__)).parent)
    client = served.mesh.devices[0].client
    texts = [
        sys.version,
        *(version(package) for package in PACKAGES),
        *(
            f"{name}={value}"
            for name, value in sorted(os.environ.items())
            if name.startswith(SETTINGS) and name != CACHE.upper()
        ),
        *(f"{name}={value!r}" for name, value in sorted(jax.config.values.items()) if name != CACHE),
        processor(),
        client.platform_version,
        *(f"{device.device_kind} {device.id}" for device in jax.devices()),
        *(str(device.id) for device in served.mesh.devices),
        _described(served),
        repr(shapes),
        *_weights(decoders.model),
        *(() if decoders.draft is None else _weights(decoders.draft)),
    ]
    yield from (text.encode() for text in texts)


def _sources(package: Path) -> Iterator[bytes]:
    for path in sorted(package.rglob("*")):
        if path.suffix in SOURCES:
            yield str(path.relative_to(package)).encode()
            yield path.read_bytes()


def _described(served: ServedModel) -> str:
    """What its programs depend on, but for the addresses of functions, whose sources are in the
    identity."""
    fields = served.partition, served.backend, served.page_size, served.dtype, served.kv_dtype, served.quantization
    return without_addresses(repr(fields)) + ("" if served.draft is None else _described(served.draft))


def _weights(decoder: AnyDecoder) -> Iterator[str]:
    """The tree of a decoder's weights, with the forms of the quantised ones, and of each array its
    shape, dtype and sharding."""
    leaves, tree = jax.tree_util.tree_flatten(nnx.state(decoder))
    yield without_addresses(str(tree))
    for leaf in leaves:
        yield f"{leaf.shape} {leaf.dtype} {leaf.sharding}"
