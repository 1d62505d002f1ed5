"""Which pages of other origins a browser lets read what is answered here (CORS)."""

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware


def cross_origin(
    origins: Sequence[str], methods: Sequence[str], headers: Sequence[str], *, credentials: bool
) -> list[Middleware]:
    """Those of these ``origins``, "*" being all, with these methods and headers, by default all.

    Without origins nothing is said of them, and a browser lets no other page in.
    """
    if not origins:
        return []
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=methods or ["*"],
        allow_headers=headers or ["*"],
        allow_credentials=credentials,
    )
    return [cors]
