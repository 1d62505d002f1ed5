"""Where the CPU's kernels come from: a wheel's libraries, those compiled here before, or a compiler; and for which processors."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from kernels_needed import kernels_needed

from caching import cpu_kernels, instruction_set
from caching.cache_directory import cache_home, check_owner
from caching.cpu_kernels import ATTENTION, KernelsUnavailable, compile_library, find
from caching.instruction_set import LEVELS, UnknownInstructions, available, compiler_flags
from engine.cpu_libraries import LATER, SOURCES
from ipc.commands.diagnosis import doctor

ROOT = Path(__file__).parent.parent
HASWELL = "x86_64 flags : fpu sse2 avx avx2 fma bmi1 bmi2"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
PROCESSORS = {
    "baseline": ("x86_64 flags : fpu sse2", "aarch64 Features : fp asimd sve", "aarch64", f"{HASWELL[:-5]} avx512f"),
    "avx2": (HASWELL, f"{HASWELL} avx512f avx512cd avx512er avx512pf"),
    "avx512": (SKYLAKE,),
    "avx512vnni": (f"{SKYLAKE} avx512_vnni", f"{SKYLAKE} avx512vbmi avx512_vnni avx512_bf16 amx_tile"),
}
"""Lines of /proc/cpuinfo, by the level that such a processor has."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that has compiled nothing and has no compiler, and a package with a source of its own, but no library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_kernels, "SHIPPED", tmp_path / "compiled")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    source = tmp_path / "small.cc"
    source.write_text('extern "C" int answer() { return 42; }\n')
    return source


