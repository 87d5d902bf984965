"""``fedstill query`` answers a query from a finished run of local training.

A query that cannot be answered is refused in one line.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import toys
from fedstill.cli import call
from fedstill.config.experiment import KEYS, Experiment
from fedstill.config.settings import as_toml
from fedstill.core.errors import ConfigError, CorruptFile, UnknownName
from fedstill.core.records import Stage
from fedstill.data.sources import from_tensors, load_dataset
from fedstill.models.contract import ModelSpec, initial, spec_for
from fedstill.querying.answers import ClientChanges, answer_query, read_new_data, with_new_data
from fedstill.running.model_files import read_model, save_model
from fedstill.running.preparation import prepare
from fedstill.running.result import Result
from fedstill.running.runner import run, settings_of
from journals import journal_events

CHANGES: dict[str, object] = {"plan.transfer.epochs": 2, "plan.refine.epochs": 2}
"""Settings of a short query."""
CHANGE_OPTIONS = ["-s", "plan.transfer.epochs=2", "-s", "plan.refine.epochs=2"]
"""The same settings as options of the command."""
DIGITS = {"name": "digits", "train_size": 600, "test_size": 200}


def local_experiment(epochs: int, **changes: Any) -> Experiment:
    """Six clients with three classes each train alone on digits."""
    experiment = Experiment(
        rounds=1,
        method="local_only",
        reuse=False,
        data=DIGITS,
        model={"name": "mlp", "hidden": (16,)},
        partition={"kind": "pathological", "classes_per_client": 3},
        topology={"clients": 6},
        query={"fewer_than": 1},
        plan={"epochs": epochs, "lr": 0.01},
    )
    return replace(experiment, **changes)


def trained(folder: Path, epochs: int, **changes: Any) -> Path:
    """The directory of a run of local training."""
    torch.set_num_threads(1)
    run(local_experiment(epochs, **changes), folder)
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose models know their classes."""
    return trained(tmp_path_factory.mktemp("local") / "run", epochs=20)


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose models are often wrong."""
    return trained(tmp_path_factory.mktemp("weak") / "run", epochs=1)


@dataclass(frozen=True)
class ClassesOfClient:
    """A class that client 0 lacks, and one that it has."""

    lacking: int
    present: int


@pytest.fixture(scope="module")
def classes(local: Path) -> ClassesOfClient:
    """Two classes of client 0 in the run ``local``."""
    counts = Result.of(local).label_counts()[0]
    return ClassesOfClient(
        lacking=int((counts == 0).nonzero()[0][0]), present=int(counts.nonzero()[0][0])
    )


def first_lacking(folder: Path, client: int) -> int:
    """The first class that a client lacks."""
    return int(Result.of(folder).label_counts()[client].tolist().index(0))


def network(
    model: str, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, **fields: Any
) -> ModelSpec:
    """A network for digits, unless another shape or number of classes is given."""
    return spec_for(model, shape, classes, fields)


def save_untrained(path: Path, spec: ModelSpec) -> None:
    """Write a network with its initial parameters."""
    save_model(path, spec, initial(spec, 0))


MLP = network("mlp", hidden=(16,))
"""The network of the runs."""


def query_options(folder: Path, *options: str, client: int = 0) -> list[str]:
    """The words of a command for a short query of a client."""
    return ["query", str(folder), "--client", str(client), *options, *CHANGE_OPTIONS]


def test_the_command_lists_the_teachers_and_writes_the_students_model(
    local: Path,
    classes: ClassesOfClient,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "student.safetensors"
    words = query_options(local, "--classes", str(classes.lacking), "--out", str(file))
    assert call(words) == 0

    printed = capsys.readouterr().out
    assert "client 0 asks for" in printed
    assert "client 5" in printed
    assert "yes" in printed
    for column in ("queried", "forgetting", "average accuracy"):
        assert column in printed
    spec, params = read_model(file)
    assert spec.name == "mlp"
    assert set(params) == set(initial(spec, 0))


def test_the_answer_is_that_of_qkt_in_a_run(
    local: Path, classes: ClassesOfClient, tmp_path: Path
) -> None:
    answer = answer_query(local, 0, [classes.lacking], changes=CHANGES)
    experiment = local_experiment(
        epochs=20,
        method="qkt",
        query={"classes": {"0": [classes.lacking]}, "fewer_than": 1},
        plan={
            "fit": {"epochs": 20, "lr": 0.01},
            "transfer": {"epochs": 2},
            "refine": {"epochs": 2},
        },
    )
    run(experiment, tmp_path / "qkt")

    (round_event,) = journal_events(tmp_path / "qkt", event="round")
    (answer_of_run,) = round_event["answers"]
    gain = answer.after[classes.lacking] - answer.before[classes.lacking]
    assert answer_of_run["gain"] == pytest.approx(gain)
    transfers = journal_events(tmp_path / "qkt", name="transfer")
    teachers = [event["teachers"] for event in transfers if "teachers" in event]
    assert teachers == [answer.teachers]


def test_without_a_teacher_above_the_threshold_the_local_model_comes_back(
    local: Path, classes: ClassesOfClient
) -> None:
    answer = answer_query(local, 0, [classes.lacking], changes={"method.threshold": 1.0})
    assert answer.teachers == []
    assert answer.after == answer.before


def test_a_teacher_may_come_from_a_file_and_be_of_another_network(
    local: Path, classes: ClassesOfClient, tmp_path: Path
) -> None:
    file = tmp_path / "guest.safetensors"
    save_untrained(file, network("logistic"))
    answer = answer_query(local, 0, [classes.lacking], changes=CHANGES, teachers=[file])
    assert answer.names[6] == "guest.safetensors"
    assert 6 in answer.teachers, "an untrained model predicts every class a little"


def test_a_bad_teacher_file_is_named(local: Path, classes: ClassesOfClient, tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"

    def assert_refused(error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message) as caught:
            answer_query(local, 0, [classes.lacking], changes=CHANGES, teachers=[file])
        assert "\n" not in str(caught.value)

    spec = network("logistic")
    params = initial(spec, 1)
    assert_refused(ConfigError, "there is no model file")

    file.write_bytes(b"no safetensors at all")
    assert_refused(CorruptFile, "is damaged")

    save_model(file, spec, params)
    file.write_bytes(file.read_bytes()[:-40])
    assert_refused(CorruptFile, "is damaged")

    save_untrained(file, network("logistic", classes=4))
    assert_refused(ConfigError, "4 classes")

    save_untrained(file, network("logistic", shape=(1, 9, 9)))
    assert_refused(ConfigError, r"\(1, 9, 9\)")

    save_model(file, network("resnext"), params)
    assert_refused(UnknownName, "unknown model 'resnext'")

    first_rows = {name: tensor[:1] for name, tensor in params.items()}
    save_model(file, spec, first_rows)
    assert_refused(CorruptFile, "its entry 'head.bias'")

    file.write_bytes(safetensors.torch.save(params))
    assert_refused(ConfigError, file.name)


def assert_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command ends with code 2 and one line on stderr that contains the message."""
    assert call(words) == 2
    stderr = capsys.readouterr().err
    assert message in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("client", "query", "message"),
    [
        ("0", "present", "examples of class"),
        ("0", "99", "there is no class 99"),
        ("9", "lacking", "there is no client 9"),
        ("0", "seven", "unknown class 'seven'"),
    ],
)
def test_a_query_that_cannot_be_answered_is_one_line_and_exit_code_2(
    client: str,
    query: str,
    message: str,
    local: Path,
    classes: ClassesOfClient,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed = {"present": str(classes.present), "lacking": str(classes.lacking)}.get(query, query)
    words = ["query", str(local), "--client", client, "--classes", typed]
    assert_refused_in_one_line(words, message, capsys)


def test_a_run_without_local_models_is_refused(tmp_path: Path) -> None:
    run(toys.toy("fedavg", rounds=1), tmp_path / "fedavg", toys.blobs())
    with pytest.raises(ConfigError, match="local_only"):
        answer_query(tmp_path / "fedavg", 0, [1], data=toys.blobs())


def test_a_damaged_checkpoint_is_named(
    local: Path, classes: ClassesOfClient, tmp_path: Path
) -> None:
    damaged = tmp_path / "copy"
    shutil.copytree(local, damaged)
    for path in (damaged / "checkpoints" / "objects").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptFile, match="checkpoint"):
        answer_query(damaged, 0, [classes.lacking], changes=CHANGES)


