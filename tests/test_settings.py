"""What holds for a daemon, and whence."""

import json
import os
from dataclasses import fields
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from ipc.commands import cli
from ipc.service import settings
from ipc.service.configuration import DaemonConfig
from ipc.service.http_config import HttpConfig
from ipc.service.settings import SETTINGS, SettingValue
from ipc.wire import configured
from ipc.wire.addresses import default_address


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable, and no file but those that a test writes."""
    for name in [name for name in os.environ if name.startswith(settings.PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(configured, "files", lambda: [tmp_path / "mine.toml", tmp_path / "machine.toml"])


def held(**flags: object) -> dict[str, SettingValue]:
    """What holds that is no default."""
    return {name: one for name, one in settings.held(flags).items() if one.whence != "default"}


def test_a_field_of_a_configuration_is_a_flag_a_variable_and_a_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is added to EngineConfig or DaemonConfig is in all three, and in what ``odriver config`` prints."""
    samples = {
        int: ("7", 7),
        float: ("0.5", 0.5),
        bool: ("true", True),
        Path: ("/m", Path("/m")),
        settings.STRINGS: ("a,b", ("a", "b")),
    }
    for setting in SETTINGS.values():
        text, value = samples.get(
            setting.type, (setting.choices[0], setting.choices[0]) if setting.choices else ("s", "s")
        )
        (tmp_path / "one.toml").write_text(
            f"{setting.name} = {json.dumps(str(value) if setting.type is Path else value)}"
        )

        assert held(config=tmp_path / "one.toml") == {setting.name: SettingValue(value, str(tmp_path / "one.toml"))}
        with monkeypatch.context() as context:
            context.setenv(setting.variable, text)
            assert held() == {setting.name: SettingValue(value, setting.variable)}
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    listed = capsys.readouterr().out
    assert cli.main(["config", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)

    assert list(printed) == [
        field.name for config in (EngineConfig, DaemonConfig, HttpConfig) for field in fields(config) if field.metadata
    ]
    assert all(setting.flag in listed for setting in SETTINGS.values() if setting.name != "model")


def test_a_flag_comes_before_a_variable_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the user's file instead of the machine's; each value is said to be from where it is from."""
    (tmp_path / "machine.toml").write_text("page_size = 1\nmax_num_seqs = 1")
    (tmp_path / "mine.toml").write_text("page_size = 2\nnum_pages = 20\nrun_ahead = 2")
    monkeypatch.setenv("ODRIVER_RUN_AHEAD", "3")
    monkeypatch.setenv("ODRIVER_NUM_PAGES", "30")
    monkeypatch.setenv("ODRIVER_DTYPE", "")

    assert cli.main(["config", "--json", "--num-pages", "40", "--staged-readiness"]) == 0

    printed = json.loads(capsys.readouterr().out)
    assert {name: (one["value"], one["whence"]) for name, one in printed.items() if one["whence"] != "default"} == {
        "page_size": (2, str(tmp_path / "mine.toml")),
        "run_ahead": (3, "ODRIVER_RUN_AHEAD"),
        "num_pages": (40, "--num-pages"),
        "staged_readiness": (True, "--staged-readiness"),
    }


def test_settings_are_shown_as_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Name, value and whence."""
    monkeypatch.setenv("ODRIVER_PAGE_SIZE", "32")

    assert cli.main(["config"]) == 0

    rows = capsys.readouterr().out.splitlines()
    assert any(all(word in row for word in ("page_size", "32", "ODRIVER_PAGE_SIZE")) for row in rows)
    assert any("max_num_batched_tokens" in row and "512" in row and "default" in row for row in rows)


def test_a_setting_may_be_several_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words on a command line, an array in a file, and separated by commas in a variable, but not within JSON."""
    file = tmp_path / "one.toml"
    file.write_text("served_model_name = ['a', 'b']")
    assert settings.held({"config": file})["served_model_name"].value == ("a", "b")
    monkeypatch.setenv("ODRIVER_SERVED_MODEL_NAME", "c, d/e")
    assert settings.held({})["served_model_name"].value == ("c", "d/e")
    objects = ('{"name": "a", "path": "/p,q"}', "b=/c", '{"name": "{d", "path": "/e"}')
    monkeypatch.setenv("ODRIVER_LORA_MODULES", ", ".join(objects))
    assert settings.held({})["lora_modules"].value == objects
    monkeypatch.setenv("ODRIVER_LORA_MODULES", '{"name": "a", "path"')
    assert settings.held({})["lora_modules"].value == ('{"name": "a"', '"path"')
    options = vars(cli.parser().parse_args(["serve", "model", "--served-model-name", "f", "g"]))
    assert settings.held({"served_model_name": options["served_model_name"]})["served_model_name"].value == ("f", "g")


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("max_num_seq = 4", "unknown setting 'max_num_seq' in FILE: did you mean 'max_num_seqs'?"),
        ("[engine]\nmax_num_seqs = 4", "unknown setting 'engine' in FILE: did you mean"),
        ("max_num_seqs = '4'", "FILE: max_num_seqs must be a whole number, not '4'"),
        ("staged_readiness = 1", "FILE: staged_readiness must be true or false, not 1"),
        ("model = 4", "FILE: model must be a string, not 4"),
        ("log_level = 'loud'", "log_level must be one of debug, info, warning, error, not loud"),
        ("max_num_seqs = 0", "max_num_seqs must be at least 1, not 0"),
        ("max_num_seqs", "FILE is not TOML: "),
        ("max_num_seqs = " + "[" * 10_000, "FILE is not TOML: maximum recursion depth exceeded"),
        (None, "cannot read the configuration FILE: No such file or directory"),
    ],
)
def test_a_wrong_file_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str | None, complaint: str
) -> None:
    """With the nearest name that there is; the exit code is the one of a configuration that cannot work."""
    file = tmp_path / "one.toml"
    if written is not None:
        file.write_text(written)

    assert cli.main(["config", "--config", str(file)]) == os.EX_CONFIG

    assert capsys.readouterr().err.startswith(f"odriver: {complaint}".replace("FILE", str(file)))


def test_a_file_where_we_may_not_look_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in another user's home, whose HOME a process has kept: the machine's holds, and a line of the log says so."""
    (tmp_path / "machine.toml").write_text("page_size = 32")
    look = Path.is_file

    def refused(path: Path) -> bool:
        if path.name == "mine.toml":
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(Path, "is_file", refused)
    caplog.set_level("INFO", "ipc")

    assert held() == {"page_size": SettingValue(32, str(tmp_path / "machine.toml"))}
    assert f"{tmp_path}/mine.toml is not looked for: Permission denied" in caplog.messages


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("ODRIVER_MAX_SEQS", "4", "unknown setting 'ODRIVER_MAX_SEQS' in the environment: did you mean 'ODRIVER_MAX_NUM_SEQS'?"),
        ("ODRIVER_PAGE_SIZE", "many", "ODRIVER_PAGE_SIZE must be a whole number, not 'many'"),
        ("ODRIVER_CONFIG", "/nowhere", "cannot read the configuration /nowhere"),
        ("ODRIVER_SERVED_MODEL_NAME", "one,caf\udce9", r"served_model_name must be UTF-8, not 'caf\udce9' (served_model_name comes from"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str, complaint: str) -> None:
    """It names the variable."""
    monkeypatch.setenv(name, value)

    with pytest.raises(ConfigurationError) as error:
        settings.held({})

    assert str(error.value).startswith(complaint)


def test_an_error_about_a_setting_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If that is not the command line: by its name, or by its text, such as a path that is quoted."""
    file = tmp_path / "one.toml"
    file.write_text('model = "/models/none"\npage_size = 0\n')
    monkeypatch.setenv("ODRIVER_MAX_NUM_SEQS", "0")
    found = settings.held({"config": file})

    assert settings.with_sources("/models/none is not a directory", found) == (
        f"/models/none is not a directory (model comes from {file})"
    )
    with pytest.raises(ConfigurationError, match=r"at least 1, not 0 \(max_num_seqs comes from ODRIVER_MAX_NUM_SEQS\)"):
        settings.configs(found)
    flag = settings.held({"page_size": 0, "max_num_seqs": 4, "config": file})
    with pytest.raises(ConfigurationError, match=r"page_size must be at least 1, not 0$"):
        settings.configs(flag)


def test_the_table_shows_what_holds_where_nothing_is_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address that a daemon would have, and words where a value follows from model or machine."""
    monkeypatch.setenv("COLUMNS", "200")

    assert cli.main(["config"]) == 0
    rows = {
        cells[1]: cells[2]
        for cells in (line.split("│") for line in capsys.readouterr().out.splitlines())
        if len(cells) > 3
    }
    rows = {name.strip(): value.strip() for name, value in rows.items()}

    assert rows["bind"] == default_address()
    assert rows["num_pages"] == "what the memory holds"
    assert rows["dtype"] == "auto"
    assert "" not in rows.values()
    assert cli.main(["config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bind"]["value"] == default_address()


def test_what_the_kernels_are_built_for_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that chooses their instructions begins like those of settings, and is not taken for an unknown one."""
    monkeypatch.setenv("ODRIVER_CPU_ISA", "avx2")

    assert held() == {}


def test_what_kubernetes_says_of_a_service_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may be called odriver, or odriver-metrics; what means a setting still is one, or an error."""
    for name, value in {
        "SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "8000", "SERVICE_PORT_HTTP": "8000", "PORT": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP": "tcp://10.0.0.1:8000", "PORT_8000_TCP_PROTO": "tcp", "PORT_8000_TCP_PORT": "8000",
        "PORT_8000_TCP_ADDR": "10.0.0.1", "METRICS_SERVICE_HOST": "10.0.0.1", "METRICS_PORT": "tcp://10.0.0.1:8001",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"ODRIVER_{name}", value)
    assert held() == {}

    monkeypatch.setenv("ODRIVER_METRICS_PORT", "8001")
    assert held() == {"metrics_port": SettingValue(8001, "ODRIVER_METRICS_PORT")}
    monkeypatch.setenv("ODRIVER_PORT", "8000")
    with pytest.raises(ConfigurationError, match="unknown setting 'ODRIVER_PORT'"):
        held()


def test_adapters_of_the_start_are_named_in_two_forms() -> None:
    """NAME=PATH, and vLLM's JSON, of which nothing else is taken."""
    both = ("one=a/b=c", '{"name": "two", "path": "/d"}')

    assert EngineConfig(enable_lora=True, lora_modules=both).lora_paths == {"one": "a/b=c", "two": "/d"}

    for wrong in ("x", "=x", "one=", "one=again", '{"name": "x"}', '{"name": "", "path": "x"}', "{"):
        with pytest.raises(ConfigurationError, match="lora_modules"):
            EngineConfig(enable_lora=True, lora_modules=("one=a", wrong))
    with pytest.raises(ConfigurationError, match="base_model_name must be left out: it is always the model"):
        EngineConfig(enable_lora=True, lora_modules=('{"name": "x", "path": "y", "base_model_name": "z"}',))