@pytest.fixture
def with_compiler(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same machine after g++ was installed."""
    monkeypatch.undo()
    with kernels_needed():
        compiler = cpu_kernels.compiler()
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine.parent / "cache"))
    monkeypatch.setattr(cpu_kernels, "SHIPPED", machine.parent / "compiled")
    return machine


@pytest.fixture
def shipped(with_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose wheel had the library of its source for this processor, where there is no compiler."""
    library = compile_library(with_compiler, instruction_set.level(), cpu_kernels.SHIPPED)
    monkeypatch.setenv("CXX", "no-such-compiler")
    return library


@pytest.mark.parametrize(("level", "processor"), [(level, one) for level, all_ in PROCESSORS.items() for one in all_])
def test_a_processor_has_the_highest_level_whose_instructions_it_has_all_of(
    level: str, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A level is more than its name's instructions: there are processors with AVX-512 that lack most of it."""
    monkeypatch.delenv(instruction_set.VARIABLE, raising=False)
    monkeypatch.setattr(instruction_set, "processor", lambda: processor)

    assert instruction_set.level() == level
    assert available() == list(LEVELS)[: list(LEVELS).index(level) + 1]


def test_the_compiler_is_told_of_the_instructions_that_a_level_asks_for() -> None:
    """Each of them, and none that only the machine has that compiles."""
    assert compiler_flags("baseline") == ()
    assert compiler_flags("avx2") == ("-mavx2", "-mfma", "-mbmi2")
    assert set(compiler_flags("avx512vnni")) - set(compiler_flags("avx512")) == {"-mavx512vnni"}


def test_instructions_that_are_not_there_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that nothing has, and levels that this processor lacks; ``baseline`` it has."""
    monkeypatch.setenv(instruction_set.VARIABLE, "avx1024")
    with pytest.raises(
        UnknownInstructions, match="ODRIVER_CPU_ISA must be baseline, avx2, avx512 or avx512vnni, not 'avx1024'"
    ):
        instruction_set.level()
    monkeypatch.setattr(instruction_set, "processor", lambda: "x86_64 flags : fpu sse2")
    for level in list(LEVELS)[1:]:
        monkeypatch.setenv(instruction_set.VARIABLE, level)
        with pytest.raises(UnknownInstructions, match="this processor does not have"):
            instruction_set.level()
    monkeypatch.setenv(instruction_set.VARIABLE, "baseline")

    assert instruction_set.level() == "baseline"


def test_a_shipped_library_serves_where_there_is_no_compiler(shipped: Path, with_compiler: Path) -> None:
    """It is loaded as it is, and nothing is compiled."""
    assert find(with_compiler) == shipped
    assert cpu_kernels._load(with_compiler).answer() == 42
    assert not (with_compiler.parent / "cache").exists()


def test_a_library_of_an_earlier_interface_serves_and_that_of_a_later_one_does_not(
    shipped: Path, with_compiler: Path
) -> None:
    """jaxlib takes earlier versions of its foreign function interface for a year, and no later one."""
    major, minor = cpu_kernels.ffi_version()
    stem = shipped.stem.rpartition("-ffi")[0]
    earlier = shipped.rename(shipped.with_name(f"{stem}-ffi{major}.{minor - 1}.so"))

    assert find(with_compiler) == earlier

    earlier.rename(shipped.with_name(f"{stem}-ffi{major}.{minor + 1}.so"))
    assert find(with_compiler) is None


def test_a_library_of_another_source_is_not_loaded(shipped: Path, with_compiler: Path) -> None:
    """As where a wheel was made before the source was changed, or a header beside it."""
    (with_compiler.parent / "beside.h").write_text("// new\n")
    assert find(with_compiler) is None

    (with_compiler.parent / "beside.h").unlink()
    assert find(with_compiler) == shipped

    with_compiler.write_text('extern "C" int answer() { return 43; }\n')
    assert find(with_compiler) is None
    with pytest.raises(KernelsUnavailable, match="no-such-compiler"):
        cpu_kernels._load(with_compiler)


def test_a_library_that_this_system_cannot_load_is_passed_over(
    with_compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the wheel was made with a newer libc: the reason is logged, and the source is compiled here."""
    library = compile_library(with_compiler, instruction_set.level(), cpu_kernels.SHIPPED)
    library.write_bytes(b"for another system")

    loaded = cpu_kernels._load(with_compiler)

    assert loaded.answer() == 42
    found = find(with_compiler)
    assert found is not None and found.parent == with_compiler.parent / "cache" / "odriver" / "kernels"
    assert str(library) in caplog.text


def test_a_library_that_was_cut_off_is_compiled_again(with_compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where the power failed, or a copy was broken off: to load it would end the process."""
    library = compile_library(with_compiler, instruction_set.level(), cache_home() / "kernels")
    whole = library.stat().st_size
    os.truncate(library, whole - 1)

    assert cpu_kernels._load(with_compiler).answer() == 42

    assert caplog.messages == [f"{library} was cut off"]
    assert find(with_compiler) == library and library.stat().st_size == whole


def test_a_library_that_was_compiled_here_needs_no_compiler_any_more(
    with_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start finds the library of the first."""
    cpu_kernels._load(with_compiler)
    monkeypatch.setenv("CXX", "no-such-compiler")

    assert cpu_kernels._load(with_compiler).answer() == 42


def test_a_cache_that_may_not_be_entered_has_no_library(with_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of another user, whose HOME a process has kept; to compile into it is refused with the remedy."""
    glob = Path.glob

    def refused(path: Path, pattern: str) -> Iterator[Path]:
        if path.name == "kernels":
            raise PermissionError(13, "Permission denied", str(path))
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", refused)

    assert find(with_compiler) is None


def test_a_cache_that_another_user_has_made_is_neither_loaded_from_nor_compiled_into(
    with_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library runs what it says; root's are no danger."""
    kernels = compile_library(with_compiler, instruction_set.level(), cache_home() / "kernels").parent
    if os.geteuid() == 0:
        os.chown(kernels, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)

    with pytest.raises(KernelsUnavailable, match=r"belongs to another user, .*: set XDG_CACHE_HOME"):
        cpu_kernels._load(with_compiler)


def test_a_link_of_another_user_is_theirs_wherever_it_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one to root's directory of temporary files, where they may write."""
    (link := tmp_path / "link").symlink_to("/")
    check_owner(link)
    if os.geteuid() == 0:
        os.lchown(link, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)

    with pytest.raises(PermissionError, match="belongs to another user"):
        check_owner(link)


def test_a_cache_in_which_every_user_may_write_is_not_loaded_from(with_compiler: Path) -> None:
    """Ours though it is: whoever writes there first says what is run. That a directory is sticky keeps what is there,
    and nothing from coming."""
    kernels = compile_library(with_compiler, instruction_set.level(), cache_home() / "kernels").parent
    for mode in (0o777, 0o1777):
        kernels.chmod(mode)
        with pytest.raises(KernelsUnavailable, match=r"every user may write in it.*: set XDG_CACHE_HOME"):
            cpu_kernels._load(with_compiler)
    kernels.chmod(0o775)  # with a group of one's own, as many systems give each user

    assert cpu_kernels._load(with_compiler).answer() == 42


@pytest.mark.usefixtures("machine")
def test_the_doctor_says_which_kernels_a_start_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None, those that the first start will compile, those that one has compiled, or those of the wheel."""
    level, there = instruction_set.level(), tmp_path / "library.so"
    for found, library, compiler in (
        ("none for {}, and no C++ compiler on the PATH", None, None),
        ("for {}: the first start compiles them, by /bin/c++", None, "/bin/c++"),
        ("for {}, compiled on this machine", there, None),
        ("for {}, shipped", cpu_kernels.SHIPPED / "library.so", None),
    ):
        with monkeypatch.context() as here:
            here.setattr(cpu_kernels, "find", lambda _, library=library: library)
            if compiler:
                here.setattr(cpu_kernels, "compiler", lambda compiler=compiler: compiler)
            check, state, said, advice = doctor.kernels()
        assert (check, state) == ("kernels", "warning" if library is None and compiler is None else "good")
        assert said.startswith(found.format(level)) and bool(advice) is (state == "warning")
    monkeypatch.setenv(instruction_set.VARIABLE, "sse")
    assert doctor.kernels().state == "bad"


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A clone, in which a build needs no time: its compiler writes the names of the source and the level's last flag."""
    pytest.importorskip("setuptools")
    for name in ("setup.py", "setup.cfg", "odriver.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for package in ("caching", "engine"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "demo*"))
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" >"$last"\n')
    compiler.chmod(0o755)
    return tmp_path


def build_all(clone: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    """``python setup.py build``, as a build of a wheel does it."""
    command = [sys.executable, "setup.py", "build", "--build-lib", "out"]
    environment = {"PATH": "/usr/bin:/bin", "CXX": compiler}
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=True)


def test_a_wheel_has_the_libraries_that_a_start_looks_for(build: Path) -> None:
    """One of each source for each level of this architecture, and nothing of an earlier build."""
    compiled, removed = build / "out" / "caching" / "cpu" / "compiled", build / "out" / "caching" / "removed.py"
    compiled.mkdir(parents=True)
    (compiled / "attention-avx2-0-ffi0.1.so").touch()
    removed.touch()

    build_all(build, str(build / "c++"))

    assert not removed.exists() and (build / "out" / "caching" / "cpu_kernels.py").exists()
    version = ".".join(map(str, cpu_kernels.ffi_version()))
    levels = instruction_set.of_architecture()
    assert sorted(path.name for path in compiled.iterdir()) == sorted(
        f"{cpu_kernels._stem(source, level)}-ffi{version}.so" for source, level in product((*SOURCES, *LATER), levels)
    )
    for library in compiled.iterdir():
        name, level, *_ = library.name.split("-")
        words = library.read_text().split()
        assert set(compiler_flags(level)) <= set(words) and any(word.endswith(f"/{name}.cc") for word in words)


@pytest.mark.thorough
def test_a_wheel_that_is_built_without_a_compiler_has_none_and_the_build_says_so(build: Path) -> None:
    """It is for any machine then; that is no fault."""
    done = build_all(build, "no-such-compiler")

    assert "no C++ compiler no-such-compiler" in done.stdout + done.stderr
    assert not (build / "out" / "caching" / "cpu" / "compiled").exists()


def test_where_nothing_can_be_written_the_remedy_is_said(tmp_path):
    """As where a service has no home; XLA's operations serve then."""
    (tmp_path / "file").write_text("")

    with pytest.raises(KernelsUnavailable, match=r"file/kernels cannot be written .*: set XDG_CACHE_HOME"):
        compile_library(ATTENTION, "baseline", tmp_path / "file" / "kernels")


def test_a_process_that_ends_ends_its_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what does their work; nothing unfinished is left."""
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\nsleep 600\nexit 1\n")
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(cpu_kernels, "_compilers", pool := ThreadPoolExecutor(1))
    kernels = tmp_path / "kernels"
    compiling = pool.submit(compile_library, ATTENTION, "baseline", kernels)
    workers: list[int] = []
    while not workers and not compiling.done():
        workers = [
            child
            for each in tuple(cpu_kernels._running)
            for child in cpu_kernels._workers(each.pid)
            if child != each.pid
        ]

    cpu_kernels.stop_compilers()

    assert isinstance(compiling.exception(), KernelsUnavailable)
    assert workers and not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert not [*kernels.iterdir()]


def test_several_that_compile_at_once_each_have_a_library(with_compiler: Path, tmp_path: Path) -> None:
    """Containers that share a cache have the same process ids; nothing unfinished is left."""
    shared = tmp_path / "shared"
    (shared / "unfinished-old").mkdir(parents=True)
    os.utime(shared / "unfinished-old", (0, 0))  # of a process that was killed
    with ThreadPoolExecutor(3) as pool:
        libraries = list(pool.map(lambda _: compile_library(with_compiler, "baseline", shared), range(3)))

    assert [*shared.iterdir()] == [libraries[0]] == libraries[1:2] == libraries[2:]
