"""A folder to share: weights, a model card, and a script that needs only torch and safetensors."""

from __future__ import annotations

import json
import re
import runpy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from fedstill.core import descriptions, registry
from fedstill.core.errors import ConfigError, FedstillError, UnknownName, on_one_line
from fedstill.core.extensions import of_some_clients
from fedstill.core.files import counted, make_folder, neutral, write_whole
from fedstill.export import standalone
from fedstill.export.programs import as_code, furthest
from fedstill.export.trained_model import (
    STANDARDISED_AT,
    TrainedModel,
    lacks_standardisation,
    name_in_words,
)
from fedstill.metrics.accuracy import forgetting_by_class, share_of
from fedstill.models.functional import channels_last
from fedstill.models.network import depends_on_batch
from fedstill.running.numbers import RunNumbers
from fedstill.running.runs import Run, read_run

# ---- the model card ------------------------------------------------------------------------------

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
"""The name of the task on the Hugging Face hub, by kind of examples."""

FILES = {
    "model.safetensors": "the weights",
    "config.json": "classes, inputs, normalisation, and the training",
    "model.py": "loads the model with torch and safetensors only; `python model.py` checks its "
    "results on a machine",
    "check.safetensors": "examples of noise and their logits, for this check",
}


@dataclass(frozen=True)
class Measured:
    """The last evaluation of a model on the run's test set.

    ``class_accuracy``: (C,), None for a class without test examples. ``history``: the class
    accuracies of all evaluated rounds, (rounds, C).
    """

    round: int
    accuracy: float
    class_accuracy: Sequence[float | None]
    history: Sequence[Sequence[float | None]]


def measured_of(run: Run, about: Mapping[str, Any]) -> Measured | None:
    """The last evaluation of a model, up to its round; None if it was not evaluated by class.

    about: ``TrainedModel.about``.
    """
    name = about["model"]
    evaluations = _until(about["round"], _evaluations(run.numbers, name))
    if not evaluations and name.startswith("client "):
        at_client = _evaluations_at_client(run, name, about.get("own_after", ()))
        evaluations = _until(about["round"], at_client)
    if not evaluations:
        return None
    last_round = max(evaluations)
    return Measured(
        round=last_round,
        accuracy=evaluations[last_round].accuracy,
        class_accuracy=evaluations[last_round].class_accuracy,
        history=[evaluation.class_accuracy for evaluation in evaluations.values()],
    )


@dataclass(frozen=True)
class _Evaluation:
    """The accuracy of a model, and its accuracy on each class (C,)."""

    accuracy: float
    class_accuracy: Sequence[float | None]


def _until(last_round: int, evaluations: Mapping[int, _Evaluation]) -> dict[int, _Evaluation]:
    """The evaluations up to a round, in the order of rounds."""
    return {
        round: evaluation
        for round, evaluation in sorted(evaluations.items())
        if round <= last_round
    }


def _evaluations(numbers: RunNumbers, name: str) -> dict[int, _Evaluation]:
    """The evaluations of a model by round: under its name, or those of the model for all."""
    evaluations = {}
    if not of_some_clients(name):
        evaluations = _evaluations_below(numbers, "")
    return evaluations | _evaluations_below(numbers, f"others/{name}/")


def _evaluations_below(numbers: RunNumbers, prefix: str) -> dict[int, _Evaluation]:
    """The evaluations by round whose metrics begin with a prefix."""
    by_class = numbers.by_class(f"{prefix}class_accuracy")
    unknown: list[float | None] = [None] * numbers.classes
    accuracies = numbers.by_round(f"{prefix}accuracy")
    return {
        round: _Evaluation(accuracy, by_class.get(round, unknown))
        for round, accuracy in accuracies.items()
        if round > 0
    }


def _evaluations_at_client(run: Run, name: str, stages: Sequence[str]) -> dict[int, _Evaluation]:
    """The evaluations of a client's model by round, as the client sent them; the last of ``stages``
    in a round counts.
    """
    totals: Sequence[int] = run.start.get("test_counts", ())
    if not any(totals):
        return {}
    evaluations = {}
    for report in run.numbers.client_reports("correct_by_class"):
        if f"client {report.client}" == name and report.stage in stages:
            correct = [count or 0.0 for count in report.values]
            by_class = [share_of(*pair) for pair in zip(correct, totals, strict=True)]
            evaluations[report.round] = _Evaluation(sum(correct) / sum(totals), by_class)
    return evaluations


