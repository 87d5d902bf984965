"""A user's own method, model and partition: files beside the config, or import paths; and what is
wrong with them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import toys
from fedstill.config.experiment import load
from fedstill.config.resolve import resolve
from fedstill.core import registry
from fedstill.core.errors import ConfigError, CorruptFile, UntrustedCode
from fedstill.core.user_modules import source_digest
from fedstill.data.sources import load_dataset
from fedstill.running.compare import variants
from fedstill.running.directory import settings_of
from fedstill.running.journal import read_journal
from fedstill.running.preparation import prepare
from fedstill.running.result import Result
from fedstill.running.runner import resume, run
from fedstill.running.same_run import check_same, code_digests

METHOD = """
from dataclasses import dataclass
from typing import Annotated
from annotated_types import Interval
from fedstill.core.method import Method
from fedstill.core.registry import method

@method("halfway")
@dataclass(frozen=True)
class Halfway(Method):
    '''Go half of the way.'''
    share: Annotated[float, Interval(gt=0, le=1)] = 0.5
    copy: int = 1
    model_size: int = 2

    def aggregate(self, state, replies, stage, world):
        mean = super().aggregate(state, replies, stage, world).params
        return state.next(params={k: v + self.share * (mean[k] - v) for k, v in state.params.items()})

def helper():
    return 3
"""  # noqa: E501
MODEL = """
from torch import nn
from fedstill.core.registry import register

@register("model", "tiny")
class Tiny(nn.Module):
    '''One linear layer.'''
    def __init__(self, input_shape, classes, wide: int = 3):
        super().__init__()
        size = input_shape[0] * input_shape[1] * input_shape[2]
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(size, wide), nn.Linear(wide, classes))

    def forward(self, x):
        return self.layers(x)
"""
PARTITION = """
import numpy as np
from fedstill.core.registry import register

@register("partition", "stripes")
def stripes(labels, clients, width: int = 1):
    '''Every so many-th example.'''
    return [np.arange(c, len(labels), clients) for c in range(clients)]
"""
CONFIG = """
rounds = 1
threads = 1
method = "halfway.py"
partition = {kind = "stripes.py:stripes", clients = 3}
model = {name = "tiny.py:Tiny", wide = 4}
plan = {epochs = 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a method, a model, a partition and a config. All tests share it, since only one
    file of a process can register a name.
    """
    folder = tmp_path_factory.mktemp("own")
    (folder / "halfway.py").write_text(METHOD)
    (folder / "tiny.py").write_text(MODEL)
    (folder / "stripes.py").write_text(PARTITION)
    (folder / "run.toml").write_text(CONFIG)
    return folder


def result_of(folder: Path, out: Path, *overrides: str) -> Result:
    """The result of a run of the folder's config."""
    return run(load(folder / "run.toml", overrides), out, data=toys.blobs())


def problem(folder: Path, *overrides: str) -> str:
    """The one line that refuses the folder's config with these overrides."""
    with pytest.raises(ConfigError) as caught:
        prepare(resolve(load(folder / "run.toml", overrides)), toys.blobs())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_beside_the_config_are_used(folder: Path, tmp_path: Path) -> None:
    result = result_of(folder, tmp_path / "run", "method.share=1.0")
    assert result.model["layers.1.weight"].shape == (4, 16)
    tree = resolve(load(folder / "run.toml")).tree
    assert tree["method"] == {
        "name": str(folder / "halfway.py"),
        "share": 0.5,
        "copy": 1,
        "model_size": 2,
    }
    assert tree["partition"]["kind"] == str(folder / "stripes.py") + ":stripes"


def test_a_resolved_config_finds_them_from_anywhere(folder: Path, tmp_path: Path) -> None:
    result_of(folder, tmp_path / "run", "engine=pooled")
    original = resolve(load(folder / "run.toml", ("data.name=blobs", "engine=pooled")))
    reloaded = resolve(load(tmp_path / "run" / "config.toml"))
    assert reloaded.tree == original.tree


def test_an_import_path_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "own_things"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "ways.py").write_text(METHOD.replace('"halfway"', '"halfway2"'))
    monkeypatch.syspath_prepend(str(folder))
    settings = resolve(
        load(folder / "run.toml", ("method=own_things.ways:Halfway", "method.share=0.25"))
    )
    assert type(settings.method).__name__ == "Halfway"
    assert settings.named.method.values["share"] == 0.25
    for name in ("own_things", "own_things.ways"):
        sys.modules.pop(name)


