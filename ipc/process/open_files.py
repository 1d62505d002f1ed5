"""How many files this process may have open: each client is one."""

import logging
import resource

logger = logging.getLogger(__name__)


def raise_limit() -> None:
    """Raise the soft limit to the hard one: a shell's default is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # an infinite hard limit can exceed the kernel's own
        logger.warning("the limit of open files stays at %d: %s", soft, error)
