"""The service that systemd runs."""

import math
import os
import pwd
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigurationError
from ipc.commands import cli
from ipc.commands.installation import install_service, service_files
from ipc.commands.installation.install_service import InstallFailed, install, uninstall
from ipc.commands.installation.systemd_units import GATEWAY, USER, render_daemon, render_gateway
from ipc.errors import AddressError
from ipc.gateway.access.connection_limit import RESERVED_FILES
from ipc.process.http_socket import MAX_CONNECTIONS
from ipc.service import settings
from ipc.service.configuration import DaemonConfig
from ipc.service.http_config import HttpConfig

SHIPPED = Path(__file__).parent.parent / "scripts" / "odriver.service"
CERTIFICATE = Path(__file__)
"""Any file that is there."""
SHIPPED_GATEWAY = SHIPPED.with_name("odriver-gateway.service")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ``odriver`` in an environment whose path is as awkward as it may be."""
    scripts = tmp_path / "an env, 100% $HOME"
    scripts.mkdir()
    command = scripts / "odriver"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setattr(install_service.sysconfig, "get_path", lambda name: str(scripts))
    monkeypatch.setattr(install_service, "BOOTED_BY_SYSTEMD", tmp_path)
    monkeypatch.setattr(install_service, "_obstacles", lambda *args: ())
    return command


def test_the_unit_that_we_ship_is_the_one_that_is_written() -> None:
    """For an environment in /opt/odriver; and so is the gateway's."""
    assert SHIPPED.read_text() == render_daemon(Path("/opt/odriver/.venv/bin/odriver"), [], loopback_only=True)
    assert SHIPPED_GATEWAY.read_text() == render_gateway(Path("/opt/odriver/.venv/bin/odriver"), [])


@pytest.mark.parametrize("unit", [SHIPPED, SHIPPED_GATEWAY])
def test_starts_that_fail_are_not_given_up_within_minutes(unit: Path) -> None:
    """A network that comes late, or a TPU that another process has: systemd waits longer each time, up to a delay
    with which the limit of starts is never met."""
    words = dict(line.partition("=")[::2] for line in unit.read_text().splitlines() if "=" in line)

    assert (words["StartLimitIntervalSec"], words["RestartMaxDelaySec"]) == ("10min", "30s")
    assert int(words["StartLimitBurst"]) > int(words["RestartSteps"]) + 600 / 30


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("name", ["odriver.service", "odriver-gateway.service"])
def test_systemd_finds_nothing_wrong_with_the_unit_and_little_exposed(command: Path, tmp_path: Path, name: str) -> None:
    """Not a word from `verify`, but of what is of systemd 254, and an exposure below 3 of 10."""
    of_a_later_systemd = re.compile("Unknown key( name)? '(RestartSteps|RestartMaxDelaySec)' in section")
    unit, reads = tmp_path / name, [Path("/home/me/models")]
    is_gateway = name == GATEWAY
    unit.write_text(
        render_gateway(command, reads)
        if is_gateway
        else render_daemon(command, reads, loopback_only=True, is_remote=True)
    )

    verified = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    security = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)], capture_output=True, text=True
    )

    complaints = [line for line in verified.stderr.splitlines() if not of_a_later_systemd.search(line)]
    assert (verified.returncode, complaints) == (0, [])
    exposure = re.search(rf"Overall exposure level for {name}: ([0-9.]+)", security.stdout)
    assert exposure is not None and float(exposure[1]) < 3.0