def model_card(model: TrainedModel, measured: Measured | None) -> str:
    """The text of README.md, with the head that the Hugging Face hub reads.

    The licence is left to the user.
    """
    about = model.about
    head = "\n".join(
        [
            "---",
            "library_name: pytorch",
            f"pipeline_tag: {TASKS.get(model.inputs.kind, 'other')}",
            f"tags: [federated-learning, fedstill, {_tag(about['method'])}]",
            "# license: state here and below the licence of this model",
            "---",
        ]
    )
    parts = [
        head,
        neutral(f"# {about['method']} on {about['dataset']}, seed {about['seed']}", "markdown"),
        f"A classifier of {model.inputs.many} with {len(model.classes)} classes, trained by "
        f"federated learning with fedstill over {about['clients']} clients with different data.",
        _table(["", ""], list(_facts(model).items())),
        "## Accuracy and forgetting",
        *_results(model, measured),
        "## Use",
        USE.format(many=model.inputs.many_or_examples, inputs=_inputs(model)),
        *_limits(model),
        "## Licence",
        "Not stated yet. State it here before you share the model, after checking what the data "
        "allow.",
        "## Files",
        _table(["file", "contents"], [(f"`{name}`", text) for name, text in FILES.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def _tag(method: str) -> str:
    """The name of a method as a word of YAML."""
    return re.sub(r"[^\w.-]+", "-", method.partition(".py")[0])


def _facts(model: TrainedModel) -> dict[str, str]:
    about = model.about
    parameter_count = sum(weights.numel() for weights in model.network.parameters())
    status = ""
    if not about["finished"]:
        status = ", unfinished"
    data = about["dataset"] + _count(
        about, "train_examples", f"training {model.inputs.many_or_examples}"
    )
    packages = [name for name in ("fedstill", "torch", "numpy", "python") if name in about]
    versions = [f"{name} {about[name]}" for name in packages]
    rounds = counted(about["rounds"], "round")
    if "stopped_in_round" in about:
        rounds = f"stopped early, in round {about['stopped_in_round']} of {about['rounds']}"
    name = name_in_words(about)
    return {
        "what": f"{name}, after round {about['round']} of {about['rounds']}{status}",
        "network": f"{about['network']}; {parameter_count:,} parameters",
        "input": _inputs(model),
        "output": f"logits (N, {len(model.classes)})",
        "method": f"{_with_fields(about, 'method')}{_summary(about['method'])}",
        "data": f"{data}, split by {_with_fields(about, 'partition')} over {about['clients']} "
        "clients",
        "schedule": f"{_with_fields(about, 'topology')}; {rounds}",
        "seed": str(about["seed"]),
        "versions": ", ".join(versions),
    }


def _count(about: Mapping[str, Any], key: str, noun: str) -> str:
    if key not in about:
        return ""
    return f", {about[key]:,} {noun}"


def _inputs(model: TrainedModel) -> str:
    shape = f"(N, {', '.join(map(str, model.input_shape))})"
    if model.inputs.kind == "text":
        origin = "as in the run's data"
        if model.inputs.tokenizer:
            origin = f"made by {model.made_of['tokenizer']}"
        return f"{shape}, token ids from 0 (padding) to {model.inputs.vocabulary - 1}, {origin}"
    if lacks_standardisation(model):
        return (
            f"{shape}, {model.inputs.many}, numbers standardised by the mean and standard "
            "deviation of the client whose data they are; the model contains none"
        )
    if model.inputs.kind != "image":
        scaling = ""
        if len(model.mean):
            scaling = "; the model standardises them, and NaN (missing) becomes the mean"
        return f"{shape}, {model.inputs.many}, numbers as in the run's data{scaling}"
    if model.pixels != "uint8":
        return f"{shape}, floats as in the run's data"
    return f"{shape}, uint8 from 0 to 255 or floats from 0 to 1; the model normalises them"


def _with_fields(about: Mapping[str, Any], kind: str) -> str:
    fields = about[f"{kind}_fields"]
    texts = [f"{key} = {value}" for key, value in fields.items() if value not in (None, "", [])]
    if not texts:
        return str(about[kind])
    return f"{about[kind]} ({', '.join(texts)})"


def _summary(method: str) -> str:
    """The summary of a method of the library; empty for a user's method."""
    if ".py" in method:
        return ""
    try:
        return f": {descriptions.summary(registry.lookup('method', method))}"
    except UnknownName:
        return ""


def _results(model: TrainedModel, measured: Measured | None) -> list[str]:
    if measured is None:
        return ["The run did not measure this model by class on its test set."]
    accuracy = _percent(measured.accuracy)
    if len(measured.history) == 1:
        shares = [_percent(share) for share in measured.class_accuracy]
        moment = f"after round {measured.round}"
        if model.about["rounds"] == 1:
            moment = "after its only round"
        return [
            f"On the run's test set, {moment}: accuracy {accuracy}.{_remark(model, measured)}",
            _table(["class", "accuracy"], list(zip(model.classes, shares, strict=True))),
        ]

    # Unknown accuracies, None, become NaN.
    history = np.array(measured.history, dtype=float)
    forgotten = forgetting_by_class(history)
    rows = []
    classes = zip(model.classes, measured.class_accuracy, forgotten.tolist(), strict=True)
    for name, share, lost in classes:
        best_earlier = lost + (share or 0)
        rows.append((name, _percent(share), _percent(best_earlier), _percent(lost)))
    mean = None
    if not np.isnan(forgotten).all():
        mean = float(np.nanmean(forgotten))
    tested = _count(model.about, "test_examples", model.inputs.many_or_examples)
    return [
        f"On the run's test set{tested}, after round {measured.round}: accuracy {accuracy}, "
        f"forgetting {_percent(mean)}. Forgetting of a class is the accuracy in its best earlier "
        f"round minus the accuracy now; above is the mean over classes.{_remark(model, measured)}",
        _table(["class", "accuracy", "best earlier round", "forgotten"], rows),
    ]


def _remark(model: TrainedModel, measured: Measured) -> str:
    """A sentence on later training; empty if there was none."""
    if measured.round == model.about["round"]:
        return ""
    return " The model has been trained further since."


def _limits(model: TrainedModel) -> list[str]:
    limits = ["The model predicts one of these classes for any input."]
    if STANDARDISED_AT in model.about:
        limits.append(
            "It standardises by the mean and standard deviation of "
            f"{model.about[STANDARDISED_AT]}; use it for the data of this client."
        )
    if depends_on_batch(model.network):
        limits.append(
            "The network normalises with the statistics of a batch; the accuracy above is for "
            "batches of 100."
        )
    return ["## Limits", *limits]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = []
    for row in (head, ["---"] * len(head), *rows):
        cells = " | ".join(neutral(cell, "markdown") for cell in row)
        lines.append(f"| {cells} |")
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    if share is None or np.isnan(share):
        return "–"
    return f"{100 * share:.1f} %"


# ---- the folder ----------------------------------------------------------------------------------

_NETWORK_LINE = "    raise NotImplementedError  # an export has the network's own lines here"
"""The line of ``standalone.py`` that the network's code replaces."""


def check_new_folder(place: Path) -> None:
    """Raise ConfigError if a path is neither new nor an empty folder, or is the working directory,
    which the new folder would replace.
    """
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(f"{place} exists already; name a new folder")
    if place.resolve() == Path.cwd().resolve():
        raise ConfigError(
            f"{place} is the working directory; name a new folder in it, e.g. --folder model"
        )


def write_folder(model: TrainedModel, run: Path, place: Path) -> float:
    """Write a model to a new folder that can be uploaded; returns the largest difference of the
    logits of its script, as ``furthest`` does.

    run: the run's directory, for its evaluations. Raises ConfigError for a folder that is not
    empty, and for a network that cannot be written as code.
    """
    check_new_folder(place)
    code, weights = as_code(model.network, channels_last(model.normalised(model.noise(2))))
    files = {
        "README.md": model_card(model, measured_of(read_run(run), model.about)).encode(),
        "config.json": json.dumps(_config(model), indent=2, ensure_ascii=False).encode(),
        "model.safetensors": safetensors.torch.save(weights, {"format": "pt"}),
        "check.safetensors": safetensors.torch.save(_check_examples(model)),
        "model.py": _script(code).encode(),
    }
    parent = place.absolute().parent
    make_folder(parent)
    # The folder appears only when it is complete and has been checked.
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=parent) as temporary:
        folder = Path(temporary) / "made"
        make_folder(folder)
        for name, data in files.items():
            write_whole(folder / name, data)
        difference = furthest(model, _load_script(folder, model))
        folder.replace(place)
    return difference


def _config(model: TrainedModel) -> dict[str, Any]:
    """The contents of config.json."""
    return {
        "classes": model.classes,
        "input_shape": model.input_shape,
        "pixels": model.pixels,
        "mean": model.mean.flatten().tolist(),
        "std": model.std.flatten().tolist(),
        "inputs": model.made_of,
        "trained": model.about,
    }


def _check_examples(model: TrainedModel) -> dict[str, Tensor]:
    """Examples of noise and their logits."""
    noise = model.noise(4)
    with torch.no_grad():
        logits = model(noise).contiguous()
    return {"examples": noise, "logits": logits}


def _script(code: str) -> str:
    """The text of model.py."""
    text = Path(standalone.__file__).read_text(encoding="utf-8")
    assert _NETWORK_LINE in text
    return text.replace(_NETWORK_LINE, code)


def _load_script(folder: Path, model: TrainedModel) -> Any:
    """The model as the folder's script loads it. An import would leave bytecode in the folder."""
    try:
        names = runpy.run_path(str(folder / "model.py"), run_name="model")
        classifier = names["Classifier"].load(folder)
        example = torch.zeros(1, *model.input_shape, dtype=model.noise(1).dtype)
        with torch.no_grad():
            classifier(example)
        return classifier
    except FedstillError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the network cannot be written as Python code: {on_one_line(error)}; export it as "
            "ONNX or with --pt2"
        ) from error
