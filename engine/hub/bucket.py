"""The small files of a model in a bucket. Its weights are read where they are."""

import os
from pathlib import Path

from caching.cache_directory import cache_home
from engine.errors import ConfigurationError
from engine.hub.names import bucket_parts
from engine.hub.small_files import SMALL_FILES, is_small
from engine.models.weights.sources.bucket_source import bucket_errors, bucket_path
from engine.models.weights.sources.checkpoint import INDEX_FILE, SINGLE_FILE

_FOLDERS = tuple(pattern.rpartition("/")[0] for pattern in SMALL_FILES if "/" in pattern)
"""Those in a model's directory that have some of them."""


def copy_small(url: str) -> Path:
    """A local directory with the small files of one in a bucket, as they are now.

    Raises ConfigurationError, and DownloadFailed if another attempt may succeed.
    """
    parts = bucket_parts(url)
    if parts is None:
        raise ConfigurationError(f"{url} is no directory in a bucket: they are like gs://BUCKET/DIRECTORY")
    local = cache_home().joinpath("buckets", *parts)
    with bucket_errors(url):
        listed = {path.name: path for path in bucket_path(url).iterdir()}
        for folder in _FOLDERS:
            listed |= {f"{folder}/{path.name}": path for path in (bucket_path(url) / folder).iterdir()}
        files = {name: path for name, path in listed.items() if is_small(name)}
        if SINGLE_FILE in listed:  # the index is not read, as in weight_names
            files.pop(INDEX_FILE, None)
        if "config.json" not in files:
            raise ConfigurationError(f"{url} has no config.json: give the directory of a model in the bucket")
        for name, path in files.items():
            _replace(local / name, path.read_bytes())
    for old in (old for folder in ("", *_FOLDERS) for old in (local / folder).glob("[!.]*")):
        if old.is_file() and str(old.relative_to(local)) not in files:
            old.unlink(missing_ok=True)
    return local


def _replace(path: Path, content: bytes) -> None:
    """Hidden until it is whole: another process that starts with the same model removes files of other names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_bytes(content)
    new.replace(path)