def test_the_gateway_has_a_unit_beside_the_services(command: Path, tmp_path: Path) -> None:
    """It is kept in as the daemon is, talks to this machine alone, and has files for all of its connections."""
    install({}, show=False, unit=tmp_path / "odriver.service", config=tmp_path / "c", users=tmp_path / "o.conf")

    unit, service = (tmp_path / name for name in ("odriver-gateway.service", "odriver.service"))
    assert f'ExecStart="{str(command).replace("%", "%%")}" gateway\n' in unit.read_text()
    hardening = re.compile(
        r"^(?:Protect|Restrict|NoNew|Capability|SystemCall|Lock|UMask|IPAddress)\w+=.*$", re.MULTILINE
    )
    assert hardening.findall(unit.read_text()) == hardening.findall(service.read_text())
    files = re.search(r"LimitNOFILE=(\d+)", unit.read_text())
    assert files is not None and int(files[1]) > MAX_CONNECTIONS + RESERVED_FILES


def test_installing_writes_a_unit_and_its_configuration(
    command: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings given are in the file, with a socket that its group may use, and the unit has none of them."""
    unit, config, users = tmp_path / "units" / "odriver.service", tmp_path / "etc" / "config.toml", tmp_path / "o.conf"

    (tmp_path / "models" / "x").mkdir(parents=True)
    model = os.path.relpath(tmp_path / "models" / "x")

    install({"model": model, "max_num_seqs": 4}, show=False, unit=unit, config=config, users=users)

    assert tomllib.loads(config.read_text()) == {
        "bind": "ipc:///run/odriver/odriver.sock", "socket_access": "group", "metrics_port": 8001,
        "model": str(tmp_path / "models/x"), "max_num_seqs": 4,
    }  # fmt: skip
    assert 'u odriver - "oDriver" /var/lib/odriver\n' in users.read_text()
    assert "RuntimeDirectoryMode=0750\n" in unit.read_text()
    assert [path.stat().st_mode & 0o777 for path in (unit, config, config.parent)] == [0o644, 0o644, 0o755]
    assert (
        f'ExecStart="{str(command).replace("%", "%%")}" serve --config /etc/odriver/config.toml\n' in unit.read_text()
    )
    assert "IPAddressDeny=any" in unit.read_text()
    assert capsys.readouterr().out.endswith(
        "now: systemd-sysusers o.conf && systemctl daemon-reload && systemctl enable --now odriver.service\n"
        "then, for OpenAI's API at port 8000: systemctl enable --now odriver-gateway.service\n"
        "then, for each user that is to use it: usermod -aG odriver NAME\n"
    )


@pytest.mark.usefixtures("command")
def test_the_model_that_is_ours_is_installed_by_its_name(tmp_path: Path) -> None:
    """As it comes with oDriver, wherever that is."""
    install({"model": "demo"}, show=False, unit=tmp_path / "u", config=tmp_path / "c", users=tmp_path / "o.conf")
    install({}, show=False, unit=tmp_path / "v", config=tmp_path / "d", users=tmp_path / "o.conf")

    assert tomllib.loads((tmp_path / "c").read_text())["model"] == "demo"
    assert (tmp_path / "u").read_text().replace("/c\n", "/d\n") == (tmp_path / "v").read_text()


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "gs://bucket/model"])
def test_a_service_whose_model_is_elsewhere_may_ask_for_it(tmp_path: Path, model: str) -> None:
    """By the network, once there is one, with a token that root gives; all else is as shut as it was."""
    remote, local = tmp_path / "remote.service", tmp_path / "local.service"
    install({"model": model}, show=False, unit=remote, config=tmp_path / "c", users=tmp_path / "o.conf")
    install({}, show=False, unit=local, config=tmp_path / "d", users=tmp_path / "o.conf")

    assert tomllib.loads((tmp_path / "c").read_text())["model"] == model
    again = remote.read_text()
    install({}, show=False, unit=remote, config=tmp_path / "c", users=tmp_path / "o.conf")
    assert remote.read_text() == again
    lines, usual = (set(unit.read_text().splitlines()) for unit in (remote, local))
    assert {line for line in usual - lines if not line.startswith("#")} == {
        "After=network.target", "IPAddressDeny=any", "IPAddressAllow=localhost link-local"
    }  # fmt: skip
    assert {line for line in lines - usual if not line.startswith("#")} == {
        "Wants=network-online.target", "After=network-online.target",
        "LoadCredential=odriver.hf-token"
    }  # fmt: skip


@pytest.mark.usefixtures("command")
def test_a_service_reads_where_its_adapters_are(tmp_path: Path) -> None:
    """A directory by its absolute path; a bucket takes the network."""
    adapters: dict[str, object] = {"enable_lora": True, "adapter_root": str(tmp_path / "x" / ".." / "adapters")}
    (tmp_path / "adapters").mkdir()
    (tmp_path / "x").mkdir()
    texts = []
    for number, given in enumerate((adapters, adapters | {"adapter_root": "gs://bucket/adapters"})):
        unit, config = tmp_path / f"{number}.service", tmp_path / f"{number}.toml"
        install(given, show=False, unit=unit, config=config, users=tmp_path / "users")
        texts.append((unit.read_text(), config.read_text()))

    (local, first), (remote, second) = texts
    assert f'adapter_root = "{tmp_path}/adapters"' in first and "network-online" not in local
    assert 'adapter_root = "gs://bucket/adapters"' in second and "network-online" in remote


@pytest.mark.usefixtures("command")
def test_a_configuration_that_is_there_is_left_alone(tmp_path: Path) -> None:
    """Settings that would have to go there are an error; the unit alone may be written anew."""
    unit, config = tmp_path / "odriver.service", tmp_path / "config.toml"
    config.write_text("page_size = 32\n")

    with pytest.raises(InstallFailed, match="is there already"):
        install({"page_size": 8}, show=False, unit=unit, config=config, users=tmp_path / "o.conf")
    assert not unit.exists()
    install({"model": None}, show=False, unit=unit, config=config, users=tmp_path / "o.conf")

    assert unit.exists()
    assert config.read_text() == "page_size = 32\n"


@pytest.mark.usefixtures("command")
def test_a_service_for_other_machines_has_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where its own user can write, and no rule that keeps other machines out."""
    unit, config = tmp_path / "odriver.service", tmp_path / "config.toml"

    install({"bind": "tcp://0.0.0.0:5555"}, show=False, unit=unit, config=config, users=tmp_path / "o.conf")

    assert tomllib.loads(config.read_text())["keys"] == "/var/lib/odriver/keys"
    assert "IPAddressDeny" not in unit.read_text()
    assert "odriver keys new NAME && systemctl reload" in capsys.readouterr().out


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(("http", "is_reached"), [("8000", False), ("0.0.0.0:8000", True)])
def test_a_service_of_http_is_reached_where_it_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], http: str, is_reached: bool
) -> None:
    """By other machines if that is asked for; it needs no gateway beside it."""
    unit, config = tmp_path / "odriver.service", tmp_path / "config.toml"
    keys = tmp_path / "keys.toml"
    keys.touch()

    install({"http": http, "api_keys": keys}, show=False, unit=unit, config=config, users=tmp_path / "o.conf")

    assert tomllib.loads(config.read_text())["http"] == http
    assert ("IPAddressDeny" not in unit.read_text()) is is_reached
    assert "odriver-gateway" not in capsys.readouterr().out.partition("now:")[2]


