"""What a finished run leaves: its final model, a summary, and the Result that Python hands back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from fedstill.errors import CorruptFile
from fedstill.experiment.config.settings import Settings
from fedstill.experiment.run_directory import journal as journals
from fedstill.experiment.run_directory.cut_short import refuse_cut
from fedstill.experiment.run_directory.frames import frame_of_clients, frame_of_events
from fedstill.experiment.run_directory.refusals import Refusals
from fedstill.experiment.run_directory.shown import forgotten_table, notebook, share
from fedstill.experiment.run_directory.split_file import read_label_counts
from fedstill.files import digest, in_shell, named_path, short_name, write_whole
from fedstill.final_model import FINAL, MODEL_SEAL, read_final
from fedstill.metrics.accuracy import best_and_recent
from fedstill.metrics.answers import QUERY_MEASURES, UNTAUGHT
from fedstill.records import State
from fedstill.wire.reports import json_value

if TYPE_CHECKING:
    import pandas

QUERIED = (*(f"query_{name}" for name in QUERY_MEASURES), UNTAUGHT)
"""What a summary says of a run whose clients asked for classes."""


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run. ``accuracy`` and ``forgetting`` are the last round's; ``history`` has one
    mapping a round.

    ``model``: the global model's parameters by name; ``fedstill.load_model`` makes a module of
    them. ``measures``: what the run's measures gave, one mapping a measure and stage, in
    order. ``classes``: their names.
    """

    accuracy: float
    forgetting: float
    history: list[dict[str, Any]]
    model: dict[str, Tensor]
    directory: Path
    summary: Mapping[str, Any]
    measures: list[dict[str, Any]]
    classes: tuple[str, ...] = ()

    @staticmethod
    def of(folder: Path | str) -> Result:
        """The result of a finished run's directory; raises CorruptFile for a file that is damaged
        or gone.
        """
        folder = named_path(folder)
        path = folder / "summary.json"
        events = journals.read_journal(folder / "journal.jsonl")
        refuse_cut(folder, events)
        try:
            summary = json.loads(path.read_bytes())
            accuracy, forgetting = summary["accuracy"], summary["forgetting"]
            path = folder / FINAL
            model = safetensors.torch.load(read_final(path))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            todo = f"delete summary.json, then `fedstill resume {in_shell(folder)}`"
            if not (folder / "checkpoints").is_dir():
                todo = (
                    "put it back: there are no checkpoints to make it from (a pack keeps neither)"
                )
            raise CorruptFile(f"{path} is damaged: {error}; {todo}") from error
        history, measures = (
            [e for e in events if e["event"] == kind] for kind in ("round", "measure")
        )
        classes = tuple(str(c) for e in events[:1] for c in e.get("classes", []))
        return Result(accuracy, forgetting, history, model, folder, summary, measures, classes)

    def rounds(self) -> pandas.DataFrame:
        """One row a round: what ``history`` has, with a column for each number; raises ConfigError
        without pandas.

        Names inside names are joined by a dot, and a list over the classes has a column for each:
        ``class_accuracy.3``.
        """
        return frame_of_events(self.history, self.classes)

    def clients(self) -> pandas.DataFrame:
        """One row for each client and stage, from the journal: examples, bytes, losses, seconds,
        who was refused.

        Raises ConfigError without pandas, CorruptFile if the run's directory is gone.
        """
        events = journals.read_journal(self.directory / "journal.jsonl")
        return frame_of_clients([e for e in events if e["event"] == "client"], self.classes)

    def label_counts(self) -> NDArray[np.int64]:
        """How many training examples of each class each client has: (clients, C); (0, C) of real
        sites, which keep it.

        Raises CorruptFile if the run's directory is gone or its split is damaged.
        """
        start = journals.read_journal(self.directory / "journal.jsonl", 1)
        return read_label_counts(self.directory, start[0]).table().astype(np.int64)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{what} {value}" for what, value in self._numbers.items())
        rounds = f"{len(self.history)} round{'' if len(self.history) == 1 else 's'}"
        return f"<Result: {self._title}: {numbers}; {rounds}, in {self.directory}>"

    @property
    def _title(self) -> str:
        s = self.summary
        return (
            f"{s.get('method', 'a run')} on {s.get('dataset', 'data')}, seed {s.get('seed', '?')}"
        )

    @property
    def _numbers(self) -> dict[str, str]:
        """The result in a few numbers, those of the clients' own models first where they are the
        answer.
        """
        s = self.summary
        own = {
            "for the clients": "personal_accuracy",
            "forgetting at clients": "personal_forgetting",
        }
        numbers = {name: share(s[key]) for name, key in own.items() if s.get(key) is not None}
        if self.accuracy is not None or not numbers:
            numbers |= {"accuracy": share(self.accuracy), "forgetting": share(self.forgetting)}
        return numbers

    def _repr_html_(self) -> str:
        """The result in a notebook, with what each class has lost."""
        facts = {**self._numbers, "rounds": str(len(self.history)), "in": str(self.directory)}
        return notebook(self._title, facts, forgotten_table(self.classes, self.history))


PERSONAL = ("personal_accuracy", "personal_accuracy_std", "personal_forgetting", "personal_clients")
"""What a summary says of a run whose clients have models of their own: the last round's."""

OF_LAST = (
    *PERSONAL,
    "own_test_accuracy",
    "own_test_worst",
    "own_test_by_client",
    "private_by_client",
    "public_by_client",
    "server_public_accuracy",
    "privacy",
)
"""What a summary has of the last round, where it is there."""


def summary_of(
    settings: Settings,
    history: Sequence[Mapping[str, Any]],
    clients: Sequence[Mapping[str, Any]] = (),
    measures: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The run in one mapping, with the last, the best and the mean accuracy of the last ten: papers
    print any of them.

    history, clients: the events of rounds and of clients. measures: seconds of each measure in all
    rounds.
    """
    accuracies = [e["accuracy"] for e in history]
    return {
        "method": settings.named.method.label,
        "dataset": short_name(settings.data.name),
        "partition": settings.named.partition.label,
        "topology": settings.named.topology.label,
        "clients": settings.clients,
        "rounds": settings.rounds,
        "seed": settings.seed,
        "answer": "clients" if "personal_clients" in history[-1] else "server",
        "accuracy": accuracies[-1],
        **best_and_recent(accuracies),
        "forgetting": history[-1]["forgetting"],
        **{k: history[-1][k] for k in (*QUERIED, *OF_LAST) if k in history[-1]},
        **Refusals.of(clients, settings.clients, len(history)).summary,
        "bytes_up": sum(e["bytes_up"] for e in history),
        "bytes_down": sum(e["bytes_down"] for e in history),
        "seconds": sum(e["seconds"] for e in history),
        "seconds_training": sum(e["seconds_training"] for e in history),
        **(
            {"seconds_cpu": sum(e["seconds_cpu"] for e in history)}
            if all("seconds_cpu" in e for e in history)
            else {}
        ),
        "seconds_measures": dict(measures or {}),
    }


def write_result(folder: Path, state: State, summary: Mapping[str, Any]) -> None:
    """Write ``model.safetensors`` and then ``summary.json``, with its SHA-256; a run with that file
    is finished.
    """
    params = {k: v.detach().contiguous().clone() for k, v in state.params.items()}
    write_whole(folder / FINAL, data := safetensors.torch.save(params))
    sealed = {**summary, MODEL_SEAL: digest(data)}
    write_whole(folder / "summary.json", json.dumps(json_value(sealed), indent=2).encode())
