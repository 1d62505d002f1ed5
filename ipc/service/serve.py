"""The process of ``odriver serve``: its configuration, its log and its exit code."""

import logging
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from rich.console import Console

from engine.errors import ConfigurationError, DevicesUnavailable, DownloadFailed, HostsError
from ipc.errors import AddressError, KeyFileError
from ipc.process import open_files
from ipc.process.gateway_process import GatewayProcess
from ipc.process.logs import configure_logging
from ipc.service import accelerators
from ipc.service.configuration import LiveConfiguration
from ipc.service.daemon import FAULT, MISCONFIGURED, Daemon
from ipc.service.device_choice import choose_device
from ipc.service.http_config import HttpConfig
from ipc.service.settings import GATEWAY_OPTIONS, SETTINGS, SettingValue, configs, held, with_sources

logger = logging.getLogger(__name__)

OF_HTTP = ("api_key", "api_keys", "ssl_certfile", "ssl_keyfile", "tool_call_parser", "reasoning_parser")
"""Flags by which somebody means to protect or to shape what is served over HTTP."""


def serve(flags: Mapping[str, Any]) -> NoReturn:
    """Run a daemon with these options of ``odriver serve``, and end this process."""
    # What a daemon makes is its user's alone, and so are its sockets from the moment that they are
    # there.
    os.umask(0o077)
    console = Console(stderr=True)
    configure_logging(console)
    open_files.raise_limit()
    code = _run(flags, console)
    logging.shutdown()
    # Python would wait for its threads, and one may be in a compilation or a step that nothing can
    # interrupt.
    os._exit(code)


def _gateway(http: HttpConfig, found: Mapping[str, SettingValue], flags: Mapping[str, Any]) -> GatewayProcess | None:
    """The one that the daemon is to have, if any; raises ConfigurationError."""
    if http.address is None:
        for name in OF_HTTP:
            if flags.get(name) is not None:
                raise ConfigurationError(f"{SETTINGS[name].flag} is for HTTP, which is not served: give --http as well")
        return None
    options = {name: found[name].value for name in GATEWAY_OPTIONS}
    return GatewayProcess(*http.address, or_any_port=http.http is None, **options)


def _run(flags: Mapping[str, Any], console: Console) -> int:
    found: dict[str, SettingValue] = {}
    try:
        found = held(flags)
        configuration = LiveConfiguration(lambda: configs(held(flags)), console)
        configuration.apply()
        choose_device(configuration.daemon.device)
        if configuration.engine.process_id:
            from ipc.service.follower_daemon import FollowerDaemon

            FollowerDaemon(configuration.engine).run()
        return Daemon(configuration, console, gateway=_gateway(configuration.http, found, flags)).run()
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