@pytest.mark.usefixtures("command")
def test_a_secret_is_not_written_where_everybody_reads_it(tmp_path: Path) -> None:
    """Nor is anything else; the error says where it belongs."""
    unit, config = tmp_path / "odriver.service", tmp_path / "config.toml"

    with pytest.raises(InstallFailed, match=r"ODRIVER_API_KEY=.*mode 600"):
        install({"api_key": "sk-secret"}, show=False, unit=unit, config=config, users=tmp_path / "o.conf")

    assert not unit.exists() and not config.exists()


@pytest.mark.usefixtures("command")
def test_printing_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Both files go to stdout, of settings that can work."""
    assert cli.main(["install-service", "--print", "--bind", "ipc:///run/x.sock", "--no-staged-readiness"]) == 0
    printed = capsys.readouterr().out
    assert (
        'bind = "ipc:///run/x.sock"\nsocket_access = "group"\nmetrics_port = 8001\nstaged_readiness = false\n'
        in printed
    )
    assert "DynamicUser=yes" in printed

    with pytest.raises(ConfigurationError, match="page_size"):
        install({"page_size": 0}, show=True)


def test_homes_are_out_of_sight_unless_something_is_there() -> None:
    """Read-only then."""
    command = Path("/opt/bin/odriver")

    assert "ProtectHome=yes\n" in render_daemon(command, [Path("/models/x")], loopback_only=True)
    assert "ProtectHome=read-only\n" in render_daemon(command, [Path("/home/me/x")], loopback_only=True)
    assert "ProtectHome=read-only\n" in render_daemon(Path("/root/bin/odriver"), [], loopback_only=True)


def test_nothing_is_written_of_a_service_that_could_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each obstacle is named with what to do: no systemd, no such model, one that only its owner may read."""
    monkeypatch.setattr(install_service, "_command", lambda: Path("/opt/odriver"))
    monkeypatch.setattr(install_service, "BOOTED_BY_SYSTEMD", tmp_path / "nowhere")
    hidden, missing = tmp_path / "private" / "model", tmp_path / "missing"
    hidden.mkdir(parents=True)
    (tmp_path / "private").chmod(0o700)
    hidden_at = next(one for one in reversed(hidden.parents) if not one.stat().st_mode & 0o001)
    paths = {"unit": tmp_path / "u.service", "config": tmp_path / "c", "users": tmp_path / "o"}

    for given, said in (
        ({"model": str(hidden)}, f"the service cannot enter {hidden_at}: chmod o+x it, or move {hidden}"),
        ({"chat_template": missing}, f"there is no {missing}"),
    ):
        with pytest.raises(InstallFailed, match=r"nothing is written.*--force"):
            install(given, show=False, **paths)
        err = capsys.readouterr().err
        assert f"odriver: {said}\n" in err and "odriver: systemd does not run this machine\n" in err
    with pytest.raises(ConfigurationError, match="is not a directory"):
        install({"model": str(missing)}, show=False, **paths)
    assert not any(path.exists() for path in paths.values())
    install({"model": str(hidden)}, show=False, force=True, **paths)

    assert all(path.exists() for path in paths.values())


