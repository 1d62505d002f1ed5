"""The settings of HTTP: of ``odriver gateway``, and of a daemon that serves it (``--http``)."""

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigurationError
from engine.setting_fields import check_choices, require_setting, setting
from ipc.process.http_socket import HOST, MAX_CONNECTIONS, PORT, host_and_port
from ipc.wire.addresses import is_loopback

logger = logging.getLogger(__name__)

TOOL_CALL_PARSERS = (
    *("hermes", "llama3_json", "pythonic", "llama4_pythonic", "mistral", "openai", "qwen3_coder", "qwen3_xml", "glm45"),
    *("seed_oss", "minimax_m2", "deepseek_v3", "deepseek_v31", "kimi_k2", "gemma4", "granite", "cohere", "olmo3"),
    *("phi4_mini_json", "lfm2", "hunyuan_a13b", "apertus", "solar_open", "hy_v3"),
    *("mimo", "glm47", "ernie45"),
)
REASONING_PARSERS = (
    *("openai_gptoss", "gemma4", "mistral", "seed_oss", "cohere", "granite", "qwen3", "glm45", "olmo3"),
    *("minimax_m2", "deepseek_r1", "deepseek_v3", "kimi_k2", "apertus", "hy_v3", "hunyuan_a13b", "ernie45"),
    *("mimo", "solar_open"),
)
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_USUAL_PORTS = (("http://", ":80"), ("https://", ":443"))
"""Which a browser leaves out of an origin."""
_API_KEY = re.compile(r"[\x21-\x7e]{1,512}")


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Raises ConfigurationError for values that cannot work."""

    http: str | None = setting(
        None, "[HOST:]PORT", "serve OpenAI's HTTP API and the page there; port 0 is any that is free (default: none)"
    )
    web: bool = setting(False, "", f"the same at port {PORT}, or at any if that is taken, for the page in a browser")
    api_key: str | None = setting(
        None,
        "KEY",
        "what all callers of HTTP have to send as their key; other users see it in `ps`, but not in ODRIVER_API_KEY "
        "(default: this machine needs none)",
    )
    api_keys: Path | None = setting(None, "FILE", "a key and limits for each caller of HTTP, in TOML (default: none)")
    ssl_certfile: Path | None = setting(None, "FILE", "serve HTTPS with this certificate (default: HTTP)")
    ssl_keyfile: Path | None = setting(None, "FILE", "the key of that certificate (default: in the same file)")
    tool_call_parser: str | None = setting(
        None, "", "format of tool calls over HTTP (default: as the chat template shows)", TOOL_CALL_PARSERS
    )
    reasoning_parser: str | None = setting(
        None, "", "format of reasoning over HTTP (default: as the chat template shows)", REASONING_PARSERS
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "ORIGIN",
        "whose pages a browser lets use this (CORS): https://chat.example.org, or * (default: only our own)",
    )
    allowed_methods: tuple[str, ...] = setting((), "METHOD", "the methods that they may use (default: all)")
    allowed_headers: tuple[str, ...] = setting((), "HEADER", "the headers that they may send (default: all)")
    allow_credentials: bool = setting(
        False, "", "let them send what the browser itself has, such as cookies of a proxy"
    )
    trusted_proxies: str = setting(
        "", "CIDR,...", "addresses or networks of proxies whose X-Forwarded-For is believed (default: none)"
    )
    max_connections: int = setting(
        MAX_CONNECTIONS, "N", "HTTP connections that may be open at once, half of them from one address"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        require_setting(self.max_connections >= 1, "max_connections", "1 or more", self.max_connections)
        if self.api_key is not None and not _API_KEY.fullmatch(self.api_key):
            raise ConfigurationError("api_key must be of 1 to 512 letters, digits and signs, without spaces")
        for origin in self.allowed_origins:
            what = (
                "as a browser sends them, such as https://chat.example.org or http://localhost:3000, in small letters, "
                "without path and usual port, or * for all"
            )
            usual = any(origin.startswith(scheme) and origin.endswith(port) for scheme, port in _USUAL_PORTS)
            require_setting(bool(_ORIGIN.fullmatch(origin)) and not usual, "allowed_origins", what, origin)
        for method in self.allowed_methods:
            require_setting(method == method.upper(), "allowed_methods", "in capital letters, such as POST", method)
        for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
            if getattr(self, name) and not self.allowed_origins:
                raise ConfigurationError(f"{name} is for pages of other origins: set allowed_origins as well")
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise ConfigurationError(f"{name}: there is no file {path}, or this user may not see it")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigurationError("ssl_keyfile is the key of a certificate: set ssl_certfile as well")
        if self.address is not None:
            self.check_reach(self.address[0])

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of a daemon that serves HTTP; None for one that does not."""
        if self.http is not None:
            return host_and_port(self.http)
        return (HOST, PORT) if self.web else None

    def check_reach(self, host: str) -> None:
        """Raises ConfigurationError where other machines could use the models without a key."""
        if is_loopback(host):
            return
        if self.api_key is None and self.api_keys is None:
            raise ConfigurationError(
                f"other machines may reach {host}, and anybody there could use the models: ask for a key with --api-key or "
                "ODRIVER_API_KEY, or for one of each caller with --api-keys FILE, or serve at 127.0.0.1"
            )
        if self.ssl_certfile is None:
            logger.warning("API keys and all requests travel unencrypted: give --ssl-certfile and --ssl-keyfile")
