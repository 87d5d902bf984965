"""The two sides of fedstill's Flower app, which ``flwr run`` starts on the server and at every
client.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from platformdirs import user_data_path

from fedstill.config.experiment import from_tree
from fedstill.continual.task_test import SITE_TEST
from fedstill.core.files import counted, parse_toml
from fedstill.flower import MAX_REQUEST_BYTES, say
from fedstill.flower.messages import Request, SiteReply, require_flower
from fedstill.flower.site import AnswerFunction, StageExecutor, prune_states
from fedstill.flower.site import client_app as app_of
from fedstill.flower.site_settings import Site, load_site
from fedstill.running import runner


def executor_of(context: Any) -> tuple[int, AnswerFunction]:
    """The number of a node's client and its executor, from ``site.toml``. A node without this file
    only takes part in trials.
    """
    config = context.node_config
    if "site" in config:
        site = load_site(Path(str(config["site"])))
    else:
        site = Site(int(config["partition-id"]), user_data_path("fedstill") / "sites")
    prune_states(site.memory, site.keep_days)
    return site.client, _reported(StageExecutor(site))


def _reported(executor: AnswerFunction) -> AnswerFunction:
    """An executor that also prints a line for each executed stage."""

    def answer(request: Request) -> SiteReply:
        began = time.monotonic()
        reply = executor(request)
        if not reply.failure:
            say(_line(request, reply, time.monotonic() - began))
        return reply

    return answer


def _line(request: Request, reply: SiteReply, seconds: float) -> str:
    """A description of the work for a request."""
    stage = request.stage
    work = "answered"
    if reply.examples:
        work = counted(reply.examples, "example")
    if stage.name == SITE_TEST:
        work = f"{reply.metrics.get('site_test_examples', 0)} test examples"
    if reply.idle:
        work = "no data in this task"
    return f"run {request.run[:8]}, round {stage.round}, {stage.name}: {work}, {seconds:.1f} s"


def _server_app() -> Any:
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        config = context.run_config
        out = None
        if config["out"]:
            out = Path(str(config["out"]))
        if config["resume"]:
            if out is None:
                raise ValueError("resume needs out, the run's directory")
            runner.resume(out, grid=grid)
            return
        tree = parse_toml(str(config["config"]).encode())
        runner.run(from_tree({**tree, "engine": "flower"}, {}, None), out, grid=grid)

    return app


require_flower()
client_app = app_of(executor_of, MAX_REQUEST_BYTES)
server_app = _server_app()
