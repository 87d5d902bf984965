"""A folder to share: weights, the network, a model card, and a script that needs only torch."""

from __future__ import annotations

import json
import runpy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from fedstill.core import registry
from fedstill.core.errors import ConfigError, FedstillError, UnknownName, on_one_line
from fedstill.core.extensions import of_some_clients
from fedstill.core.files import make_folder, write_whole
from fedstill.export import standalone
from fedstill.export.programs import as_code, furthest
from fedstill.export.trained_model import TrainedModel
from fedstill.metrics.forgetting import forgetting_by_class
from fedstill.models.functional import channels_last
from fedstill.models.network import of_the_batch
from fedstill.running.journal import Event, read_journal

# A model card: what was trained on what, how good it is at each class and what it has forgotten,
# and how to use it.


USE = """```python
import sys

sys.path.insert(0, "PATH/TO/THIS/FOLDER")
from model import Classifier

model = Classifier.load()
logits = model({many})  # {inputs}
names = [model.classes[i] for i in logits.argmax(1)]
```"""

TASKS = {
    "image": "image-classification",
    "table": "tabular-classification",
    "vector": "tabular-classification",
    "text": "text-classification",
}
"""What the Hugging Face hub calls the task, by the kind of the examples."""

FILES = {
    "model.safetensors": "the weights",
    "config.json": "classes, what goes in, normalisation, and what was trained on what",
    "model.py": "loads them with torch and safetensors alone; `python model.py` checks what a "
    "machine computes",
    "check.safetensors": "examples of noise and their logits, for that check",
}


@dataclass(frozen=True)
class Measured:
    """What a run measured of a model on its test set, last: ``class_accuracy`` (C,), and (rounds,
    C) of all rounds.
    """

    round: int
    accuracy: float
    class_accuracy: Sequence[float | None]
    history: Sequence[Sequence[float | None]]


def measured_of(events: Sequence[Event], about: Mapping[str, Any]) -> Measured | None:
    """What a journal says of a model on the test set, by class; None if it was not measured."""
    name, stages = about["model"], about.get("own_after", ())
    each = {
        e["round"]: of for e in events if e["event"] == "round" if (of := _of(e, name)) is not None
    }
    if not each and name.startswith("client "):
        own = [
            e
            for e in events
            if e["event"] == "client" and f"client {e['client']}" == name and e["name"] in stages
        ]
        totals = events[0].get("test_counts", ())
        each = {
            e["round"]: _counted(e["correct_by_class"], totals)
            for e in own
            if "correct_by_class" in e and any(totals)
        }
    if not each:
        return None
    round, last = list(each.items())[-1]  # of several stages in a round, the last
    return Measured(
        round,
        last["accuracy"],
        last["class_accuracy"],
        [of["class_accuracy"] for of in each.values()],
    )


def _of(event: Event, name: str) -> Mapping[str, Any] | None:
    of = event.get("others", {}).get(name) or ({} if of_some_clients(name) else event)
    return of if of.get("accuracy") is not None else None


def _counted(right: Sequence[int], totals: Sequence[int]) -> dict[str, Any]:
    by_class = [r / t if t else None for r, t in zip(right, totals, strict=True)]
    return {"accuracy": sum(right) / sum(totals), "class_accuracy": by_class}