@pytest.mark.usefixtures("command")
def test_what_is_installed_is_written_by_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd starts the service in another directory; what is no file here stays as it is named."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "tok", "x", "info", "auto"):
        (tmp_path / name).mkdir()
    for name in ("t.jinja", "new.pem"):
        (tmp_path / name).write_text("x")
    (tmp_path / "cert.pem").symlink_to("new.pem")
    given: dict[str, object] = {
        "model": "model", "tokenizer": "./tok", "generation_config": "auto", "chat_template": Path("t.jinja"),
        "weights_root": "w", "enable_lora": True, "lora_modules": ["a=./x", '{"name": "b=", "path": "x"}'],
        "speculative_config": '{"method": "draft_model", "num_speculative_tokens": 2, "model": "model"}',
        "keys": Path("k"), "profile_directory": Path("p"), "ssl_certfile": Path("cert.pem"), "log_level": "info",
        "bind": "ipc://a.sock",
    }  # fmt: skip

    install(given, show=False, unit=tmp_path / "u", config=tmp_path / "c", users=tmp_path / "o.conf")

    written = tomllib.loads((tmp_path / "c").read_text())
    assert {name: value for name, value in written.items() if value != given.get(name)} == {
        "socket_access": "group", "metrics_port": 8001, "model": f"{tmp_path}/model", "tokenizer": f"{tmp_path}/tok",
        "chat_template": f"{tmp_path}/t.jinja", "weights_root": f"{tmp_path}/w", "keys": f"{tmp_path}/k",
        "lora_modules": [f"a={tmp_path}/x", f'{{"name": "b=", "path": "{tmp_path}/x"}}'],
        "speculative_config": f'{{"method": "draft_model", "num_speculative_tokens": 2, "model": "{tmp_path}/model"}}',
        "profile_directory": f"{tmp_path}/p", "ssl_certfile": f"{tmp_path}/cert.pem", "bind": f"ipc://{tmp_path}/a.sock",
    }  # fmt: skip


