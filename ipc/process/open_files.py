"""How many files this process may have open: each client is one."""

import logging
import resource

from engine.errors import ConfigurationError

logger = logging.getLogger(__name__)

LEAST_FILES = 128
"""With fewer there are none left for clients: a process of sockets keeps 64 for itself, and serves one user
with a quarter of the rest."""


def raise_limit() -> None:
    """Raise the soft limit to the hard one: a shell's default is low. Raises ConfigurationError where the
    hard one is below LEAST_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        raise ConfigurationError(
            f"{hard} files may be open at once, which leaves none for clients: allow {LEAST_FILES} or more "
            "(ulimit -n; LimitNOFILE= of a systemd unit)"
        )
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # an infinite hard limit can exceed the kernel's own
        logger.warning("the limit of open files stays at %d: %s", soft, error)
