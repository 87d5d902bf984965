"""A client's first check of its server: wait until it listens, and say in one line why the two
cannot talk.
"""

from __future__ import annotations

import socket
import ssl
import time

from fedstill.core.errors import ConfigError, DeployFailed
from fedstill.flower.deployment.folder import Membership

PATIENCE, AGAIN = 30.0, 2.0
"""Seconds for a connection, and between two tries."""

EXPIRED, NOT_YET, OTHER_HOST, OTHER_ADDRESS = 10, 9, 62, 64
"""OpenSSL's codes for what is wrong with a certificate; all others mean that it was not signed by
our authority.
"""


def greet(member: Membership, insecure: bool) -> None:
    """Wait until the server listens, then look at its certificate as Flower's client will.

    Raises DeployFailed if the certificate is not good, or if one of the two speaks TLS and the
    other does not.
    """
    told = False
    while (why := _why_not(member, insecure)) is None:
        if not told:
            print(f"waiting for the server at {member.address}", flush=True)
            told = True
        time.sleep(AGAIN)
    if why:
        raise DeployFailed(why)


def _why_not(member: Membership, insecure: bool) -> str | None:
    """Why the two cannot talk; empty if they can, None if the server does not listen."""
    host, port = _host_and_port(member)
    context = _lenient() if insecure else _strict(member)
    where = f"the server at {member.address}"
    try:
        with (
            socket.create_connection((host, port), PATIENCE) as there,
            context.wrap_socket(there, server_hostname=host),
        ):
            return f"{where} speaks TLS: leave --insecure-for-testing out" if insecure else ""
    except ssl.SSLCertVerificationError as error:
        return _wrong(where, host, error)
    except ssl.SSLEOFError:
        return None
    except ssl.SSLError:
        return (
            ""
            if insecure
            else f"{where} does not speak TLS: start it without --insecure-for-testing"
        )
    except OSError:
        return None


def _host_and_port(member: Membership) -> tuple[str, int]:
    host, _, port = member.address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"{member.folder / 'client.toml'}: address = {member.address!r} must be HOST:PORT"
        )
    return host.strip("[]"), int(port)


def _strict(member: Membership) -> ssl.SSLContext:
    authority = member.folder / "ca.crt"
    try:
        return ssl.create_default_context(cafile=str(authority))
    except OSError as error:  # of which an SSLError is one
        raise ConfigError(f"{authority} is no certificate: {error}") from error


def _lenient() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _wrong(where: str, host: str, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == EXPIRED:
        return f"the certificate of {where} has expired; on the server: fedstill deploy renew DIR"
    if error.verify_code == NOT_YET:
        return (
            f"the certificate of {where} is not valid yet: set this machine's clock, or the "
            "server's"
        )
    if error.verify_code in (OTHER_HOST, OTHER_ADDRESS):
        return (
            f"the certificate of {where} does not name {host}; on the server: fedstill deploy "
            f"renew DIR --host {host}"
        )
    return (
        f"the certificate of {where} is not signed by this client's ca.crt "
        f"({error.verify_message}): it is another "
        "server, or its federation was made again; copy this client's folder from there"
    )