def test_fields_of_ones_own_are_checked_like_all_others(folder: Path) -> None:
    assert "share = 2.0" in problem(folder, "method.share=2.0")
    assert "did you mean 'method.share'?" in problem(folder, "method.shar=1.0")
    assert "copy = 'x'" in problem(folder, "method.copy='x'")
    assert "did you mean 'model.wide'?" in problem(folder, "model.wid=3")
    assert "seed" in problem(folder, "partition.seed=3"), (
        "this partition draws nothing, so a seed is an unknown key"
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("method=nowhere.py", r"there is no file .*nowhere\.py"),
        ("method=halfway.py:Halfwai", "did you mean 'Halfway'"),
        ("method=halfway.py:helper", r"method\.name = .* is a int, not a fedstill\.Method"),
        (
            "method=tiny.py",
            r"tiny\.py.*tiny\.py:Tiny",
        ),
        ("method=no_such_package.ways:Mine", "no_such_package.ways failed to import"),
        ("method=json:NoSuch", "unknown method 'NoSuch'"),
        ("model=tiny.py:nn", "tiny|nn"),
    ],
)
def test_a_name_that_leads_nowhere_is_named(override: str, words: str, folder: Path) -> None:
    assert re.search(words, problem(folder, override))


UNNAMED = {
    "no module": ":Mine",
    "a relative module": ".ways:Mine",
    "a path too long": "x" * 300 + ".py",
    "no path": "\0.py",
    "a module that fails": "failing_on_import:Mine",
    "a file that exits": "exits.py",
}


