"""What an earlier start has compiled, a later one reads."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from checkpoints import build_checkpoint
from jax.experimental.compilation_cache import compilation_cache

from engine.build import build_engine
from engine.config import EngineConfig
from engine.oengine import oEngine
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.step import execution_manager
from engine.step.executables import identity, stored
from engine.step.executables.compilation_cache import use_compilation_cache
from engine.step.executables.stored import PREFIX, StoredExecutables

PARAMS = (SamplingParams(temperature=0, logprobs=2), SamplingParams(temperature=1, top_p=0.9, presence_penalty=1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of one layer."""
    return build_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(autouse=True)
def cache(tmp_path):
    """A directory for JAX's cache, for one test."""
    before, is_enabled = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    use(tmp_path / "cache")
    yield tmp_path / "cache"
    jax.config.update("jax_enable_compilation_cache", is_enabled)
    use(before)


def use(directory: Path | str) -> None:
    """For JAX's cache."""
    jax.config.update("jax_compilation_cache_dir", str(directory))
    compilation_cache.reset_cache()


@pytest.fixture
def compiled(monkeypatch):
    """The programs that were traced, as (name, size)."""
    found: list[tuple[str, int]] = []
    compile_program = execution_manager.compile_program

    def listed(program, check, identity):
        found.append((program.name, program.size))
        return compile_program(program, check, identity)

    monkeypatch.setattr(execution_manager, "compile_program", listed)
    return found


def start(checkpoint: Path, **settings) -> oEngine:
    """An engine of one bucket."""
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "page_size": 4, "num_pages": 16} | settings
    return build_engine(EngineConfig(model=str(checkpoint), **settings), lambda _: None, keep_executables=True)


def text(engine: oEngine) -> list[tuple[list[int], object]]:
    """What it says, with log-probabilities."""
    said = []
    for params in PARAMS:
        engine.add(Sequence("", [5, 6, 7], params, frozenset(), 8, seed=3))
        while engine.has_work:
            said += [(output.token_ids, output.logprobs) for output in engine.step()]
    return said


def test_a_second_start_traces_nothing_and_says_the_same(checkpoint, compiled):
    """All programs are read, the donated arrays among their arguments are written in place, and nothing is compiled
    while it serves."""
    first = text(start(checkpoint))
    traced = list(compiled)
    compiled.clear()

    engine = start(checkpoint)

    assert len(traced) > 10 and not compiled
    assert text(engine) == first
    assert engine.stats().compilations_after_ready == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"quantization": "int8", "max_num_seqs": 3, "max_num_batched_tokens": 8},
        {"enable_lora": True},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}', "max_num_batched_tokens": 4},
        {"host_cache_gib": 0.001},
    ],
    ids=str,
)
def test_every_kind_of_program_is_kept(checkpoint, compiled, settings):
    """On one device and on several."""
    first = text(start(checkpoint, **settings))
    compiled.clear()

    assert text(start(checkpoint, **settings)) == first
    assert not compiled


def test_what_cannot_be_read_is_compiled_again(tmp_path, caplog):
    """As a file of another user, or of a storage that is away; it ended the start in a traceback."""
    (tmp_path / "step-1").mkdir()

    assert StoredExecutables(tmp_path, tuple(jax.devices())).read("step", 1) is None

    assert f"{tmp_path / 'step-1'} cannot be read (Is a directory): step is compiled again" in caplog.text


def test_what_jax_could_not_write_is_written_by_a_later_start(checkpoint, cache):
    """As after a full disk: its entries were empty for good, and each start warned of them and compiled."""
    start(checkpoint)
    entries = sorted(cache.glob("*-cache"))
    for entry in entries:
        entry.write_bytes(b"")
    jax.clear_caches()
    compilation_cache.reset_cache()

    start(checkpoint)

    assert entries
    assert all(entry.stat().st_size for entry in cache.glob("*-cache"))


def test_what_another_user_has_made_is_not_read(tmp_path, monkeypatch):
    """Pickles run what they say; root's are no danger."""
    StoredExecutables(tmp_path, tuple(jax.devices()))
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)

    with pytest.raises(PermissionError, match="it belongs to another user"):
        StoredExecutables(tmp_path, tuple(jax.devices()))


def test_jax_reads_nothing_that_another_user_has_made(cache, monkeypatch, caplog):
    """Its entries are programs of the machine; where the operator has named the directory they are the operator's."""
    own = cache / "odriver" / "xla"
    own.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    os.chown(own, os.getuid() or 54321, -1)
    before = jax.config.jax_enable_compilation_cache
    use_compilation_cache()
    assert jax.config.jax_enable_compilation_cache == before
    jax.config.update("jax_compilation_cache_dir", None)

    use_compilation_cache()

    assert not jax.config.jax_enable_compilation_cache
    assert f"JAX's cache in {own} is not used (it belongs to another user" in caplog.text