def model_card(model: TrainedModel, measured: Measured | None) -> str:
    """The text of README.md, with the head that the Hugging Face hub reads; the licence is for the
    user to state.
    """
    about = model.about
    head = "\n".join(
        [
            "---",
            "library_name: pytorch",
            f"pipeline_tag: {TASKS.get(model.inputs.kind, 'other')}",
            f"tags: [federated-learning, fedstill, {about['method'].partition('.py')[0]}]",
            "# license: write here, and below, under which licence you share this model",
            "---",
        ]
    )
    parts = [
        head,
        f"# {about['method']} on {about['dataset']}, seed {about['seed']}",
        f"A classifier of {model.inputs.many}, with {len(model.classes)} classes, trained by "
        "federated learning with "
        f"fedstill, over {about['clients']} clients whose data differ.",
        _table(["", ""], [*_facts(model).items()]),
        "## Accuracy and forgetting",
        *_results(model, measured),
        "## Use",
        USE.format(many=_word(model), inputs=_inputs(model)),
        *_limits(model),
        "## Licence",
        "Not stated yet. Whoever shares this model states it here, after checking what the data "
        "allow.",
        "## Files",
        _table(["file", "what it is"], [(f"`{name}`", what) for name, what in FILES.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(model: TrainedModel) -> dict[str, str]:
    about = model.about
    numbers = sum(p.numel() for p in model.network.parameters())
    names = {"global": "the global model", "ensemble": "the ensemble of all clients' models"}
    name = names.get(about["model"], f"the own model of {about['model']}")
    status = "" if about["finished"] else ", unfinished"
    data = about["dataset"] + _count(
        about, "train_examples", f"training {model.inputs.many_or_examples}"
    )
    versions = [f"{k} {about[k]}" for k in ("fedstill", "torch", "numpy", "python") if k in about]
    rounds = f"{about['rounds']} rounds"
    if "stopped_in_round" in about:
        rounds = f"stopped early, in round {about['stopped_in_round']} of {about['rounds']}"
    return {
        "what": f"{name}, after round {about['round']} of {about['rounds']}{status}",
        "network": f"{about['network']}; {numbers:,} parameters",
        "input": _inputs(model),
        "output": f"logits (N, {len(model.classes)})",
        "method": f"{_with_fields(about, 'method')}{_summary(about['method'])}",
        "data": f"{data}, split by {_with_fields(about, 'partition')} over {about['clients']} "
        "clients",
        "schedule": f"{_with_fields(about, 'topology')}; {rounds}",
        "seed": str(about["seed"]),
        "versions": ", ".join(versions),
    }


def _count(about: Mapping[str, Any], key: str, what: str) -> str:
    return f", {about[key]:,} {what}" if key in about else ""


def _word(model: TrainedModel) -> str:
    return model.inputs.many_or_examples


def _inputs(model: TrainedModel) -> str:
    shape = f"(N, {', '.join(map(str, model.input_shape))})"
    if model.inputs.kind == "text":
        origin = "as in the run's data"
        if model.inputs.tokenizer:
            origin = f"made by {model.made_of['tokenizer']}"
        return f"{shape}, token ids from 0 (padding) to {model.inputs.vocabulary - 1}, {origin}"
    if model.inputs.kind != "image":
        scaling = ""
        if len(model.mean):
            scaling = "; they are standardised inside, and NaN (missing) is the mean"
        return f"{shape}, {model.inputs.many}, numbers as in the run's data{scaling}"
    if model.pixels != "uint8":
        return f"{shape}, floats as in the run's data"
    return f"{shape}, uint8 from 0 to 255 or floats from 0 to 1; they are normalised inside"


def _with_fields(about: Mapping[str, Any], kind: str) -> str:
    fields = about[f"{kind}_fields"]
    texts = [f"{key} = {value}" for key, value in fields.items() if value not in (None, "", [])]
    if not texts:
        return str(about[kind])
    return f"{about[kind]} ({', '.join(texts)})"


def _summary(method: str) -> str:
    """What the library says of a method; nothing of a user's own."""
    if ".py" in method:
        return ""
    try:
        return f": {registry.lookup('method', method).summary}"
    except UnknownName:
        return ""


def _results(model: TrainedModel, measured: Measured | None) -> list[str]:
    if measured is None:
        return ["The run did not measure this model by class on its test set."]
    accuracy = _percent(measured.accuracy)
    if len(measured.history) == 1:
        shares = map(_percent, measured.class_accuracy)
        return [
            f"On the run's test set, after its only round: accuracy {accuracy}.",
            _table(["class", "accuracy"], list(zip(model.classes, shares, strict=True))),
        ]

    # None, an accuracy that is not known, becomes NaN.
    history = np.array(measured.history, dtype=float)
    forgotten = forgetting_by_class(history)
    rows = []
    classes = zip(model.classes, measured.class_accuracy, forgotten.tolist(), strict=True)
    for name, share, lost in classes:
        rows.append((name, _percent(share), _percent(lost + (share or 0)), _percent(lost)))
    mean = None
    if not np.isnan(forgotten).all():
        mean = float(np.nanmean(forgotten))
    remark = ""
    if measured.round != model.about["round"]:
        remark = " The model has been trained further since."
    tested = _count(model.about, "test_examples", model.inputs.many_or_examples)
    return [
        f"On the run's test set{tested}, after round {measured.round}: accuracy {accuracy}, "
        f"forgetting {_percent(mean)}. Forgetting is how far a class is below its best earlier "
        f"round, and the mean over the classes.{remark}",
        _table(["class", "accuracy", "best earlier round", "forgotten"], rows),
    ]


def _limits(model: TrainedModel) -> list[str]:
    lines = ["It knows these classes only: whatever goes in, the answer is one of them."]
    if of_the_batch(model.network):
        lines.append(
            "Its normalisation uses the statistics of the batch; the accuracy above is for batches "
            "of 100."
        )
    return ["## Limits", *lines]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in lines
    )


def _percent(share: float | None) -> str:
    return "–" if share is None or np.isnan(share) else f"{100 * share:.1f} %"


# A folder to share: weights, what they are of, a model card, and a script that needs torch and
# safetensors alone.


LINES = "    raise NotImplementedError  # an export has the network's own lines here"


def write_folder(model: TrainedModel, run: Path, place: Path) -> float:
    """Write a model to a new folder that can be uploaded as it is; how far its script's logits are
    off.

    run: the run's directory, for what it measured. Raises ConfigError for a folder that holds
    something, or a network that cannot be written down.
    """
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(f"{place} is there already; name a new folder")
    lines, weights = as_code(model.network, channels_last(model.normalised(model.noise(2))))
    noise = model.noise(4)
    with torch.no_grad():
        check = {"examples": noise, "logits": model(noise).contiguous()}
    config = {
        "classes": model.classes,
        "input_shape": model.input_shape,
        "pixels": model.pixels,
        "mean": model.mean.flatten().tolist(),
        "std": model.std.flatten().tolist(),
        "inputs": model.made_of,
        "trained": model.about,
    }
    events = read_journal(run / "journal.jsonl")
    # The model may be that of an earlier round than the last one.
    earlier = [event for event in events if event.get("round", 0) <= model.about["round"]]
    measured = measured_of(earlier, model.about)
    files = {
        "README.md": model_card(model, measured).encode(),
        "config.json": json.dumps(config, indent=2, ensure_ascii=False).encode(),
        "model.safetensors": safetensors.torch.save(weights, {"format": "pt"}),
        "check.safetensors": safetensors.torch.save(check),
        "model.py": _script(lines).encode(),
    }
    make_folder(place.absolute().parent)
    with tempfile.TemporaryDirectory(
        prefix=f".{place.name}.", dir=place.absolute().parent
    ) as aside:
        made = Path(aside) / "made"
        make_folder(made)
        for name, data in files.items():
            write_whole(made / name, data)
        away = furthest(model, _loaded(made, noise))
        made.replace(place)
    return away


def _script(lines: str) -> str:
    text = Path(standalone.__file__).read_text(encoding="utf-8")
    assert LINES in text
    return text.replace(LINES, lines)


def _loaded(folder: Path, like: torch.Tensor) -> Any:
    """What the folder's own script loads. Not imported: that would leave its bytecode there."""
    try:
        space = runpy.run_path(str(folder / "model.py"), run_name="model")
        model = space["Classifier"].load(folder)
        with torch.no_grad():
            model(torch.zeros(1, *model.input_shape, dtype=like.dtype))
        return model
    except FedstillError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the network cannot be written down as plain code: {on_one_line(error)}; export it as "
            "ONNX or with --pt2"
        ) from error
