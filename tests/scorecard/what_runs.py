"""Rows on code: no file that is read can run any, and none crosses the wire."""

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
from scorecard.trials import Trials, scratch, small_run

CODE_IN_FILES = re.compile(
    r"\b(pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve)\b"
    r"|(?<!safetensors\.)torch\.(load|save)\(|yaml\.load\(|(?<![\w.])(eval|exec)\(|allow_pickle=True"
)
NAMED_ONLY = "never a pickle"
"""What a line of source says that only speaks of them."""

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
    """Each trial: a module that may not name what runs code from files; and a run that is watched,
    made and resumed.
    """
    package = Path(fedstill.__file__).parent
    modules = sorted(package.rglob("*.py"))
    problems = {str(path.relative_to(package)): _names_it(path) for path in modules[: trials - 1]}
    with scratch() as place:
        command = [sys.executable, "-c", WATCHED, str(place / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    clean = done.returncode == 0 and done.stdout.strip().endswith("met: []")
    problems["a run, resumed and reported"] = (
        "" if clean else (done.stdout + done.stderr).strip()[-200:]
    )
    return Trials.of(problems)


def _names_it(path: Path) -> str:
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    met = [
        n
        for n, line in lines
        if CODE_IN_FILES.search(line.partition("#")[0]) and NAMED_ONLY not in line
    ]
    return f"line {met[0]}" if met else ""


OWN = """
from dataclasses import dataclass
from fedstill.methods.fedavg import FedAvg
open({marker!r}, "w").close()
@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""


def foreign_code(trials: int) -> Trials:
    """Each trial: a request or an app that brings or names code, or is none of the run's; a site
    refuses it.
    """
    if importlib.util.find_spec("flwr") is None:
        return Trials(0, 0, ("needs Flower: pip install 'fedstill[flower]'",))
    with scratch() as place:
        asked = {**_requests(place), **_apps()}
        problems = {name: what() for name, what in list(asked.items())[:trials]}
        if (place / "ran").exists():
            problems["code of a server's"] = "it was executed"
    return Trials.of(problems)


def _requests(place: Path) -> dict[str, Callable[[], str]]:
    """What a server may ask of a site that lists no code, by name; each gives what is wrong with
    the answer.
    """
    from fedstill.flower.messages import Request
    from fedstill.flower.site import StageExecutor
    from fedstill.flower.site_settings import Site

    settings = resolve(small_run("fedavg", engine="flower"))
    ready, data = prepare(settings), read_data(settings)
    everyone = tuple(range(settings.clients))
    stage, down = Stage(1, 0, "train", everyone), Payload(params=ready.world.initial(0))
    good = Request(
        VERSION, settings.toml, digest(settings.toml.encode()), "run1", 0, stage, payload=down
    )
    (place / "mine.py").write_text(OWN.format(marker=str(place / "ran")), encoding="utf-8")

    def put(old: str, new: str) -> Request:
        text = good.config.replace(old, new, 1)
        return replace(good, config=text, sha=digest(text.encode()))

    asked = {
        "another version": replace(good, version="9.9"),
        "another hash": replace(good, sha="0" * 64),
        "a file of the server's": put('name = "fedavg"', f'name = "{place / "mine.py"}:Mine"'),
        "an import path": put('name = "fedavg"', 'name = "os:system"'),
        "a method that is unknown": put('name = "fedavg"', 'name = "fedspy"'),
        "a key that is unknown": put("rounds = 2", "rounds = 2\nspy = true"),
        "a stage of no schedule": replace(good, stage=Stage(1, 0, "spy", everyone)),
        "labels that nobody needs": replace(good, stage=Stage(0, 0, "census", everyone)),
    }

    def refused(name: str) -> str:
        answer = StageExecutor(Site(0, place / name.replace(" ", "-")), data, shows_reasons=True)(
            asked[name]
        )
        return (
            ""
            if answer.failure and not answer.content and not answer.examples
            else "it was not refused"
        )

    return {name: partial(refused, name) for name in asked}


def _apps() -> dict[str, Callable[[], str]]:
    """Apps that are not fedstill's own, by name."""
    project = PYPROJECT.format(version="1", config=TRIAL.format(clients=2)).encode()
    plain: dict[str, bytes] = {"pyproject.toml": project, **CODE}
    changed = {
        "an app with a file more": {**plain, "fedstill_app/more.py": b"import os"},
        "an app with other entry points": {
            **plain,
            "pyproject.toml": project.replace(b"fedstill_app.client_app:app", b"os:system"),
        },
    }

    def refused(files: Mapping[str, bytes]) -> str:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        try:
            require_own_app(out.getvalue())
        except Refused:
            return ""
        return "it was not refused"

    return {name: partial(refused, files) for name, files in changed.items()}
