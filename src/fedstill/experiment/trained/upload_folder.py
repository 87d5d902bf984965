"""A folder to share: weights, what they are of, a model card, and a script that needs torch and
safetensors alone.
"""

from __future__ import annotations

import json
import runpy
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from fedstill.data.inputs import channels_last
from fedstill.errors import ConfigError, FedstillError, on_one_line
from fedstill.experiment.run_directory.journal import read_journal
from fedstill.experiment.trained import standalone
from fedstill.experiment.trained.as_code import as_code
from fedstill.experiment.trained.exporting import furthest
from fedstill.experiment.trained.model_card import measured_of, model_card
from fedstill.experiment.trained.trained_model import TrainedModel
from fedstill.files import make_folder, write_whole

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
    measured = measured_of(read_journal(run / "journal.jsonl"), model.about)
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