def test_where_jax_uses_no_cache_nothing_is_kept(checkpoint, cache):
    """As in another user's directory: who has it may replace ours in it at any time."""
    jax.config.update("jax_enable_compilation_cache", False)

    start(checkpoint)

    assert not list(cache.glob(f"{PREFIX}*"))


@pytest.mark.thorough
def test_what_is_damaged_is_compiled_again(checkpoint, compiled, cache, caplog):
    """Alone, with a warning that names it. What JAX's own cache has of it is not stored: it could not be read."""
    first = text(start(checkpoint))
    (directory,) = cache.glob(f"{PREFIX}*")
    damaged, cut_off = directory / "step-1", directory / "draw-1"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    cut_off.write_bytes(cut_off.read_bytes()[:100])
    compiled.clear()

    with caplog.at_level(logging.WARNING):
        assert text(start(checkpoint)) == first

    assert sorted(compiled) == [("draw", 1), ("step", 1)]
    assert {str(path) for path in (damaged, cut_off) if str(path) in caplog.text} == {str(damaged), str(cut_off)}
    for path in cache.glob("*-cache"):
        path.unlink()
    start(checkpoint)
    compiled.clear()
    assert text(start(checkpoint)) == first
    assert not compiled


@pytest.mark.thorough
def test_a_start_that_differs_compiles_its_own(checkpoint, compiled, monkeypatch, tmp_path):
    """By a setting, another model, a compiler's flag, a source file or a version; a name alone makes no difference.

    Once: JAX's cache has the same programs of the start before, and gives none that cannot be stored.
    """
    start(checkpoint)
    other = build_checkpoint(tmp_path / "other", num_hidden_layers=1, rope_theta=5.0)

    def compiles(**settings) -> bool:
        compiled.clear()
        start(settings.pop("model", checkpoint), **settings)
        return bool(compiled)

    assert not compiles(served_model_name=("another",))
    assert compiles(max_model_len=20)
    assert compiles(model=other)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_parallel_codegen_split_count=2")
        assert compiles()
    with monkeypatch.context() as patch:
        patch.setattr(identity, "version", lambda package: f"{package} 0.0")
        assert compiles()
    source = tmp_path / "engine"
    source.mkdir()
    (source / "step.py").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(identity.engine, "__file__", str(source / "__init__.py"))
        assert compiles()
        assert not compiles()
        (source / "step.py").write_text("print()")
        assert compiles()
    assert not compiles()


@pytest.mark.thorough
def test_another_process_has_the_same_identity(checkpoint, cache):
    """Nothing in it is an address, or an order that changes from one process to the next; and all kernels of our own
    are registered before the executables that call them are read."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); from test_stored_executables import start; from pathlib import Path;"
        "start(Path(sys.argv[1]), enable_lora=True, max_num_batched_tokens=4,"
        """speculative_config='{"method": "ngram", "num_speculative_tokens": 2}')"""
    )
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    for seed in "12":
        ended = subprocess.run(
            [sys.executable, "-c", code, str(checkpoint)],
            env=environment | {"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True,
        )  # fmt: skip

    assert len(list(cache.glob(f"{PREFIX}*"))) == 1
    assert "compiled again" not in ended.stderr


@pytest.mark.thorough
def test_few_identities_stay_on_disk(checkpoint, cache, monkeypatch):
    """Those used last."""
    monkeypatch.setattr(stored, "KEPT", 2)
    for length in (20, 24, 20, 28):
        start(checkpoint, max_model_len=length)
    kept = set(cache.glob(f"{PREFIX}*"))

    start(checkpoint, max_model_len=20)

    assert len(kept) == 2 and set(cache.glob(f"{PREFIX}*")) == kept


@pytest.mark.thorough
def test_a_disk_that_fills_up_costs_time_alone(checkpoint, cache, compiled, monkeypatch, caplog):
    """The engine is as ever, nothing half written stays, and the log says so once."""

    def cut_off(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(stored.Path, "write_bytes", cut_off)
        start(checkpoint)

    assert len(compiled) > 1 and caplog.text.count("cannot be kept on disk, and nor may others: [Errno 28]") == 1
    (directory,) = cache.glob(f"{PREFIX}*")
    assert not list(directory.iterdir())


@pytest.mark.thorough
@pytest.mark.skipif(not os.geteuid(), reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_costs_time_alone(checkpoint, cache, compiled, caplog):
    """The engine is as ever, and the log says why a start is slow."""
    cache.mkdir()
    cache.chmod(0o500)

    with caplog.at_level(logging.WARNING):
        start(checkpoint)

    assert compiled and "cannot be kept" in caplog.text
