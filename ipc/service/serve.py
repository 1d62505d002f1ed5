"""The process of ``odriver serve``: its configuration, its log and its exit code."""

import logging
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from rich.console import Console

from engine.errors import ConfigurationError, DevicesUnavailable, HostsError
from ipc.errors import AddressError, KeyFileError
from ipc.process import open_files
from ipc.process.logs import configure_logging
from ipc.service import accelerators
from ipc.service.configuration import LiveConfiguration
from ipc.service.daemon import FAULT, MISCONFIGURED, Daemon
from ipc.service.settings import configs, held

logger = logging.getLogger(__name__)


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


def _run(flags: Mapping[str, Any], console: Console) -> int:
    try:
        configuration = LiveConfiguration(lambda: configs(held(flags)), console)
        configuration.apply()
        if configuration.engine.process_id:
            from ipc.service.follower_daemon import FollowerDaemon

            FollowerDaemon(configuration.engine).run()
        return Daemon(configuration, console).run()
    except (ConfigurationError, AddressError, KeyFileError) as error:
        logger.error("%s", error)
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