WITHOUT_LIMIT = {**CHANGES, "query.fewer_than": 1000}
"""Settings with which a client may ask for any class by its id."""


def test_by_accuracy_the_client_asks_for_the_classes_that_its_model_gets_wrong(
    weak: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    triggers = ["--by", "accuracy", "--under", "1"]
    words = query_options(weak, *triggers, "--out", str(tmp_path / "raised.safetensors"))
    assert call(words) == 0
    printed = capsys.readouterr().out

    raised = answer_query(weak, 0, {"by": ("accuracy",), "accuracy_under": 1.0}, changes=CHANGES)
    assert raised.why
    for c, reasons in raised.why.items():
        percent = f"{100 * reasons['accuracy']:.0f} %"
        assert f"{c} ({c}): right on {percent} of {reasons['held_out']:g} held out" in printed

    written = answer_query(weak, 0, raised.query, changes=WITHOUT_LIMIT)
    assert written.query == raised.query
    assert written.before == raised.before
    assert written.after == raised.after


def test_by_lack_the_client_asks_for_all_classes_that_it_lacks_and_a_peer_has(local: Path) -> None:
    counts = Result.of(local).label_counts()
    is_lacking = counts[0] == 0
    has_peer = counts[1:].sum(0) > 0
    lacking = tuple(np.flatnonzero(is_lacking & has_peer).tolist())
    assert answer_query(local, 0, {"by": ("lack",)}, changes=CHANGES).query == lacking


def test_a_client_that_lacks_no_class_may_raise_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path / "run", 1, partition="iid")
    fewest = Result.of(folder).label_counts().min(axis=1)
    client = int(fewest.argmax())
    others_lack = int(fewest[client])
    assert fewest.min() < others_lack
    out = ["--out", str(tmp_path / "student.safetensors"), *CHANGE_OPTIONS]
    words = ["query", str(folder), "--client", str(client), "--by", "lack", *out]

    for limit in (1, others_lack):
        assert call([*words, "-s", f"query.fewer_than={limit}"]) == 2
        err = capsys.readouterr().err
        assert "raise query.fewer_than" in err
        assert "--classes" not in err
    assert call([*words, "-s", "query.fewer_than=1000"]) == 0


