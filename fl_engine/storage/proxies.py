"""Use HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY (in upper or lower case) as the package `requests` does."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3

from fl_engine.core.errors import ConfigError, masked

HINT = "HTTP_PROXY and HTTPS_PROXY must be http://user:password@host:port if the proxy requires a password"


def pool_of(url: str, **options: Any) -> urllib3.PoolManager:
    """Return a connection pool for requests to the server of `url`.

    Args:
        url: Address of a server or a resource.
        options: Further arguments of `urllib3.PoolManager`.

    Raises:
        ConfigError: The environment variable with the proxy's address is malformed.
    """
    proxy = proxy_of(url)
    return urllib3.ProxyManager(**proxy, **options) if proxy else urllib3.PoolManager(**options)


def proxy_of(url: str) -> dict[str, Any]:
    """Return `proxy_url` and `proxy_headers` for `urllib3.ProxyManager`. Return {} for a server without a proxy. Raises
    ConfigError if the variable with the proxy's address is malformed."""
    server, known = urlsplit(url), getproxies()
    address = known.get(server.scheme) or known.get("all")
    if not address or _is_excluded(server.netloc.rpartition("@")[2], server.hostname or "", known.get("no", "")):
        return {}
    variable = f"{server.scheme if server.scheme in known else 'all'}_PROXY".upper()
    with suppress(urllib3.exceptions.LocationParseError):
        proxy = urllib3.util.parse_url(address if "://" in address else f"http://{address}")
        if proxy.host and proxy.scheme in ("http", "https"):
            user = None if proxy.auth is None else unquote(proxy.auth if ":" in proxy.auth else f"{proxy.auth}:")
            headers = urllib3.make_headers(proxy_basic_auth=user)
            return {"proxy_url": proxy._replace(auth=None, path=None).url, "proxy_headers": headers}
    raise ConfigError.at(f"{variable} must be http://host:port, got {masked(address)!r}")


def _is_excluded(netloc: str, host: str, excluded: str) -> bool:
    """Return True if NO_PROXY contains the host. An entry is a domain, a host with or without a port, * for all hosts,
    or a network such as 10.0.0.0/8."""
    if proxy_bypass(netloc) or proxy_bypass(host):
        return True
    networks = [entry.strip() for entry in excluded.split(",") if "/" in entry]
    with suppress(ValueError):  # the host is a name, or an entry is not a network
        return any(ip_address(host) in ip_network(network, strict=False) for network in networks)
    return False
