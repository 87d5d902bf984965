"""A run's model without fedstill: as a program of torch, as an ONNX model, and as a folder whose
script needs torch and safetensors alone.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import toys
from fedstill.cli import call
from fedstill.core.errors import ConfigError, FedstillError
from fedstill.core.trees import same_bits
from fedstill.export import programs
from fedstill.export.loading import load_model
from fedstill.export.trained_model import TrainedModel
from fedstill.export.upload_folder import write_folder
from fedstill.models.contract import initial, spec_for
from fedstill.models.predictors import predictor
from fedstill.running.journal import read_journal
from fedstill.running.runner import run

needs_onnx = pytest.mark.skipif(
    not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))),
    reason="the extra onnx is not installed: pip install 'fedstill[onnx]', as make test does",
)
WITHOUT_FEDSTILL = """
import importlib.abc, json, sys
class Nowhere(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, *ALLOWED}:
            raise ModuleNotFoundError(f"{name} is not to be had here")
ALLOWED = {"torch", "torchgen", "safetensors", "numpy", "packaging", "typing_extensions", "sympy", "mpmath", "model"}
ALLOWED |= {"networkx", "filelock", "jinja2", "markupsafe", "fsspec"}
sys.meta_path.insert(0, Nowhere())
try:
    import fedstill
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("fedstill can be imported")
"""  # noqa: E501
"""Python in which torch, what torch needs, safetensors and the script itself can be imported, and
nothing else.
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with convolutions and running statistics, on images of three channels."""
    torch.set_num_threads(toys.THREADS)
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(toys.toy("fedntd", model="toy_batchnorm"), folder, data=toys.blobs())
    return folder


@pytest.fixture(scope="module")
def voting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose clients answer with two models each."""
    torch.set_num_threads(toys.THREADS)
    folder = tmp_path_factory.mktemp("voting") / "run"
    run(toys.toy("clue", **toys.suited("clue")), folder, data=toys.blobs())
    return folder


