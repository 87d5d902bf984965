"""One-line reasons why a federation's server cannot be reached: its name, its port, a proxy, or its
certificate.
"""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.core.errors import ConfigError
from fedstill.flower.deployment.folder import LOOPBACK, MAX_PORT, is_loopback

CONNECT_SECONDS = 30.0
"""The time limit for establishing a connection, in seconds."""

EXPIRY_DAYS = 14
"""Warnings about the expiry of a certificate start this many days before it."""

TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500
"""The HTTP status of requests above a limit, and the lowest one of a server that fails."""

NOT_YET = 9
EXPIRED = 10
OTHER_HOST = 62
OTHER_ADDRESS = 64
"""OpenSSL's codes for an invalid certificate. Any other code means that the federation's authority
did not sign it.
"""


@dataclass(frozen=True)
class Problem:
    """The reason why the server cannot be reached.

    ``is_final``: whether waiting does not help, because a person has to solve the problem.
    """

    reason: str
    is_final: bool = False


@dataclass(frozen=True)
class Proxy:
    """A proxy for requests to the server, and the environment variable that sets it."""

    url: str
    variable: str

    def __str__(self) -> str:
        return f"the proxy {self.url} ({self.variable})"


def split_address(address: str, source: Path) -> tuple[str, int]:
    """Parse ``HOST:PORT``; raises ConfigError with the file for an invalid address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{source}: address = {address!r} must be HOST:PORT")
    number = int(port)
    if not 1 <= number <= MAX_PORT:
        raise ConfigError(f"{source}: address = {address!r} has no port from 1 to {MAX_PORT}")
    return host.strip("[]"), number


def host_of(address: str) -> str:
    """The host of ``HOST:PORT``, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def bypass_proxies(host: str = "", *, is_local: bool = False) -> None:
    """Disable proxies for this machine: for loopback addresses, and for ``host`` if it is one.

    ``is_local``: whether ``host`` is an address of this machine.
    """
    hosts = []
    if host and (is_local or is_loopback(host)):
        hosts.append(host)
    os.environ.update(without_proxy(hosts, os.environ))


def without_proxy(hosts: Iterable[str], variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that disable proxies for some hosts and for loopback addresses,
    besides the hosts that ``variables`` already list.
    """
    listed = variables.get("no_proxy") or variables.get("NO_PROXY") or ""
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if "*" not in names:
        names += [*LOOPBACK, *hosts]
    value = ",".join(dict.fromkeys(names))
    return {"no_proxy": value, "NO_PROXY": value}


def proxy_of(host: str, tls: bool = True) -> Proxy | None:
    """The proxy for requests to a host; None without a proxy."""
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None

    scheme = "http"
    if tls:
        scheme = "https"
    proxies = urllib.request.getproxies()
    for name in (scheme, "all"):
        if proxies.get(name):
            return Proxy(_without_password(proxies[name]), _variable(f"{name}_proxy"))
    return None


def _variable(name: str) -> str:
    """The spelling of an environment variable that is set: in lower or upper case."""
    if name not in os.environ and name.upper() in os.environ:
        return name.upper()
    return name


def _without_password(url: str) -> str:
    """A proxy's address without user and password."""
    scheme, separator, location = url.rpartition("://")
    return scheme + separator + location.rpartition("@")[2]


def is_temporary(status: int) -> bool:
    """Whether a request with this HTTP status may succeed later."""
    return status == TOO_MANY_REQUESTS or status >= SERVER_ERROR


def problem(error: BaseException, address: str, *, tls: bool = True) -> Problem:
    """The reason why a request to the server at an address failed, given one of httpx's errors. It
    mentions the proxy, if there is one.
    """
    host = host_of(address)
    proxy = proxy_of(host, tls)
    causes = list(_causes(error))

    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _certificate_problem(address, host, cause, proxy)
    if not tls and _is_cut_off(error):
        reason = f"the server at {address} uses TLS: remove --insecure-for-testing"
        return Problem(reason, is_final=True)
    for cause in causes:
        if isinstance(cause, ssl.SSLEOFError):
            return Problem("the connection was closed while it was being established")
        if isinstance(cause, ssl.SSLError):
            reason = f"the server at {address} does not use TLS: start it without "
            return Problem(reason + "--insecure-for-testing" + _through(proxy), is_final=True)

    return Problem(_network_reason(causes, host, proxy))


def _network_reason(causes: list[BaseException], host: str, proxy: Proxy | None) -> str:
    """The reason why a connection was not established, or was closed."""
    subject = "it"
    name = host
    advice = ""
    if proxy is not None:
        subject = name = str(proxy)
        advice = f"; if the server can be reached without it, set no_proxy={host}"
    for cause in causes:
        if type(cause).__name__ == "ProxyError":
            return f"{subject} answered: {cause}{advice}"
        if isinstance(cause, socket.gaierror):
            return f"no such host: {name}{advice}"
        if isinstance(cause, ConnectionRefusedError):
            return f"{subject} refused the connection; is it running?{advice}"
        if isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__:
            return f"{subject} did not answer in {CONNECT_SECONDS:g} s; a firewall?{advice}"
    if _is_cut_off(causes[0]):
        return f"{subject} closed the connection{advice}"
    return f"{str(causes[-1]) or type(causes[-1]).__name__}{advice}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_cut_off(error: BaseException) -> bool:
    """Whether the server closed the connection without an answer, as TLS does on plain text."""
    return type(error).__name__ in ("RemoteProtocolError", "ReadError")


def _through(proxy: Proxy | None) -> str:
    if proxy is None:
        return ""
    return f" (the connection goes through {proxy})"


def _certificate_problem(
    address: str, host: str, error: ssl.SSLCertVerificationError, proxy: Proxy | None
) -> Problem:
    server = f"the certificate of the server at {address}"
    if error.verify_code == EXPIRED:
        reason = f"{server} has expired; on the server: fedstill deploy renew DIR"
    elif error.verify_code == NOT_YET:
        reason = f"{server} is not valid yet: correct the clock of this machine or of the server"
    elif error.verify_code in (OTHER_HOST, OTHER_ADDRESS):
        reason = (
            f"{server} is not valid for {host}; on the server: fedstill deploy renew DIR --host "
            f"{host}"
        )
    else:
        reason = (
            f"{server} is not signed by this client's ca.crt ({error.verify_message}): it is "
            "another server, or its federation was created again; copy this client's folder again"
        )
        if proxy is not None:
            reason = f"{server} was replaced by {proxy}, or {reason}"
    return Problem(reason, is_final=True)


# Certificates that expire soon


def expiry_of(stream: Any) -> datetime.datetime | None:
    """The expiry date of the server's certificate on an httpcore stream; None without TLS."""
    tls = stream.get_extra_info("ssl_object")
    if tls is None:
        return None
    seconds = ssl.cert_time_to_seconds(tls.getpeercert()["notAfter"])
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def expiry_warning(until: datetime.datetime | None, folder: str = "DIR") -> str:
    """A warning if the server's certificate expires within ``EXPIRY_DAYS``, or an empty string."""
    if until is None:
        return ""
    days = (until - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)
    if days > EXPIRY_DAYS:
        return ""
    verb = "expires"
    if days <= 0:
        verb = "expired"
    expiry = f"{verb} on {until:%Y-%m-%d %H:%M} UTC"
    return f"the server's certificate {expiry}; on the server: fedstill deploy renew {folder}"