@pytest.mark.parametrize("case", UNNAMED)
def test_a_name_that_cannot_be_imported_at_all_is_named(
    case: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_on_import.py").write_text("raise ValueError('not today')")
    (folder / "exits.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError):
        resolve(load(folder / "run.toml").with_values({"method": UNNAMED[case]}, "test"))


ONLY_FOR_CHECKERS = """
from __future__ import annotations
from typing import TYPE_CHECKING
import fedstill
import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from pathlib import Path
    from numpy.typing import NDArray
    from fedstill.data.dataset import Dataset

def data(folder: Path | None = None) -> Dataset:
    examples = torch.zeros(60, 1, 4, 4, dtype=torch.uint8), torch.arange(60) % 3
    return fedstill.from_tensors("own", examples, examples)

def net(num_classes: int, hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, hidden), nn.Linear(hidden, num_classes))

def split(labels: NDArray, clients: int) -> list[NDArray]:
    return [np.arange(client, len(labels), clients) for client in range(clients)]
"""


def test_annotations_that_no_field_needs_may_be_for_type_checkers_only(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("rounds = 1\ntopology = { clients = 2 }\n")
    (tmp_path / "typed.py").write_text(ONLY_FOR_CHECKERS)
    names = {"data": "data", "model": "net", "partition": "split"}
    overrides = tuple(f"{kind}=typed.py:{name}" for kind, name in names.items())

    prepared = prepare(resolve(load(tmp_path / "run.toml", overrides)))

    assert prepared.world.classes == 3
    assert prepared.settings.named.model.values == {"hidden": 8}


def test_a_parameter_of_a_data_function_with_an_unknown_type_is_named(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    file.write_text(ONLY_FOR_CHECKERS.replace("folder:", "root:"))
    with pytest.raises(ConfigError, match=r"typed\.py:data' has fields that cannot .* 'Path'"):
        load_dataset(f"{file}:data")


NO_MODEL = {
    "objects.py": (
        "from torch import nn\nclass Net(nn.Module):\n    pass\nnet = Net()\n",
        "registers no model; name the one to use: objects.py:Net",
    ),
    "nothing.py": ("", "'nothing.py': the file defines no class or function; define the model"),
}


@pytest.mark.parametrize("file", NO_MODEL)
def test_a_file_that_registers_nothing_is_refused_with_what_it_defines(
    file: str, folder: Path
) -> None:
    text, message = NO_MODEL[file]
    (folder / file).write_text(text)
    assert message in problem(folder, f"model={file}")


BROKEN = {
    "syntax": ("def (", "SyntaxError"),
    "raises": ("raise ValueError('first\\nsecond')", "ValueError: first"),
    "imports": ("import no_such_thing_at_all", "no_such_thing_at_all"),
    "divides": ("1 / 0", "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_imported_is_named_with_its_error(name: str, folder: Path) -> None:
    text, error = BROKEN[name]
    (folder / f"{name}.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"{name}\.py failed to import: .*{error}"):
        resolve(load(folder / "run.toml", (f"method={name}.py",)))


def test_a_file_whose_import_was_interrupted_is_imported_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = "import os\nif 'INTERRUPTED' in os.environ:\n    raise KeyboardInterrupt\n"
    (folder / "slow.py").write_text(interrupt + METHOD)
    experiment = load(folder / "run.toml", ("method=slow.py",))
    monkeypatch.setenv("INTERRUPTED", "1")
    with pytest.raises(KeyboardInterrupt):
        resolve(experiment)

    monkeypatch.delenv("INTERRUPTED")
    settings = resolve(experiment)
    assert type(settings.method).__name__ == "Halfway"


BAD_METHODS = {
    "unresolved": ("share: 'NoSuchType' = 1", "fields that cannot be read: .*NoSuchType"),
    "unholdable": (
        "share: 'object' = None\n    map: 'np.random.Generator | None' = None",
        "type that a config cannot hold",
    ),
    "refusing": (
        "def __post_init__(self): raise ValueError('no luck')",
        "ValueError: no luck",
    ),
    "asserting": (
        "def __post_init__(self): assert self.share > 1, 'too small'",
        "AssertionError: too small",
    ),
}


@pytest.mark.parametrize("name", BAD_METHODS)
def test_a_method_whose_fields_make_no_sense_is_named(name: str, folder: Path) -> None:
    body, message = BAD_METHODS[name]
    fields, _, _ = METHOD.replace("halfway", name).partition("    def aggregate")
    with_numpy = fields.replace("from typing", "import numpy as np\nfrom typing")
    (folder / f"{name}.py").write_text(f"{with_numpy}    {body}\n")
    assert re.search(message, problem(folder, f"method={name}.py"))


BAD_PARTITIONS = {
    "raising": (
        "[][3]",
        "partition raising failed: IndexError: list index out of range (raising.py, line ",
    ),
    "dividing": (
        "1 / 0",
        "partition dividing failed: ZeroDivisionError: division by zero (dividing.py, line ",
    ),
    "few": ("[np.arange(9)]", "gave 1 part for 3 clients"),
    "empty": ("[np.arange(9), np.arange(0), np.arange(9)]", "client 1 gets no examples"),
    "outside": (
        "[np.arange(3), np.arange(3, 6), np.array([300])]",
        "client 2 gets example 300, not positions from 0 to 299",
    ),
    "below": (
        "[np.arange(3), np.array([-1]), np.arange(3, 6)]",
        "client 1 gets example -1, not positions",
    ),
    "twice": (
        "[np.arange(3), [5], np.arange(2, 5)]",
        "two clients, 0 and 2",
    ),
    "repeated": (
        "[[0], [4, 3, 4], [1]]",
        "client 1 twice",
    ),
    "floats": (
        "[np.arange(3.0) + 3 * c for c in range(3)]",
        "client 0 gets numbers of type float64",
    ),
    "mask": (
        "[np.arange(300) % 3 == c for c in range(3)]",
        "np.flatnonzero",
    ),
    "squares": (
        "np.arange(12).reshape(3, 2, 2)",
        "client 0 gets an array of shape (2, 2)",
    ),
    "nothing": (
        "None",
        "(nothing.py, line ",
    ),
    "dict": (
        "{c: [c] for c in range(3)}",
        "dict returns a dict",
    ),
    "writing": (
        "labels.sort() or [[0], [1], [2]]",
        "partition writing failed: ValueError: sort array is read-only",
    ),
    "ragged": ("[[[1], [2, 3]]] * 3", "partition ragged failed: ValueError"),
}


@pytest.mark.parametrize("name", BAD_PARTITIONS)
def test_a_function_that_returns_no_partition_is_refused(name: str, folder: Path) -> None:
    value, message = BAD_PARTITIONS[name]
    start, _, _ = PARTITION.replace("stripes", name).partition("    return")
    (folder / f"{name}.py").write_text(f"{start}    return {value}\n")
    assert message in problem(folder, f"partition={name}.py")


def test_the_parameters_of_a_partition_have_the_names_that_it_is_given(folder: Path) -> None:
    other_names = PARTITION.replace("labels, clients", "y, n_clients")
    (folder / "named.py").write_text(other_names.replace("stripes", "named"))
    message = "partition named has parameters y, n_clients, width;"
    assert message in problem(folder, "partition=named.py")

    all_names = PARTITION.replace("labels, clients, width: int = 1", "**given")
    (folder / "any.py").write_text(all_names.replace("stripes", "any"))
    assert "partition any failed: NameError" in problem(folder, "partition=any.py"), (
        "one that takes all is called"
    )


BAD_MODELS = {
    "raising": ("raise KeyError('gone')", "KeyError: 'gone'"),
    "silent": ("raise RuntimeError", "cannot take images of shape"),
    "other": ("return [x]", "a list"),
    "narrow": ("return self.layers(x)[:, :2]", "(2, 2), not (2, 5)"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_model_that_does_not_return_logits_is_refused(name: str, folder: Path) -> None:
    body, message = BAD_MODELS[name]
    text = MODEL.replace("tiny", name).replace("return self.layers(x)", body)
    (folder / f"{name}_model.py").write_text(text)
    assert message in problem(folder, f"model={name}_model.py")


def test_a_model_with_a_state_that_is_no_tensor_is_refused(folder: Path) -> None:
    state = "def get_extra_state(self):\n        return {'epoch': 1}\n\n    def forward("
    text = MODEL.replace("tiny", "stateful").replace("def forward(", state)
    (folder / "stateful_model.py").write_text(text)
    message = problem(folder, "model=stateful_model.py")
    assert "_extra_state in its state_dict() is a dict, not a tensor" in message


BARE = """
import torch
from torch import nn

class Bare(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.w = torch.zeros(48, num_classes, requires_grad=True)

    def forward(self, x):
        return x.flatten(1) @ self.w
"""


def test_a_model_without_parameters_is_refused(folder: Path) -> None:
    (folder / "bare.py").write_text(BARE)
    assert "has no parameters" in problem(folder, "model=bare.py:Bare")


@pytest.mark.parametrize("raises", ["[][3]", "1 / 0", "nn.Linear(2, 'a')"])
def test_a_model_that_cannot_be_made_is_named_with_the_line_that_raised(
    raises: str, folder: Path
) -> None:
    (folder / "making.py").write_text(
        f"from torch import nn\n\ndef making(num_classes: int):\n    {raises}\n"
    )
    message = problem(folder, "model=making.py:making")
    assert "making.py:making" in message
    assert "(making.py, line 4, in making)" in message


def test_a_file_that_was_mended_is_read_again_in_the_same_process(folder: Path) -> None:
    path = folder / "mended.py"
    path.write_text(METHOD.replace("halfway", "mended"))
    first = registry.lookup("method", "mended.py", folder).target
    path.write_text(METHOD.replace("halfway", "mended") + "\nCHANGED = True\n")
    second = registry.lookup("method", "mended.py", folder).target
    assert second is not first
    assert registry.lookup("method", "mended.py", folder).target is second


def value_of(folder: Path, name: str) -> object:
    """The value that the function of a user's file returns."""
    return registry.lookup("model", f"{name}.py:value", folder).target()


USE = "def value(): return VALUE\n"


@pytest.mark.parametrize(
    "imports",
    [
        "from changing import VALUE\n",
        "from between import VALUE\n",
        "from package import inner\nVALUE = inner.VALUE\n",
    ],
)
def test_a_change_in_a_module_counts_wherever_it_was_imported(tmp_path: Path, imports: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "between.py").write_text("from changing import VALUE\n")
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(imports + USE)

    for value in (1, 2):
        for changing in ("changing.py", "package/inner.py"):
            (tmp_path / changing).write_text(f"VALUE = {value}\n")
        assert value_of(tmp_path, "one") == value
        assert value_of(tmp_path, "two") == value


def test_files_of_nested_folders_keep_their_digests_when_a_module_changes(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    for folder in (tmp_path, inner):
        (folder / f"beside_{folder.name}.py").write_text("VALUE = 1\n")
        (folder / "mine.py").write_text(f"from beside_{folder.name} import VALUE\n" + USE)
    before = registry.lookup("model", "mine.py:value", inner).target
    digest_before = source_digest(before)
    assert value_of(tmp_path, "mine") == 1

    (tmp_path / f"beside_{tmp_path.name}.py").write_text("VALUE = 2\n")
    after = registry.lookup("model", "mine.py:value", inner).target
    assert value_of(tmp_path, "mine") == 2
    assert source_digest(after) == digest_before


def test_a_module_that_is_no_longer_imported_may_be_deleted(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text("VALUE = 1\n")
    (tmp_path / "mine.py").write_text("from gone import VALUE\n" + USE)
    assert value_of(tmp_path, "mine") == 1

    (tmp_path / "gone.py").unlink()
    (tmp_path / "mine.py").write_text("VALUE = 2\n" + USE)
    first = registry.lookup("model", "mine.py:value", tmp_path).target
    assert first() == 2
    assert registry.lookup("model", "mine.py:value", tmp_path).target is first
    assert source_digest(first)


NETWORKS = """
from torch import nn
def lazy(num_classes: int, activation=nn.Identity, part: nn.Module = None):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes), activation())
def of_torchvision(*, weights=None, **kwargs):
    assert set(kwargs) == {"num_classes"}
    return nn.Sequential(nn.Flatten(), nn.Linear(16, **{"out_features": kwargs["num_classes"]}))
def by_channels(in_channels, classes):
    return nn.Sequential(nn.Conv2d(in_channels, classes, 4), nn.Flatten())
def shared(classes):
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, classes))
    net[2].weight = net[1].weight
    return net
"""


def test_a_model_is_given_what_its_parameters_name(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "nets.py"
    file.write_text(NETWORKS)
    for name in ("of_torchvision", "by_channels"):
        settings = resolve(load(folder / "run.toml", (f"model={file}:{name}",)))
        prepare(settings, toys.blobs())

    lazy = f"model={file}:lazy"
    assert "has lazy layers" in problem(folder, lazy)
    assert "1.weight and 2.weight" in problem(folder, f"model={file}:shared")
    message = problem(folder, lazy, "model.activation='relu'")
    assert "unknown key 'model.activation'" in message, (
        "a parameter that a config cannot hold keeps its default"
    )


def test_modules_beside_a_file_are_its_own_and_leave_the_path_as_it_was(tmp_path: Path) -> None:
    search_path = list(sys.path)
    widths = {"one": 3, "two": 4}
    network = "from beside_me import WIDTH\ndef width(): return WIDTH\n"
    for name, width_of_folder in widths.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "beside_me.py").write_text(f"WIDTH = {width_of_folder}\n")
        (tmp_path / name / "net.py").write_text(network)

    def width(folder: str) -> int:
        return int(registry.lookup("model", "net.py:width", tmp_path / folder).target())

    assert [width("one"), width("two"), width("one")] == [3, 4, 3]
    (tmp_path / "one" / "beside_me.py").write_text("WIDTH = 30\n")
    assert [width("one"), width("two")] == [30, 4], "an edit is seen"
    assert sys.path == search_path


def test_a_run_knows_the_modules_beside_its_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("from torch import nn\nlinear = nn.Linear\n")
    (tmp_path / "net.py").write_text(
        "from parts import linear\nfrom torch import nn\n"
        "def net(num_classes):\n    return nn.Sequential(nn.Flatten(), linear(16, num_classes))\n"
    )
    experiment = load(folder / "run.toml", (f"model={tmp_path / 'net.py'}:net", "rounds=2"))
    run(experiment, tmp_path / "run", toys.blobs())

    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "parts.py").write_text("from torch import nn\nlinear = nn.Linear  # the same\n")
    with pytest.raises(UntrustedCode, match=r"parts\.py"):
        resume(tmp_path / "run", toys.blobs())
    with pytest.raises(CorruptFile, match=r"parts\.py"):
        resume(tmp_path / "run", toys.blobs(), trust_code=True)

    # Earlier versions recorded only the files that the config names.
    start = read_journal(tmp_path / "run" / "journal.jsonl")[0]
    named_sources = dict(start["sources"])
    del named_sources[str(tmp_path / "parts.py")]
    check_same(settings_of(tmp_path / "run"), {"sources": named_sources}, {})


DATA = """
import torch
import fedstill

def data():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(60, 4, generator=generator)
    return fedstill.from_tensors("rows", train=(values, torch.arange(60) % 3))
"""
COLON_CONFIG = """
rounds = 1
threads = 1
method = "halfway3.py:Halfway"
data = "rows.py:data"
model = "mlp"
partition = {kind = "iid"}
topology = {clients = 2}
plan = {epochs = 1}
"""


@pytest.fixture
def colon_folder(tmp_path: Path) -> Path:
    """A folder with a colon in its name, as a time of day has."""
    folder = tmp_path / "run_10:30"
    folder.mkdir()
    (folder / "halfway3.py").write_text(METHOD.replace('"halfway"', '"halfway3"'))
    (folder / "rows.py").write_text(DATA)
    (folder / "run.toml").write_text(COLON_CONFIG)
    rows = "".join(f"{row % 7},{row % 5},{'ab'[row % 2]}\n" for row in range(60))
    (folder / "rows.csv").write_text("age,dose,label\n" + rows)
    return folder


@pytest.mark.parametrize("data", ["rows.py:data", "rows.csv", "./rows.csv"])
def test_files_in_a_folder_with_a_colon_are_used(data: str, colon_folder: Path) -> None:
    name_override = f"data.name={data}"
    overrides = (name_override, f"data.public_from={data}")
    settings = resolve(load(colon_folder / "run.toml", overrides))
    file, _, function = data.removeprefix("./").partition(":")
    assert settings.data.name == settings.data.public_from
    assert settings.data.name.removesuffix(f":{function}") == str(colon_folder / file)
    assert settings.named.method.label == "halfway3.py:Halfway"

    result = run(load(colon_folder / "run.toml", (name_override,)), colon_folder / "run")
    assert resume(colon_folder / "run").accuracy == result.accuracy
    code = [colon_folder / "halfway3.py"]
    if file.endswith(".py"):
        code.append(colon_folder / file)
    assert list(code_digests(settings)) == [str(path) for path in code]


def test_the_default_network_fits_a_table_in_a_folder_with_a_colon(colon_folder: Path) -> None:
    path = colon_folder / "run.toml"
    without_model = COLON_CONFIG.replace('model = "mlp"\n', "")
    path.write_text(without_model.replace("rows.py:data", "rows.csv"))
    assert resolve(load(path)).named.model.name == "mlp"


def test_a_comparison_names_its_folders_after_the_file(colon_folder: Path, tmp_path: Path) -> None:
    (run_,) = variants(load(colon_folder / "run.toml"), tmp_path / "out")
    assert run_.folder == tmp_path / "out" / "halfway3" / "seed0"


@pytest.mark.parametrize(
    "override", ["method=run_10:30/halfway3.py:Halfway", "data=run_10:30/rows.csv"]
)
def test_a_typed_path_with_a_colon_is_found_in_the_working_directory(
    override: str, folder: Path, colon_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(colon_folder.parent)
    settings = resolve(load(folder / "run.toml", ("model=mlp", override)))
    _, _, value = override.partition("=")
    assert str(colon_folder.parent / value) in (settings.data.name, settings.named.method.name)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=wrapped", "model.of=lib.pytorch_nets:Net", "model.head=layers"),
        ("model=wrapped", "model.of=lib.pytorch_nets:Net", "model.head=x.pyz"),
        ("model=wrapped", "model.of=lib.pytorch_nets:Net", "model.head=gone.py"),
        ("data.public_from=proj.python/pictures",),
        ("model=logistic", "data.features_of={name=cnn,file=proj.py}"),
    ],
)
def test_texts_that_look_like_python_files_are_no_code(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lib"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch_nets.py").write_text(
        "from torch import nn\n\nclass Net(nn.Module):\n    ...\n"
    )
    (tmp_path / "proj.python" / "pictures").mkdir(parents=True)
    (tmp_path / "proj.py").write_text("a model file with an odd name")
    (tmp_path / "run.toml").write_text("rounds = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = code_digests(resolve(load(tmp_path / "run.toml", overrides)))
    assert {Path(path).name for path in digests} <= {"pytorch_nets.py"}