def test_a_program_of_torch_gives_the_same_logits_for_any_batch(
    finished: Path, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "model.pt2"
    assert call(["export", str(finished), "--pt2", str(path)]) == 0
    model = load_model(finished)
    program = torch.export.load(path).module()
    images = toys.blobs().test.values
    with torch.no_grad():
        for batch in (images, images[:1], images[:13]):
            torch.testing.assert_close(program(batch), model(batch), rtol=1e-5, atol=1e-6)


@needs_onnx
def test_onnx_takes_images_as_they_are_and_says_the_classes(finished: Path, tmp_path: Path) -> None:
    import onnxruntime

    path = tmp_path / "model.onnx"
    assert call(["export", str(finished), "--onnx", str(path)]) == 0
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (images_in,) = session.get_inputs()
    assert images_in.name == "images"
    assert images_in.type == "tensor(uint8)"
    assert images_in.shape == ["batch", 1, 4, 4]
    (logits_out,) = session.get_outputs()
    assert logits_out.name == "logits"
    assert logits_out.shape == ["batch", toys.CLASSES]

    images = toys.blobs().test.values
    model = load_model(finished)
    with torch.no_grad():
        for batch in (images, images[:1]):
            (logits,) = session.run(None, {"images": batch.numpy()})
            torch.testing.assert_close(torch.from_numpy(logits), model(batch), rtol=1e-4, atol=1e-5)

    facts = session.get_modelmeta().custom_metadata_map
    assert tuple(json.loads(facts["classes"])) == model.classes
    assert facts["method"] == "fedntd"
    assert facts["seed"] == "7"


@needs_onnx
def test_models_that_vote_are_one_file(
    voting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--onnx", str(tmp_path / "m.onnx"), "--pt2", str(tmp_path / "m.pt2"), "--client", "3"]
    assert call(["export", str(voting), *words]) == 0
    printed = capsys.readouterr().out
    assert "the logits in onnxruntime" in printed
    assert "torch.export" in printed


def test_onnx_without_onnxruntime_is_written_and_says_that_it_was_not_compared(
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert call(["export", str(finished), "--onnx", str(tmp_path / "m.onnx")]) == 0
    assert "onnxruntime is not installed" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert call(["export", str(finished), "--onnx", str(tmp_path / "n.onnx")]) == 2
    assert "pip install 'fedstill[onnx]'" in capsys.readouterr().err
    assert not (tmp_path / "n.onnx").exists()


def test_the_folder_needs_torch_and_safetensors_alone(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shared"
    assert call(["export", str(finished), "--folder", str(folder)]) == 0
    assert "licence" in capsys.readouterr().out
    names = ["README.md", "check.safetensors", "config.json", "model.py", "model.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names

    images = toys.blobs().test.values
    images_file = tmp_path / "images.safetensors"
    logits_file = tmp_path / "logits.safetensors"
    safetensors.torch.save_file({"images": images}, images_file)
    program = f"""
{WITHOUT_FEDSTILL}
import runpy
from safetensors.torch import load_file, save_file
import torch
sys.path.insert(0, {str(folder)!r})
sys.dont_write_bytecode = True
from model import Classifier
model = Classifier.load()
images = load_file({str(images_file)!r})["images"]
assert not model.training
with torch.no_grad():
    logits = {{"logits": model(images), "floats": model(images / 255)}}
save_file(logits, {str(logits_file)!r})
try:
    model(images[0])
except ValueError as error:
    print(error)
print(json.dumps(model.classes))
runpy.run_path({str(folder / "model.py")!r}, run_name="__main__")
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr

    refusal, classes, self_test = result.stdout.splitlines()
    model = load_model(finished)
    assert refusal == "images must be (N, 1, 4, 4), not (1, 4, 4)"
    assert tuple(json.loads(classes)) == model.classes
    assert self_test.startswith("5 classes, images (image) of (1, 4, 4); logits ")

    logits = safetensors.torch.load_file(logits_file)
    with torch.no_grad():
        torch.testing.assert_close(logits["logits"], model(images), rtol=1e-5, atol=1e-6)
    assert torch.equal(logits["floats"], logits["logits"])


def test_what_the_folder_imports_is_torch_and_safetensors(finished: Path, tmp_path: Path) -> None:
    write_folder(load_model(finished), finished, tmp_path / "shared")
    modules: set[str] = set()
    for node in ast.walk(ast.parse((tmp_path / "shared" / "model.py").read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(str(node.module))
    packages = {module.partition(".")[0] for module in modules}
    assert packages - set(sys.stdlib_module_names) == {"torch", "safetensors"}


def test_the_folder_says_what_was_trained_on_what(finished: Path, tmp_path: Path) -> None:
    model = load_model(finished)
    write_folder(model, finished, tmp_path / "shared")
    weights = safetensors.torch.load_file(tmp_path / "shared" / "model.safetensors")
    assert same_bits(weights, model.network.state_dict())

    config = json.loads((tmp_path / "shared" / "config.json").read_text())
    assert config["input_shape"] == [1, 4, 4]
    assert config["mean"] == [0.5]
    assert config["std"] == [0.5]
    assert config["trained"]["method"] == "fedntd"

    text = (tmp_path / "shared" / "README.md").read_text()
    summary = json.loads((finished / "summary.json").read_text())
    accuracy = f"accuracy {100 * summary['accuracy']:.1f} %"
    forgetting = f"forgetting {100 * summary['forgetting']:.1f} %"
    for words in (
        "tags: [federated-learning, fedstill, fedntd]",
        "# fedntd on blobs, seed 7",
        "| what | the global model, after round 3 of 3 |",
        f"{accuracy}, {forgetting}",
        "| data | blobs, 300 training images, split by dirichlet (alpha = 1.0",
        "100 images, after round 3: accuracy",
        "| class | accuracy | best earlier round | forgotten |",
        "| class 4 |",
        f"fedstill {model.about['fedstill']}, torch {model.about['torch']}",
    ):
        assert words in text, words
    assert str(tmp_path) not in text


def test_a_clients_own_model_was_measured_once(voting: Path, tmp_path: Path) -> None:
    write_folder(load_model(voting, client=3), voting, tmp_path / "shared")
    text = (tmp_path / "shared" / "README.md").read_text()
    assert "client 3, after round 1 of 1 |" in text
    assert "| class | accuracy |\n" in text


def test_the_card_of_a_clients_own_model_has_what_the_client_measured(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(toys.toy("ft_fedavg", measure_every=1), folder, data=toys.blobs())
    journal = read_journal(folder / "journal.jsonl")
    stage_events = [event for event in journal if event.get("name") == "finetune"]
    *_, last_event = [event for event in stage_events if event["client"] == 2]
    correct_by_class = last_event["correct_by_class"]

    write_folder(load_model(folder, client=2), folder, tmp_path / "shared")

    text = (tmp_path / "shared" / "README.md").read_text()
    assert f"accuracy {sum(correct_by_class):.1f} %" in text, "of 100 test images"
    assert f"| class 1 | {5 * correct_by_class[1]:.1f} % |" in text, "of 20 test images"


def test_a_folder_that_holds_something_is_left_alone(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    assert call(["export", str(finished), "--folder", str(tmp_path)]) == 2
    assert "name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_files_may_be_in_the_folder(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    program = folder / "model.pt2"
    words = ["export", str(finished), "--pt2", str(program), "--folder", str(folder)]
    assert call(words) == 0
    assert program.is_file()
    assert (folder / "model.py").is_file()


SCALING = """
import torch
from torch import nn

class Scaling(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        count = torch.Size(input_shape).numel()
        self.register_buffer("mean", torch.full((count,), 0.25))
        self.pixels = nn.Parameter(torch.ones(count))
        self.last = nn.Linear(count, classes)

    def forward(self, x):
        return self.last((x.flatten(1) - self.mean) * self.pixels)
"""
"""A network whose entries have the names of attributes of the script's class."""


def test_entries_of_a_network_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SCALING)
    experiment = toys.toy(model="net.py:Scaling", rounds=1, measure=())
    folder = tmp_path / "run"
    run(replace(experiment, base=tmp_path), folder, data=toys.blobs())
    shared = tmp_path / "shared"
    write_folder(load_model(folder), folder, shared)
    assert safetensors.torch.load_file(shared / "model.safetensors").keys() == {
        "mean",
        "pixels",
        "last.weight",
        "last.bias",
    }


def test_export_without_an_option_lists_the_options(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["export", str(finished)]) == 2
    options = "--onnx FILE, --pt2 FILE, --folder DIR, --parquet DIR or --csv DIR"
    assert options in capsys.readouterr().err


def test_the_working_directory_is_not_replaced_by_the_folder(
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (".", str(tmp_path)):
        assert call(["export", str(finished), "--pt2", "m.pt2", "--folder", name]) == 2
        out, err = capsys.readouterr()
        assert "working directory" in err
        assert not out
    assert not list(tmp_path.iterdir()), "nothing is written before the folder is refused"
    assert call(["export", str(finished), "--folder", "new"]) == 0
    assert (tmp_path / "new" / "model.py").is_file()


@pytest.mark.parametrize("option", ["--onnx", "--pt2"])
def test_a_folder_in_place_of_a_file_is_refused_with_the_name_of_a_file(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert call(["export", str(finished), option, str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "model.") in error
    assert not list(tmp_path.iterdir())


def test_a_round_is_the_only_one_of_a_run_with_one_round(tmp_path: Path) -> None:
    for rounds in (1, 2):
        folder = tmp_path / f"run{rounds}"
        experiment = toys.toy(rounds=rounds, keep_checkpoints_every=1, measure=())
        run(experiment, folder, data=toys.blobs())
        write_folder(load_model(folder, round=1), folder, tmp_path / f"shared{rounds}")
        card = (tmp_path / f"shared{rounds}" / "README.md").read_text()
        assert ("only round" in card) == (rounds == 1)


def model_of(network: nn.Module) -> TrainedModel:
    """The model of a run with this network."""
    return TrainedModel(
        network,
        classes=["a", "b"],
        input_shape=(1, 4, 4),
        mean=(0.5,),
        std=(0.5,),
        about={"method": "mine", "seed": 0},
    )


class Branching(nn.Module):
    """A network whose operations depend on its input."""

    def forward(self, x: Tensor) -> Tensor:
        logits = x.flatten(1)[:, :2]
        if float(x.sum()) > 0:
            return 2 * logits
        return logits


def test_a_network_that_cannot_be_traced_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch\.export") as caught:
        programs.write_program(model_of(Branching()), tmp_path / "m.pt2")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_function_of_a_method_cannot_be_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = toys.toy("toy_peers", rounds=1, topology={"clients": 6})
    run(experiment, tmp_path / "run", data=toys.blobs())
    assert call(["export", str(tmp_path / "run"), "--pt2", str(tmp_path / "m.pt2")]) == 2
    assert "predictors()" in capsys.readouterr().err


def test_a_program_that_computes_something_else_is_not_kept() -> None:
    spec = spec_for("mlp", (1, 4, 4), 2, {"hidden": (4,)})
    model = model_of(predictor(spec, initial(spec, 0)).as_module())
    of_other_weights = model_of(predictor(spec, initial(spec, 1)).as_module())
    assert programs.furthest(model, model) == 0.0
    with pytest.raises(FedstillError, match="logits differ"):
        programs.furthest(model, of_other_weights)
    with pytest.raises(FedstillError, match="other logits"):
        programs.furthest(model, lambda images: model(images)[:, :1])
