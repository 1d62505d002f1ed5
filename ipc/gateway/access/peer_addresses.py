"""The peer of a connection, by its address."""

from ipaddress import IPv6Address, ip_address, ip_network

from starlette.requests import Request

IPV6_PREFIX = 64
"""Bits of an IPv6 address that one household or machine has for itself."""


def peer_of(host: str) -> str:
    """The network that the peer's addresses share; what is no address stands for itself."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((int(address), IPV6_PREFIX), strict=False))


class TrustedProxies:
    """Proxies whose X-Forwarded-For is believed. Raises ValueError for what is no network."""

    def __init__(self, networks: list[str]) -> None:
        self._networks = [ip_network(network, strict=False) for network in networks]

    def __contains__(self, host: str) -> bool:
        try:
            address = ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def peer_of_request(request: Request) -> str:
    """The address of the client, or the one that a trusted proxy names."""
    return peer_of(request.client.host) if request.client is not None else ""