@pytest.mark.usefixtures("command")
def test_what_is_written_is_what_a_daemon_reads(tmp_path: Path) -> None:
    """A timeout without end too; a text that TOML has no way to say is refused before anything is written."""
    paths = {"unit": tmp_path / "u", "config": tmp_path / "c", "users": tmp_path / "o.conf"}
    with pytest.raises(InstallFailed, match="cannot be written"):
        install({"served_model_name": ["a\x7f"]}, show=False, **paths)
    assert not any(path.exists() for path in paths.values())

    install({"drain_timeout": math.inf}, show=False, **paths)

    assert "drain_timeout = inf\n" in paths["config"].read_text()
    assert settings.read_file(paths["config"])["drain_timeout"].value == math.inf


@pytest.mark.parametrize(
    ("given", "is_shut"),
    [
        ({"metrics_host": "0.0.0.0"}, False),
        ({"otlp_traces_endpoint": "http://collector:4318/v1/traces"}, False),
        ({"otlp_traces_endpoint": "http://localhost:4318/v1/traces"}, True),
        ({"tokenizer": "Qwen/Qwen3-0.6B"}, False),
        ({"weights_root": "gs://bucket/weights"}, False),
    ],
)
@pytest.mark.usefixtures("command")
def test_a_service_has_the_network_that_its_settings_need(
    tmp_path: Path, given: dict[str, object], is_shut: bool
) -> None:
    """For what others ask of it and what it asks of others; without one it has loopback alone."""
    install(given, show=False, unit=tmp_path / "u", config=tmp_path / "c", users=tmp_path / "o.conf")

    assert ("IPAddressDeny=any" in (tmp_path / "u").read_text()) is is_shut


def test_a_file_that_the_service_may_not_read_is_an_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the model's directory, and the directory itself; a secret is to belong to the service's user."""
    monkeypatch.setattr(service_files, "not_entered", lambda path: None)
    model, config, secret = tmp_path / "model", tmp_path / "model" / "config.json", tmp_path / "key.pem"
    model.mkdir(mode=0o755)
    config.write_text("{}")
    secret.write_text("x")
    secret.chmod(0o600)
    config.chmod(0o644)
    assert service_files.unreadable(model) is None

    config.chmod(0o600)
    assert service_files.unreadable(model) == f"the service cannot read {config}: chmod o+r it"
    model.chmod(0o711)
    assert service_files.unreadable(model) == f"the service cannot read {model}: chmod o+rx it"
    advice = f"the service cannot read {secret}: chown odriver it, once that user is there"
    assert service_files.unreadable(secret, is_secret=True) == advice
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(service_files.pwd, "getpwnam", lambda name: me)
    assert service_files.unreadable(secret, is_secret=True) is None


def test_nobody_looks_at_what_is_the_services_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is its user's alone, once it has run."""
    keys = service_files.STATE / "keys"

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)

    assert service_files.files_of(EngineConfig(), DaemonConfig(keys=keys), HttpConfig()).secrets == []
    assert service_files.unreadable(keys, is_secret=True) is None


@pytest.mark.parametrize("bind", ["ipc://@odriver", "ipc://*", "ipc://", "ipc:///run/odriver/"])
def test_an_address_without_a_file_is_not_made_one(tmp_path: Path, bind: str) -> None:
    """It is refused as the daemon would refuse it."""
    with pytest.raises(AddressError, match="names no socket file"):
        install({"bind": bind}, show=False, unit=tmp_path / "u", config=tmp_path / "c", users=tmp_path / "o.conf")
    assert not list(tmp_path.iterdir())


