"""What ``odriver doctor`` finds of addresses, and of what is asked for there: keys and
certificates."""

import ssl
from collections.abc import Iterator
from pathlib import Path

from ipc.client import Client
from ipc.commands.diagnosis.findings import Finding
from ipc.errors import AddressError, DaemonStarting, OdriverError
from ipc.process.http_socket import listen
from ipc.service.configuration import DaemonConfig
from ipc.service.http_config import HttpConfig
from ipc.wire import keys
from ipc.wire.addresses import anyone_listens, checked_address, is_forbidden, is_local

PATIENCE = 5.0
"""Seconds for a daemon to say that it is one."""


def examine(daemon: DaemonConfig, http: HttpConfig) -> Iterator[Finding]:
    """All that a daemon with these settings listens at, and whom it admits."""
    try:
        address = checked_address(daemon.bind, has_key=True)
    except OdriverError as error:
        yield Finding("address", "bad", str(error), "set another `bind`")
        runs = False
    else:
        directory = daemon.keys or (None if is_local(address) else keys.default_directory())
        found = listener(address, asks_for_keys=directory is not None)
        runs = found.state == "warning"
        yield found
        if directory is not None:
            yield authorized(directory)
    if daemon.metrics_port is not None:
        yield port("metrics port", daemon.metrics_host, daemon.metrics_port, runs=runs)
    if http.address is not None:
        yield port("HTTP port", *http.address, runs=runs, or_any=http.http is None)
    if http.ssl_certfile is not None:
        yield certificate(http.ssl_certfile, http.ssl_keyfile)
    if http.api_keys is not None:
        yield api_keys(http.api_keys)


def listener(address: str, *, asks_for_keys: bool = False) -> Finding:
    """Whether the address is free. Our own daemon there may be just what the user wants."""
    if not anyone_listens(address):
        return Finding("address", "good", f"{address} is free")
    if is_forbidden(address):
        return Finding("address", "bad", f"{address} is another user's", "set another `bind`")
    if asks_for_keys:
        return Finding("address", "warning", f"{address} is taken", "nothing, if that is the daemon")
    try:
        with Client(address, timeout=PATIENCE) as client:
            runs = f"a daemon serves {client.welcome.model} at {address}"
    except DaemonStarting as error:
        runs = str(error)
    except OdriverError:
        return Finding("address", "bad", f"{address} is taken by another program", "end it, or set another `bind`")
    return Finding("address", "warning", runs, "nothing, unless you want a second one")


def authorized(directory: Path) -> Finding:
    """Whether any key is authorised, where keys are required."""
    try:
        names = keys.authorized(directory)
    except OdriverError as error:
        return Finding("keys", "bad", str(error), "put it right, or revoke that key")
    if not names:
        return Finding("keys", "warning", f"none in {directory}", "odriver keys new NAME, for each client")
    return Finding("keys", "good", f"{len(names)} in {directory}")


def port(check: str, host: str, number: int, *, runs: bool, or_any: bool = False) -> Finding:
    """Whether a port is free. Where a daemon ``runs`` it may be that one's, and with ``or_any`` another serves."""
    try:
        listen(host, number).close()
    except AddressError as error:
        if runs or or_any:
            advice = "nothing, if that is the daemon" if runs else "nothing: the start takes another"
            return Finding(check, "warning", str(error), advice)
        return Finding(check, "bad", str(error), "end that program, or set another")
    return Finding(check, "good", f"{host}, {f'port {number} is free' if number else 'any port'}")


def certificate(certfile: Path, keyfile: Path | None) -> Finding:
    """Whether HTTPS can be served with this certificate and its key."""
    try:
        # Without a password OpenSSL would ask for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except OSError as error:
        found = f"{certfile}{f' and {keyfile}' if keyfile else ''} cannot be used: {error}"
        return Finding("certificate", "bad", found, "give a certificate and its own key, in PEM, without a password")
    return Finding("certificate", "good", f"{certfile} and its key")


def api_keys(path: Path) -> Finding:
    """Whether there are API keys, where callers need one."""
    from ipc.gateway.access.api_keys import read_api_keys

    try:
        callers = read_api_keys(path)
    except OdriverError as error:
        return Finding("API keys", "bad", str(error), "put it right")
    if not callers:
        return Finding("API keys", "warning", f"none in {path}", "add a table for each caller")
    return Finding("API keys", "good", f"{len(callers)} in {path}")
