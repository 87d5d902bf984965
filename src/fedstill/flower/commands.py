"""The commands for federations of machines: deploy init, add, remove, unlearn, admit, key, renew,
server, client and status.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from fedstill import manifest
from fedstill.core.errors import ConfigError
from fedstill.core.files import counted
from fedstill.version import VERSION

if TYPE_CHECKING:
    from fedstill.flower.deployment.control import RunStatus, SiteStatus
    from fedstill.flower.deployment.folder import Federation

deploy = App(
    name="deploy",
    help="Run experiments on machines that do not trust each other: Flower, with TLS and a list of "
    "keys.",
)

Hosts = Annotated[
    tuple[str, ...], Parameter(negative="", consume_multiple=False, show_default=False)
]
Insecure = Annotated[bool, Parameter(negative="")]


@deploy.command(name="init")
def init_command(
    directory: Path,
    *,
    clients: int,
    host: Hosts = ("127.0.0.1",),
    listen: str = "127.0.0.1",
    port: int = 8443,
) -> int:
    """Create a federation's folder: a certificate authority, the server's certificate, and a key
    for each client.

    Args:
        directory: A new or empty folder.
        clients: How many clients.
        host: A name or address by which clients reach the server, for its certificate. May be
            repeated. By default, 127.0.0.1.
        listen: The address that the server listens on.
        port: The server's only port.
    """
    from fedstill.flower.deployment import folder

    made = folder.init(directory, clients, host, listen=listen, port=port, version=VERSION)
    name = str(directory)
    print(
        f"{name}: created a federation of {counted(clients, 'client')}. Do not copy {name}/ca.key "
        "to any other machine. Then:"
    )
    print(f"  fedstill deploy server {name}")
    for client in range(clients):
        print(
            f"  fedstill deploy client {name}/client{client}      # with that folder alone, at its "
            "site"
        )
    print(
        f"  fedstill run my.toml --engine flower --federation {name}    # topology.clients = "
        f"{made.clients}"
    )
    return 0


@deploy.command
def server(directory: Path, *, insecure_for_testing: Insecure = False) -> None:
    """Start a federation's server (Flower's SuperLink); it accepts the clients whose keys are
    listed.

    Args:
        directory: The federation's folder.
        insecure_for_testing: Use neither TLS nor the list of keys; on a loopback address only.
    """
    from fedstill.flower.deployment import control, folder, programs

    federation = folder.load_federation(directory)
    with programs.alone(federation.server, "a server"):
        programs.demand_free(federation)
        folder.ensure_keys(federation)
        command = programs.superlink(federation, insecure_for_testing)
        control.write_link(federation, insecure_for_testing)
    # The server replaces this process, which frees the memory of modules that the checks imported.
    programs.become(command, programs.server_environment(federation))


@deploy.command(name="admit")
def admit_command(directory: Path) -> int:
    """Reload the list of keys while the server runs.

    The server then accepts new clients on the list, and rejects clients that are no longer listed.

    Args:
        directory: The federation's folder. Keys are in its server/allowed, a file clientN.pub for
            each client.
    """
    from fedstill.flower.deployment import control, folder

    lines = list(control.admit(folder.load_federation(directory), seconds=0))
    print("\n".join(lines or ["nothing has changed"]))
    return 0


@deploy.command(name="add")
def add_command(directory: Path, *, clients: int) -> int:
    """Add clients to a federation; a running server admits them at once.

    Args:
        directory: The federation's folder.
        clients: How many clients to add.
    """
    from fedstill.flower.deployment import folder

    federation, folders = folder.add_clients(folder.load_federation(directory), clients)
    for path in folders:
        print(f"{path}: copy this folder to its site over a secure channel, and delete it here")
    print(f"topology.clients can be up to {federation.clients} from now on")
    _print_admitted(federation)
    return 0


@deploy.command(name="remove")
def remove_command(directory: Path, client: int) -> int:
    """Remove a client that has left. Its key is no longer accepted, and no run waits for it.

    Its number is not assigned to another site.

    Args:
        directory: The federation's folder.
        client: The number of the client.
    """
    from fedstill.flower.deployment import folder

    federation = folder.load_federation(directory)
    folder.remove_client(federation, client)
    print(f"client {client} is removed")
    if manifest.client_removals():
        print(f"leave it out of new runs with unlearning.clients = [{client}]")
    _print_admitted(federation)
    return 0


@deploy.command(name="unlearn")
def unlearn_command(directory: Path, client: int, *runs: Path) -> int:
    """Remove a client, train the models of its runs again without it, and delete its files on this
    machine.

    Runs that started from the model of one of these runs are trained again, too. Every new run has
    a certificate. The command lists everything that it cannot delete.

    Args:
        directory: The federation's folder.
        client: The number of the client.
        runs: The directories of finished runs. By default, all runs since the start of the server.
    """
    from fedstill.flower.deployment import control, folder
    from fedstill.running.runs import runs_of_client

    federation = folder.load_federation(directory)
    folders = list(runs) or control.run_folders(federation)
    concerned = runs_of_client(folders, client)
    if not concerned:
        raise ConfigError(
            f"client {client} contributed to none of {counted(len(folders), 'run')}; pass the "
            "directory of a run, or use `fedstill deploy remove`"
        )
    removals = [part.load() for part in manifest.client_removals()]
    if not removals:
        raise ConfigError("this needs the package fedstill.unlearning, which is not installed")
    if federation.listed_key(client).is_file():
        remove_command(directory, client)
    for run in concerned:
        for remove_from_run in removals:
            new = remove_from_run(run, client)
            print(f"{new}: {run} without client {client}, with a certificate")
    deletion = folder.delete_traces(federation, client, concerned)
    for path in deletion.deleted:
        print(f"deleted: {path}")
    for line in deletion.left:
        print(f"not deleted: {line}")
    return 0


def _print_admitted(federation: Federation) -> None:
    """Reload the list of keys of a running server, and print the changes."""
    from fedstill.flower.deployment import control

    try:
        for line in control.admit(federation, seconds=0):
            print(line)
    except (control.NotListening, control.NeverStarted):
        print("the server is not running; it will read the list when it starts")


@deploy.command
def status(directory: Path) -> int:
    """Show the sites of a federation, the last contact with each of them, and the current run.

    Args:
        directory: The federation's folder.
    """
    from fedstill.flower.deployment import certificates, control, folder, reach

    federation = folder.load_federation(directory)
    server = control.Control.of(federation)
    sites = control.site_states(federation, server)
    runs = server.runs_under_way()
    for site in sites:
        print(f"{site.name:<12} {site_state(site)}")
    for departed in federation.departed:
        print(f"client{departed:<6} has left")
    for run in runs:
        print(f"run {run.number}: {run_state(run)}")
    if not runs:
        print("no run is in progress")
    if server.certificates is not None:
        until = certificates.last_day(federation.server / "server.crt")
        print(reach.expiry_warning(until, str(directory)) or f"certificate valid until {until:%F}")
    return 0


def site_state(site: SiteStatus) -> str:
    """A description of a site: whether it is online, and the time of its last contact."""
    from fedstill.core.files import duration

    if site.contact is None:
        return "has not connected since the server started"
    seconds = (datetime.datetime.now(datetime.UTC) - site.contact).total_seconds()
    state = "offline"
    if site.is_online:
        state = "online"
    return f"{state:<8} last contact {duration(max(0.0, seconds))} ago"


def run_state(run: RunStatus) -> str:
    """A description of a run: its directory, and its last complete round."""
    from fedstill.running.journal import JOURNAL, read_journal

    if not run.folder:
        return "in a directory created by the server"
    path = Path(run.folder) / JOURNAL
    if not path.is_file():
        return f"{run.folder}, being prepared"
    events = read_journal(path)
    rounds = [event["round"] for event in events if event["event"] == "round"]
    return f"{run.folder}, complete rounds: {max(rounds, default=0)}"


@deploy.command(name="key")
def key_command(
    directory: Path, client: int, *, returns: Annotated[bool, Parameter(negative="")] = False
) -> int:
    """Create a new key for a client whose old key was lost or is no longer trusted; a running
    server refuses the old key from then on.

    Args:
        directory: The federation's folder.
        client: The number of the client.
        returns: The client was removed, and is now a member again.
    """
    from fedstill.flower.deployment import folder

    made = folder.rekey(folder.load_federation(directory), client, returns=returns)
    print(f"{made}: copy client.key to the client's machine, and delete this folder here")
    _print_admitted(folder.load_federation(directory))
    return 0


@deploy.command(name="renew")
def renew_command(directory: Path, *, host: Hosts = ()) -> int:
    """Renew the server's certificate, before or after it expires. A running server reloads it, and
    clients need no change.

    Args:
        directory: The federation's folder, with its ca.key.
        host: An additional name or address under which clients reach the server. May be repeated.
    """
    from fedstill.flower.deployment import certificates, folder

    federation = folder.renew(folder.load_federation(directory), host)
    until = certificates.last_day(federation.server / "server.crt")
    print(
        f"the certificate for {', '.join(federation.hosts)} is valid until {until:%Y-%m-%d}; a "
        "running server reloads it within seconds"
    )
    authority = federation.folder / "ca.crt"
    if until >= certificates.last_day(authority):
        print(
            f"{authority}, which signs certificates, expires at the same time: create a new "
            "federation with `fedstill deploy init` before then"
        )
    return 0


@deploy.command
def client(directory: Path, *, wait: int = 120, insecure_for_testing: Insecure = False) -> int:
    """Start a client (Flower's SuperNode) with its key and its site.toml.

    Args:
        directory: The client's folder, created by `deploy init`.
        wait: How many seconds to retry if the server does not list this client's key yet.
        insecure_for_testing: Use neither TLS nor a key; for a server on a loopback address only.
    """
    from fedstill.flower.deployment import folder, node, programs

    member = folder.membership(directory)
    programs.check_client(member, insecure_for_testing)
    with programs.alone(member.folder, "a client"):
        programs.use_environment(member.folder / "flwr")
        return node.serve_site(member, insecure_for_testing, wait)