def test_what_a_service_reads_is_all_that_its_settings_name(tmp_path: Path) -> None:
    """Files, directories, and secrets; a relative path is from where systemd starts it."""
    adapter = str(tmp_path / "a")
    (tmp_path / "keys").mkdir()
    engine = EngineConfig(
        chat_template=Path("/t"), enable_lora=True, lora_modules=(f"a={adapter}",), adapter_root="gs://b/c",
        generation_config="g",
    )  # fmt: skip
    daemon = DaemonConfig(keys=tmp_path / "keys", weights_root="/w")
    http = HttpConfig(ssl_certfile=CERTIFICATE, ssl_keyfile=CERTIFICATE, api_keys=Path("/k"))

    read = service_files.files_of(engine, daemon, http)

    assert read == (
        [Path("/w"), Path(adapter), Path("/g"), Path("/t"), CERTIFICATE],
        [CERTIFICATE, Path("/k"), tmp_path / "keys"],
        True,
    )


@pytest.mark.usefixtures("command")
def test_what_was_installed_is_removed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The service is stopped first; its configuration is put aside, and a second time there is nothing to remove."""
    paths = {"unit": tmp_path / "odriver.service", "config": tmp_path / "config.toml", "users": tmp_path / "o.conf"}
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(install_service, "_systemctl", lambda *arguments: asked.append(arguments))
    install({"max_num_seqs": 4}, show=False, **paths)
    written = paths["config"].read_text()
    capsys.readouterr()

    uninstall(**paths)

    assert asked == [("disable", "--now", "odriver.service", GATEWAY), ("daemon-reload",)]
    assert not any(path.exists() for path in (*paths.values(), tmp_path / GATEWAY))
    assert (tmp_path / "config.toml.removed").read_text() == written
    assert f"removed {paths['unit']}\n" in capsys.readouterr().out
    with pytest.raises(InstallFailed, match="no service is installed"):
        uninstall(**paths)


def test_an_environment_without_the_command_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install."""
    monkeypatch.setattr(install_service.sysconfig, "get_path", lambda name: str(tmp_path))

    with pytest.raises(InstallFailed, match="with pip"):
        install({}, show=True)


@pytest.mark.parametrize("name", ["it's", 'a "b"', "a\\b", "a\tb"])
def test_an_environment_whose_path_systemd_refuses_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of such a unit systemd says "Executable name contains special characters", however it is quoted."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "odriver").touch()
    monkeypatch.setattr(install_service.sysconfig, "get_path", lambda _: str(tmp_path / name))

    with pytest.raises(InstallFailed, match="systemd runs no program whose path"):
        install({}, show=True)


def test_a_file_is_put_in_the_place_of_a_link_and_not_where_it_leads(command: Path, tmp_path: Path) -> None:
    """As `systemctl link` makes of a unit, into somebody's home."""
    del command
    victim, unit = tmp_path / "victim", tmp_path / "odriver.service"
    victim.write_text("as it was")
    unit.symlink_to(victim)

    install({}, show=False, unit=unit, config=tmp_path / "config.toml", users=tmp_path / "o.conf")

    assert victim.read_text() == "as it was" and not unit.is_symlink()


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="there is no systemd-sysusers")
def test_systemd_makes_the_user_of_what_is_written(tmp_path: Path) -> None:
    """With a group of the same name, which others may join."""
    (tmp_path / "etc").mkdir()
    conf = tmp_path / "odriver.conf"
    conf.write_text(USER)

    made = subprocess.run(["systemd-sysusers", f"--root={tmp_path}", str(conf)], capture_output=True, text=True)

    assert made.returncode == 0, made.stderr
    _, _, uid, gid, *_ = (tmp_path / "etc" / "passwd").read_text().split(":")
    assert uid == gid and f"odriver:!*:{gid}:" in (tmp_path / "etc" / "group").read_text().replace(":x:", ":!*:")
