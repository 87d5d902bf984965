"""Rows on code: no file that is read can run code, and no code is sent over the network."""

from __future__ import annotations

import importlib.util
import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import fedstill
from fedstill.config.resolve import resolve
from fedstill.core.errors import Refused
from fedstill.core.files import digest
from fedstill.core.records import Payload, Stage
from fedstill.flower.deployment.folder import CODE, PYPROJECT, TRIAL, require_own_app
from fedstill.running.preparation import prepare, read_data
from fedstill.version import VERSION
from scorecard.trials import Trials, problem_unless, scratch, small_run

CODE_IN_FILES = re.compile(
    r"\b(pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve)\b"
    r"|(?<!safetensors\.)torch\.(load|save)\(|yaml\.load\(|(?<![\w.])(eval|exec)\(|allow_pickle=True"
)
NAMED_ONLY = "never a pickle"
"""Words in a line of source that names such a function but does not use it."""

WATCHED = """
import sys
from pathlib import Path
import fedstill
from fedstill.running.runner import resume
from fedstill.report.page import write_page

met = []
sys.addaudithook(lambda event, args: met.append(args) if event == "pickle.find_class" else None)
out = Path(sys.argv[1])
fedstill.run(fedstill.Experiment(method="moon", rounds=1, topology={"clients": 4, "sampled": 2}), out=out)
(out / "summary.json").unlink()
resume(out)
write_page([out], out / "report.html")
print("met:", met)
"""  # noqa: E501


def unpickled(trials: int) -> Trials:
    """Each trial: a module must not name a function that runs code from files; or a run and its
    resume are watched.
    """
    problems = dict[str, str]()
    package = Path(fedstill.__file__).parent
    modules = sorted(package.rglob("*.py"))
    for path in modules[: trials - 1]:
        problems[str(path.relative_to(package))] = _forbidden_line(path)

    with scratch() as place:
        command = [sys.executable, "-c", WATCHED, str(place / "run")]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    unpickles_nothing = process.returncode == 0 and process.stdout.strip().endswith("met: []")
    output = process.stdout + process.stderr
    problems["a run, resumed and reported"] = problem_unless(
        unpickles_nothing, output.strip()[-200:]
    )
    return Trials.of(problems)


def _forbidden_line(path: Path) -> str:
    """The first line of a module that names such a function; empty if there is none."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        code = line.partition("#")[0]
        if CODE_IN_FILES.search(code) and NAMED_ONLY not in line:
            return f"line {number}"
    return ""


CODE_OF_SERVER = """
from dataclasses import dataclass
from fedstill.methods.fedavg import FedAvg
open({marker!r}, "w").close()
@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""


def foreign_code(trials: int) -> Trials:
    """Each trial: a site refuses a request or an app that contains or names code, or that does not
    belong to the run.
    """
    if importlib.util.find_spec("flwr") is None:
        return Trials(0, 0, ("needs Flower: pip install 'fedstill[flower]'",))
    problems = dict[str, str]()
    with scratch() as place:
        probes = {**_requests(place), **_apps()}
        for name in list(probes)[:trials]:
            problems[name] = probes[name]()
        if (place / "ran").exists():
            problems["code of a server's"] = "it was executed"
    return Trials.of(problems)


def _requests(place: Path) -> dict[str, Callable[[], str]]:
    """Requests of a server to a site that allows no code, by name. Each returns the problem of the
    site's answer.
    """
    from fedstill.flower.messages import Request
    from fedstill.flower.site import StageExecutor
    from fedstill.flower.site_settings import Site

    settings = resolve(small_run("fedavg", engine="flower"))
    data = read_data(settings)
    params = prepare(settings).world.initial(0)
    clients = tuple(range(settings.clients))
    valid = Request(
        version=VERSION,
        config=settings.toml,
        sha=digest(settings.toml.encode()),
        run="run1",
        client=0,
        stage=Stage(1, 0, "train", clients),
        payload=Payload(params=params),
    )
    code = CODE_OF_SERVER.format(marker=str(place / "ran"))
    (place / "mine.py").write_text(code, encoding="utf-8")

    def with_config(old: str, new: str) -> Request:
        config = valid.config.replace(old, new, 1)
        return replace(valid, config=config, sha=digest(config.encode()))

    def with_method(name: str) -> Request:
        return with_config('name = "fedavg"', f'name = "{name}"')

    requests = {
        "another version": replace(valid, version="9.9"),
        "another hash": replace(valid, sha="0" * 64),
        "a file of the server's": with_method(f"{place / 'mine.py'}:Mine"),
        "an import path": with_method("os:system"),
        "a method that is unknown": with_method("fedspy"),
        "a key that is unknown": with_config("rounds = 2", "rounds = 2\nspy = true"),
        "a stage of no schedule": replace(valid, stage=Stage(1, 0, "spy", clients)),
        "labels that nobody needs": replace(valid, stage=Stage(0, 0, "census", clients)),
    }

    def problem_of(name: str) -> str:
        site = Site(0, place / name.replace(" ", "-"))
        reply = StageExecutor(site, data, shows_reasons=True)(requests[name])
        is_refused = bool(reply.failure) and not reply.content and not reply.examples
        return problem_unless(is_refused, "it was not refused")

    return {name: partial(problem_of, name) for name in requests}


def _apps() -> dict[str, Callable[[], str]]:
    """Apps that are not fedstill's app, by name. Each returns the problem if it is not refused."""
    project = PYPROJECT.format(version="1", config=TRIAL.format(clients=2)).encode()
    hostile_project = project.replace(b"fedstill_app.client_app:app", b"os:system")
    app: dict[str, bytes] = {"pyproject.toml": project, **CODE}
    apps = {
        "an app with a file more": {**app, "fedstill_app/more.py": b"import os"},
        "an app with other entry points": {**app, "pyproject.toml": hostile_project},
    }

    def problem_of(files: Mapping[str, bytes]) -> str:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        try:
            require_own_app(out.getvalue())
        except Refused:
            return ""
        return "it was not refused"

    return {name: partial(problem_of, files) for name, files in apps.items()}
