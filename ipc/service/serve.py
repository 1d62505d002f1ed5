"""The process of ``odriver serve``: its configuration, its log and its exit code."""

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn

from rich.console import Console

from engine.cpu_libraries import stop_loading
from engine.errors import ConfigurationError, DevicesUnavailable, DownloadFailed, HostsError
from engine.exit_codes import FAULT, MISCONFIGURED
from ipc.errors import AddressError, KeyFileError
from ipc.process import open_files
from ipc.process.gateway_process import GatewayProcess
from ipc.process.logs import configure_logging, stderr_console
from ipc.service import accelerators
from ipc.service.configuration import DaemonConfig, LiveConfiguration
from ipc.service.daemon import Daemon
from ipc.service.device_choice import choose_device
from ipc.service.http_config import HttpConfig
from ipc.service.settings import GATEWAY_OPTIONS, SETTINGS, SettingValue, configs, held, with_sources

logger = logging.getLogger(__name__)

OF_HTTP = tuple(field.name for field in fields(HttpConfig) if field.metadata and field.name not in ("http", "web"))
"""Flags by which somebody means to protect or to shape what is served over HTTP."""


def serve(flags: Mapping[str, Any]) -> NoReturn:
    """Run a daemon with these options of ``odriver serve``, and end this process."""
    # What a daemon makes is its user's alone, and so are its sockets from the moment that they are
    # there.
    os.umask(0o077)
    console = stderr_console()
    configure_logging(console)
    code = _run(flags, console)
    stop_loading()
    logging.shutdown()
    # Python would wait for its threads, and one may be in a compilation or a step that nothing can
    # interrupt.
    os._exit(code)


def _gateway(http: HttpConfig, found: Mapping[str, SettingValue]) -> GatewayProcess | None:
    """The one that the daemon is to have, if any."""
    if http.address is None:
        return None
    options = {name: found[name].value for name in GATEWAY_OPTIONS}
    return GatewayProcess(*http.address, or_any_port=http.http is None, **options)


def _check_of_use(flags: Mapping[str, Any], daemon: DaemonConfig, http: HttpConfig) -> None:
    """Raises ConfigurationError for a flag that would change nothing. A file may have settings for
    several daemons."""
    given = {name for name, value in flags.items() if value is not None}
    unserved = [name for name in OF_HTTP if name in given] if http.address is None else []
    if unserved:
        raise ConfigurationError(f"{SETTINGS[unserved[0]].flag} is for HTTP, which is not served: give --http as well")
    if "metrics_host" in given and daemon.metrics_port is None:
        raise ConfigurationError("--metrics-host is for metrics, which are not served: give --metrics-port as well")
    if "socket_access" in given and daemon.socket_access == "group" and (daemon.bind or "").startswith("tcp://"):
        raise ConfigurationError(
            f"--socket-access group is for ipc:// sockets, and {daemon.bind} is none: leave it out"
        )


def _run(flags: Mapping[str, Any], console: Console) -> int:
    found: dict[str, SettingValue] = {}
    try:
        found = held(flags)
        configuration = LiveConfiguration(lambda: configs(held(flags)), console)
        configuration.apply()
        open_files.raise_limit()
        choose_device(configuration.daemon.device)
        if configuration.engine.process_id:
            from ipc.service.follower_daemon import FollowerDaemon

            FollowerDaemon(configuration.engine).run()
        _check_of_use(flags, configuration.daemon, configuration.http)
        return Daemon(configuration, console, gateway=_gateway(configuration.http, found)).run()
    except DownloadFailed as error:
        logger.error("%s", error)
        return FAULT
    except (ConfigurationError, AddressError, KeyFileError) as error:
        logger.error("%s", with_sources(str(error), found))
        return MISCONFIGURED
    except DevicesUnavailable as error:
        obstacle = accelerators.refusal(str(error), accelerators.devices())
        logger.error("%s. What to do: %s", obstacle.found, obstacle.advice)
        return FAULT if obstacle.passes else MISCONFIGURED
    except HostsError as error:
        logger.error("%s", error)
        return FAULT
    except Exception:
        logger.exception("the daemon failed")
        return FAULT
