"""JAX's own cache on disk of what XLA has compiled."""

import logging
from contextlib import suppress
from pathlib import Path

import jax

from caching.cache_directory import cache_home, check_owner, not_used

logger = logging.getLogger(__name__)


def use_compilation_cache() -> None:
    """Cache compiled steps on disk, in JAX_COMPILATION_CACHE_DIR or under XDG_CACHE_HOME."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        own = cache_home() / "xla"
        jax.config.update("jax_compilation_cache_dir", str(own))
        try:
            check_owner(own)
        except PermissionError as error:
            logger.warning("JAX's cache in %s", not_used(own, error))
            jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _forget_empty_entries(Path(jax.config.jax_compilation_cache_dir))  # type: ignore[attr-defined]


def _forget_empty_entries(cache: Path) -> None:
    """Delete those that a full disk or a power cut has left: JAX never writes an entry again whose file
    is there, and each start would warn of it and compile its function."""
    with suppress(OSError):  # it may not be read, or another start has deleted one
        for entry in cache.glob("*-cache"):
            if not entry.stat().st_size:
                entry.unlink()