def test_by_need_the_client_asks_for_the_listed_classes_whatever_it_has(
    local: Path,
    classes: ClassesOfClient,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    needed = (classes.lacking, classes.present)
    triggers = ["--by", "need", "--need", f"{classes.lacking},{classes.present}"]
    words = query_options(local, *triggers, "--out", str(tmp_path / "needed.safetensors"))
    assert call(words) == 0
    printed = capsys.readouterr().out
    for c in needed:
        assert f"{c} ({c}): will need it" in printed

    by_need = answer_query(local, 0, {"by": ("need",), "needs": {"0": needed}}, changes=CHANGES)
    assert by_need.query == tuple(sorted(needed))
    assert by_need.why == {c: {"need": 1} for c in needed}

    written = answer_query(local, 0, needed, changes=WITHOUT_LIMIT)
    assert written.before == by_need.before
    assert written.after == by_need.after


def test_with_two_triggers_the_client_asks_for_the_classes_of_either(
    local: Path, classes: ClassesOfClient
) -> None:
    by_lack = answer_query(local, 0, {"by": ("lack",)}, changes=CHANGES)
    triggers = {"by": ("lack", "need"), "needs": {"0": (classes.present,)}}
    by_either = answer_query(local, 0, triggers, changes=CHANGES)
    assert set(by_either.query) == {*by_lack.query, classes.present}


def test_a_later_query_goes_on_from_the_model_of_the_previous_one_with_new_data(
    local: Path, classes: ClassesOfClient, tmp_path: Path
) -> None:
    first_query = classes.lacking
    first = answer_query(local, 0, [first_query], changes=CHANGES)
    file = tmp_path / "student.safetensors"
    save_model(file, first.model, first.params)

    digits = load_dataset("digits")
    rows = (digits.train.labels == first_query).nonzero().flatten()[:40]
    new = replace(digits, train=digits.train.take(rows))
    counts = Result.of(local).label_counts()[0].tolist()
    second_query = counts.index(0, first_query + 1)
    changes = {**CHANGES, "plan.fit.epochs": 3}
    second = answer_query(
        local, 0, [second_query], changes=changes, client_changes=ClientChanges(file, new)
    )

    assert second.new == 40
    share = 40 / (sum(counts) + 40)
    assert second.label_shares[first_query] == pytest.approx(share), "the client has the class now"
    assert second.before[first_query] > 0.5, "it learned the class, and has data of it"
    assert second.before != first.after, "it trained alone on the new data first"

    from_local_model = answer_query(
        local, 0, [second_query], changes=changes, client_changes=ClientChanges(new_data=new)
    )
    assert from_local_model.before != second.before


PATIENTS = "age,income,label\n" + "".join(
    f"{40 + i % 30},{30000 + 1000 * (i % 17)},{'abc'[i % 3]}\n" for i in range(120)
)
AGES = [50, "", 61, 55, "", 70, "", 44, 58, "", 49, 52, "", 47, ""]
"""The ages of further patients, of which some are missing."""
MORE_PATIENTS = "income,note,age,label\n" + "".join(
    f"{31000 + 900 * i},7,{age},{'abc'[i % 3]}\n" for i, age in enumerate(AGES)
)


def table_run(folder: Path, **standardise: Any) -> Path:
    """A run of three clients on a table with ages and incomes."""
    (folder / "patients.csv").write_text(PATIENTS)
    (folder / "more.csv").write_text(MORE_PATIENTS)
    return trained(
        folder / "run",
        epochs=1,
        data={"name": str(folder / "patients.csv"), "missing": "mean", **standardise},
        model={"name": "mlp", "hidden": (4,)},
        partition={"kind": "pathological", "classes_per_client": 2},
        topology={"clients": 3},
    )


@pytest.mark.parametrize(
    "standardise",
    [{}, {"standardise": "own"}, {"mean": (50.0, 40000.0), "std": (10.0, 5000.0)}],
    ids=["pooled", "own", "declared"],
)
def test_new_rows_of_a_table_are_read_and_scaled_like_those_of_the_run(
    standardise: dict[str, Any], tmp_path: Path
) -> None:
    prepared = prepare(settings_of(table_run(tmp_path, **standardise)))
    new = read_new_data(prepared, tmp_path / "more.csv")
    assert new.about.features == ("age", "income")
    scaled = with_new_data(prepared, 1, new).sites.train.values[-len(new.train) :]

    scaler = prepared.scaler
    moments = scaler
    if scaler.by_client is not None:
        moments = scaler.by_client[1]
    centred = new.train.values.double() - torch.tensor(moments.mean)
    expected = centred / torch.tensor(moments.std)
    assert bool(expected.isnan().any()), "a value is missing"
    assert torch.allclose(scaled.double(), expected.nan_to_num(0.0), atol=1e-4)


def test_the_command_reads_new_rows_with_the_columns_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = table_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    lacking = str(first_lacking(folder, client=1))
    options = ["--classes", lacking, "--new-data", "more.csv"]
    assert call(query_options(folder, *options, client=1)) == 0
    assert f"with {len(AGES)} new examples" in capsys.readouterr().out


def test_new_rows_with_other_inputs_are_refused(tmp_path: Path) -> None:
    prepared = prepare(settings_of(table_run(tmp_path)))
    reversed_columns = load_dataset(tmp_path / "patients.csv", columns=("income", "age"))
    with pytest.raises(ConfigError, match="income, age, but those of the run are age, income"):
        with_new_data(prepared, 0, reversed_columns)
    values = reversed_columns.train.values
    vectors = from_tensors("vectors", (values, reversed_columns.train.labels))
    with pytest.raises(ConfigError, match="are vectors, but those of the run are rows of a table"):
        with_new_data(prepared, 0, vectors)


@pytest.mark.parametrize("kind", ["options in a table", "frozen entries"])
def test_a_students_file_contains_its_whole_network(kind: str, tmp_path: Path) -> None:
    """A later query may start from it, and another client may take it as a teacher."""
    changes: dict[str, Any] = {
        "model": {"name": "low_rank", "of": "mlp", "arguments": {"hidden": (12,)}, "rank": 2}
    }
    if kind == "frozen entries":
        save_untrained(tmp_path / "plain.safetensors", MLP)
        changes = {"start_from": str(tmp_path / "plain.safetensors"), "train_only": ("head.",)}
    folder = trained(tmp_path / "run", epochs=1, **changes)
    short = {"plan.transfer.epochs": 1, "plan.refine.epochs": 1}
    query = [first_lacking(folder, client=0)]
    first = answer_query(folder, 0, query, changes=short)

    file = tmp_path / "student.safetensors"
    save_model(file, first.model, first.params)
    assert read_model(file)[0] == first.model

    student = ClientChanges(file, None)
    later = answer_query(folder, 0, query, changes=short, client_changes=student)
    assert later.before == first.after

    other_query = [first_lacking(folder, client=1)]
    taught = answer_query(folder, 1, other_query, changes=short, teachers=[file])
    assert file.name in taught.names.values()


def test_a_later_query_holds_out_new_examples(local: Path) -> None:
    digits = load_dataset("digits")
    new = replace(digits, train=digits.train.take(torch.arange(30)))
    sites = with_new_data(prepare(settings_of(local)), 0, new).sites
    first_new = len(sites.train) - 30

    divisions = [sites.division(client, 0.1) for client in (0, 1)]
    for division in divisions:
        assert not set(division.train.tolist()) & set(division.held_out.tolist())
    assert divisions[0].held_out.min() >= first_new
    assert divisions[1].held_out.min() < first_new
    transfer = sites.view(0, Stage(1, 1, "transfer", (0,)))
    assert len(transfer.data) == len(sites.positions(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--classes 7,9"),
        (["--classes", "1", "--by", "lack"], "--by"),
        (["--by", "accuracy"], "--by accuracy and --under go together"),
        (["--by", "lack", "--under", "0.5"], "--by accuracy and --under go together"),
        (["--by", "luck"], "query.by = 'luck'"),
        (["--by", "need"], "--by need and --need go together"),
        (["--by", "lack", "--need", "7"], "--by need and --need go together"),
        (["--by", "need", "--need", "17"], "there is no class 17"),
        (["--by", "need", "--need", "seven"], "seven"),
        (
            ["--by", "need", "--need", "7", "-s", "query.needs={1=[7]}"],
            "query.needs.1",
        ),
        (
            ["--by", "lack", "--student", "none.safetensors"],
            "there is no model file none",
        ),
        (["--by", "lack", "--new-data", "nowhere"], "nowhere"),
    ],
)
def test_triggers_that_do_not_fit_are_refused_in_one_line(
    options: list[str], message: str, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["query", str(local), "--client", "0", *options]
    assert_refused_in_one_line(words, message, capsys)


def test_by_need_a_client_without_listed_classes_has_no_query(local: Path) -> None:
    with pytest.raises(ConfigError, match="client 0"):
        answer_query(local, 0, {"by": ("need",), "needs": {"1": (7,)}})


def test_a_later_query_that_does_not_fit_the_run_is_refused(
    local: Path, classes: ClassesOfClient, tmp_path: Path
) -> None:
    def assert_refused(message: str, changes: ClientChanges) -> None:
        with pytest.raises(ConfigError, match=message):
            answer_query(local, 0, [classes.lacking], client_changes=changes)

    wide = tmp_path / "wide.safetensors"
    save_untrained(wide, network("mlp", hidden=(17,)))
    assert_refused(r"wide\.safetensors .* mlp\(hidden=\(17,\)\)", ClientChanges(wide))

    other_shape = ClientChanges(new_data=toys.blobs())
    assert_refused(r"\(1, 4, 4\).*\(1, 8, 8\)", other_shape)

    digits = load_dataset("digits")
    other_classes = replace(digits, classes=(*digits.classes[:-1], "tenth"))
    assert_refused("'tenth'", ClientChanges(new_data=other_classes))


def test_by_accuracy_a_query_is_refused_without_held_out_examples_or_without_a_low_accuracy(
    local: Path, tmp_path: Path
) -> None:
    """A student has trained on all data of its client."""
    student = tmp_path / "student.safetensors"
    save_untrained(student, MLP)
    with pytest.raises(ConfigError, match="all data of client 0"):
        answer_query(
            local,
            0,
            {"by": ("accuracy",), "accuracy_under": 0.5},
            client_changes=ClientChanges(student),
        )
    with pytest.raises(ConfigError, match=r"client 0 .*1e-07 %"):
        answer_query(local, 0, {"by": ("accuracy",), "accuracy_under": 1e-9})


def test_a_run_whose_clients_ask_again_prints_the_gain_of_each_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    data = {"name": "digits", "train_size": 300, "test_size": 100}
    experiment = toys.asking_again(data=data)
    values = {key: getattr(experiment, key) for key in KEYS}
    set_values = {key: value for key, value in values.items() if value != {}}
    config = tmp_path / "again.toml"
    config.write_text(as_toml(set_values))
    assert call(["run", str(config), "--out", str(tmp_path / "run"), "--quiet"]) == 0

    rounds = journal_events(tmp_path / "run", event="round")
    gains = [f"{100 * event['query_gain']:.2f} %" for event in rounds]
    assert len(gains) == 2
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("gain by round")]
    assert line.endswith(" → ".join(gains))


@pytest.mark.parametrize(
    "override",
    ["seed=5", "rounds=1", "query.classes.0=[1]", "method.name=fedavg", "method=qkt_var_e"],
)
def test_a_setting_of_the_run_cannot_be_changed_by_a_query(
    override: str, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["query", str(local), "--client", "0", "--classes", "1", "-s", override]) == 2
    assert override.partition("=")[0] in capsys.readouterr().err


def test_the_students_file_may_be_in_a_new_folder_but_not_be_a_folder(
    local: Path,
    classes: ClassesOfClient,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = query_options(local, "--classes", str(classes.lacking))
    assert call([*words, "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "directory" in printed.err
    assert not printed.out, "it is refused before the query is answered"

    file = tmp_path / "new" / "m.safetensors"
    assert call([*words, "--out", str(file)]) == 0
    assert read_model(file)


@pytest.mark.parametrize("option", ["--student", "--teachers"])
def test_a_model_that_a_query_reads_is_not_overwritten(
    option: str,
    local: Path,
    classes: ClassesOfClient,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not even under another name."""
    file = tmp_path / "m.safetensors"
    save_untrained(file, MLP)
    content = file.read_bytes()
    hard_link = tmp_path / "link.safetensors"
    hard_link.hardlink_to(file)

    words = query_options(local, "--classes", str(classes.lacking), option, str(file))
    for out in (file, hard_link):
        assert call([*words, "--out", str(out)]) == 2
        assert "overwritten" in capsys.readouterr().err
    assert file.read_bytes() == content


def test_by_default_the_students_file_is_named_after_the_run_and_spares_other_files(
    local: Path, classes: ClassesOfClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(local, tmp_path / "mine"))
    monkeypatch.chdir(folder)
    name = f"mine-client0-asked-{classes.lacking}"
    words = query_options(Path(), "--classes", str(classes.lacking))

    existing = Path(f"{name}.safetensors")
    existing.write_text("precious")
    assert call(words) == 0
    assert existing.read_text() == "precious"

    student = Path(f"{name}-2.safetensors")
    content = student.read_bytes()
    assert call([*words, "--student", str(student)]) == 0
    assert student.read_bytes() == content
    assert Path(f"{name}-3.safetensors").is_file()


def test_the_default_name_of_many_classes_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["a,b,label", *(f"{i % 17},{i % 23},c{i % 180:03}" for i in range(1080))]
    (tmp_path / "many.csv").write_text("\n".join(lines))
    trained(
        tmp_path / "run",
        epochs=1,
        data={"name": str(tmp_path / "many.csv")},
        model="logistic",
        partition={"kind": "pathological", "classes_per_client": 60, "path_rule": "pfllib"},
        topology={"clients": 3},
    )
    monkeypatch.chdir(tmp_path)
    assert call(query_options(Path("run"), "--by", "lack")) == 0
    (file,) = tmp_path.glob("run-client0-*.safetensors")
    assert "classes" in file.name


def test_without_a_common_test_set_no_accuracy_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = table_run(tmp_path, standardise="own")
    lacking = str(first_lacking(folder, client=1))
    out = str(tmp_path / "m.safetensors")
    capsys.readouterr()
    assert call(query_options(folder, "--classes", lacking, "--out", out, client=1)) == 0
    printed = capsys.readouterr().out
    assert "nan" not in printed
    assert "no common test set" in printed


def test_new_images_become_features_of_the_backbone_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "body.safetensors"
    save_untrained(file, MLP)
    backbone = {"name": "mlp", "file": str(file), "hidden": (16,)}
    data = {**DIGITS, "features_of": backbone}
    folder = trained(tmp_path / "run", epochs=1, data=data, model="logistic")
    prepared = prepare(settings_of(folder))

    new = read_new_data(prepared, "digits")
    assert torch.equal(new.train.values, prepared.dataset.train.values)
    with pytest.raises(ConfigError, match=r"\(1, 4, 4\).*\(1, 8, 8\)"):
        read_new_data(prepared, toys.blobs())

    query = [first_lacking(folder, client=0)]
    changes = ClientChanges(new_data="digits")
    answer = answer_query(folder, 0, query, changes=CHANGES, client_changes=changes)
    assert answer.new == len(new.train)
