"""``fedstill query``: one query answered from a finished local run; what cannot be answered is one
line.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from fedstill.models.contract import initial, spec_for
from fedstill.querying.answers import ClientChanges, answer_query, read_new_data, with_new_data
from fedstill.running.journal import read_journal
from fedstill.running.model_files import read_model, save_model
from fedstill.running.preparation import prepare
from fedstill.running.result import Result
from fedstill.running.runner import run, settings_of

CHANGES = {"plan.transfer.epochs": 2, "plan.refine.epochs": 2}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("local") / "run", epochs=20)


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose models are often wrong."""
    return trained(tmp_path_factory.mktemp("weak") / "run", epochs=1)


def trained(folder: Path, epochs: int, **changes: Any) -> Path:
    torch.set_num_threads(1)
    experiment = Experiment(
        rounds=1,
        method="local_only",
        reuse=False,
        data={"name": "digits", "train_size": 600, "test_size": 200},
        model={"name": "mlp", "hidden": (16,)},
        partition={"kind": "pathological", "classes_per_client": 3},
        topology={"clients": 6},
        query={"fewer_than": 1},
        plan={"epochs": epochs, "lr": 0.01},
    )
    run(replace(experiment, **changes), folder)
    return folder


@pytest.fixture(scope="module")
def lacking(local: Path) -> tuple[int, int]:
    """A class that client 0 lacks, and one that it has."""
    counts = Result.of(local).label_counts()[0].tolist()
    return counts.index(0), next(c for c, n in enumerate(counts) if n)


def test_the_command_says_who_teaches_and_writes_the_students_model(
    local: Path, lacking: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "student.safetensors"
    few = [w for k, v in CHANGES.items() for w in ("-s", f"{k}={v}")]
    tokens = [
        "query",
        str(local),
        "--client",
        "0",
        "--classes",
        str(lacking[0]),
        "--out",
        str(out),
        *few,
    ]
    assert call(tokens) == 0
    said = capsys.readouterr().out
    for words in (
        "client 0 asks for",
        "client 5",
        "queried",
        "forgetting",
        "average accuracy",
        "yes",
    ):
        assert words in said
    spec, params = read_model(out)
    assert spec.name == "mlp"
    assert set(params) == set(initial(spec, 0))


def test_it_is_what_qkt_does_in_a_run(
    local: Path, lacking: tuple[int, int], tmp_path: Path
) -> None:
    found = answer_query(local, 0, [lacking[0]], changes=CHANGES)
    tree = json.loads(json.dumps({"classes": {"0": [lacking[0]]}, "fewer_than": 1}))
    experiment = Experiment(
        rounds=1,
        method="qkt",
        reuse=False,
        data={"name": "digits", "train_size": 600, "test_size": 200},
        model={"name": "mlp", "hidden": (16,)},
        partition={"kind": "pathological", "classes_per_client": 3},
        topology={"clients": 6},
        query=tree,
        plan={
            "fit": {"epochs": 20, "lr": 0.01},
            "transfer": {"epochs": 2},
            "refine": {"epochs": 2},
        },
    )
    run(experiment, tmp_path / "qkt")
    (told,) = read_journal(tmp_path / "qkt" / "journal.jsonl")[-1]["answers"]
    gain = found.after[lacking[0]] - found.before[lacking[0]]
    assert told["gain"] == pytest.approx(gain)
    events = [
        e for e in read_journal(tmp_path / "qkt" / "journal.jsonl") if e.get("name") == "transfer"
    ]
    assert [e["teachers"] for e in events if "teachers" in e] == [found.teachers]


def test_without_a_teacher_above_the_threshold_the_local_model_comes_back(
    local: Path, lacking: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer_query(local, 0, [lacking[0]], changes={"method.threshold": 1.0})
    assert found.teachers == []
    assert found.after == found.before


def test_a_teacher_may_come_from_a_file_and_be_of_another_network(
    local: Path, lacking: tuple[int, int], tmp_path: Path
) -> None:
    spec = spec_for("logistic", (1, 8, 8), 10, {})
    save_model(tmp_path / "guest.safetensors", spec, initial(spec, 1))
    found = answer_query(
        local, 0, [lacking[0]], changes=CHANGES, teachers=[tmp_path / "guest.safetensors"]
    )
    assert found.names[6] == "guest.safetensors"
    assert 6 in found.teachers, "an untrained model predicts every class a little"


def test_a_bad_teacher_file_is_named(local: Path, lacking: tuple[int, int], tmp_path: Path) -> None:
    def refused(error: type[Exception], said: str, path: Path) -> None:
        with pytest.raises(error, match=said) as caught:
            answer_query(local, 0, [lacking[0]], changes=CHANGES, teachers=[path])
        assert "\n" not in str(caught.value)

    good = spec_for("logistic", (1, 8, 8), 10, {})
    params = initial(good, 1)
    path = tmp_path / "t.safetensors"
    refused(ConfigError, "there is no model file", path)
    path.write_bytes(b"no safetensors at all")
    refused(CorruptFile, "is damaged", path)
    save_model(path, good, params)
    path.write_bytes(path.read_bytes()[:-40])
    refused(CorruptFile, "is damaged", path)
    few = spec_for("logistic", (1, 8, 8), 4, {})
    save_model(path, few, initial(few, 0))
    refused(ConfigError, "4 classes", path)
    wide = spec_for("logistic", (1, 9, 9), 10, {})
    save_model(path, wide, initial(wide, 0))
    refused(ConfigError, r"\(1, 9, 9\)", path)
    save_model(path, spec_for("resnext", (1, 8, 8), 10, {}), params)
    refused(UnknownName, "unknown model 'resnext'", path)
    save_model(path, good, {k: v[:1] for k, v in params.items()})
    refused(CorruptFile, "its entry 'head.bias'", path)
    path.write_bytes(safetensors.torch.save(params))
    refused(ConfigError, path.name, path)


@pytest.mark.parametrize(
    ("client", "classes", "said"),
    [
        ("0", "own", "examples of class"),
        ("0", "99", "there is no class 99"),
        ("9", "lacking", "there is no client 9"),
        ("0", "seven", "unknown class 'seven'"),
    ],
)
def test_a_query_that_cannot_be_answered_is_one_line_and_exit_code_2(
    local: Path,
    lacking: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
    client: str,
    classes: str,
    said: str,
) -> None:
    asked = {"own": str(lacking[1]), "lacking": str(lacking[0])}.get(classes, classes)
    assert call(["query", str(local), "--client", client, "--classes", asked]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_run_without_local_models_is_refused(tmp_path: Path) -> None:
    assert len(load_dataset("digits").train) > 0
    run(toys.toy("fedavg", rounds=1), tmp_path / "fedavg", toys.blobs())
    with pytest.raises(ConfigError, match="local_only"):
        answer_query(tmp_path / "fedavg", 0, [1], data=toys.blobs())


def test_a_damaged_checkpoint_is_said(
    local: Path, lacking: tuple[int, int], tmp_path: Path
) -> None:
    import shutil

    other = tmp_path / "copy"
    shutil.copytree(local, other)
    for path in (other / "checkpoints" / "objects").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptFile, match="checkpoint"):
        answer_query(other, 0, [lacking[0]], changes=CHANGES)


def test_a_query_is_raised_by_what_the_clients_model_gets_wrong(
    weak: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, out = ["--by", "accuracy", "--under", "1"], weak.parent / "raised.safetensors"
    few = [w for k, v in CHANGES.items() for w in ("-s", f"{k}={v}")]
    assert call(["query", str(weak), "--client", "0", *lines, "--out", str(out), *few]) == 0
    raised = answer_query(weak, 0, {"by": ("accuracy",), "accuracy_under": 1.0}, changes=CHANGES)
    said = capsys.readouterr().out
    assert raised.why
    for c, why in raised.why.items():
        assert (
            f"{c} ({c}): right on {100 * why['accuracy']:.0f} % of {why['held_out']:g} held out"
            in said
        )
    written = answer_query(weak, 0, raised.query, changes={**CHANGES, "query.fewer_than": 1000})
    assert (written.query, written.before, written.after) == (
        raised.query,
        raised.before,
        raised.after,
    )


def test_by_lack_it_asks_for_all_that_it_lacks(local: Path) -> None:
    counts = Result.of(local).label_counts().tolist()
    lacks = tuple(c for c in range(10) if not counts[0][c] and any(row[c] for row in counts))
    assert answer_query(local, 0, {"by": ("lack",)}, changes=CHANGES).query == lacks


def test_by_need_it_asks_for_what_is_named_whatever_it_has(
    local: Path, lacking: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    lacks, has = lacking
    few = [w for k, v in CHANGES.items() for w in ("-s", f"{k}={v}")]
    out = local.parent / "needed.safetensors"
    named = ["--by", "need", "--need", f"{lacks},{has}"]
    assert call(["query", str(local), "--client", "0", *named, "--out", str(out), *few]) == 0
    said = capsys.readouterr().out
    for c in lacking:
        assert f"{c} ({c}): will need it" in said
    needed = answer_query(local, 0, {"by": ("need",), "needs": {"0": lacking}}, changes=CHANGES)
    assert needed.query == tuple(sorted(lacking))
    assert needed.why == {c: {"need": 1} for c in lacking}
    written = answer_query(local, 0, lacking, changes={**CHANGES, "query.fewer_than": 1000})
    assert (written.before, written.after) == (needed.before, needed.after)
    both = answer_query(local, 0, {"by": ("lack", "need"), "needs": {"0": (has,)}}, changes=CHANGES)
    assert set(both.query) == {
        *answer_query(local, 0, {"by": ("lack",)}, changes=CHANGES).query,
        has,
    }


def test_a_later_query_goes_on_from_the_model_of_the_one_before_with_new_data(
    local: Path, lacking: tuple[int, int], tmp_path: Path
) -> None:
    counts = Result.of(local).label_counts()[0].tolist()
    first = answer_query(local, 0, [lacking[0]], changes=CHANGES)
    save_model(tmp_path / "student.safetensors", first.model, first.params)
    digits = load_dataset("digits")
    rows = (digits.train.labels == lacking[0]).nonzero().flatten()[:40]
    new = replace(digits, train=digits.train.take(rows))
    other = next(c for c in range(10) if c != lacking[0] and not counts[c])
    short = {**CHANGES, "plan.fit.epochs": 3}
    second = answer_query(
        local,
        0,
        [other],
        changes=short,
        client_changes=ClientChanges(tmp_path / "student.safetensors", new),
    )
    assert second.new == 40
    assert second.label_shares[lacking[0]] == pytest.approx(40 / (sum(counts) + 40)), (
        "the class is its own by now"
    )
    assert second.before[lacking[0]] > 0.5, "it learned the class, and has data of it"
    assert second.before != first.after, "it trained alone on the new data first"
    alone = answer_query(
        local, 0, [other], changes=short, client_changes=ClientChanges(new_data=new)
    )
    assert alone.before != second.before, "from another model"


PATIENTS = "age,income,label\n" + "".join(
    f"{40 + i % 30},{30000 + 1000 * (i % 17)},{'abc'[i % 3]}\n" for i in range(120)
)
MORE_PATIENTS = "income,note,age,label\n" + "".join(
    f"{31000 + 900 * i},7,{age},{'abc'[i % 3]}\n"
    for i, age in enumerate([50, "", 61, 55, "", 70, "", 44, 58, "", 49, 52, "", 47, ""])
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
    expected = (new.train.values.double() - torch.tensor(moments.mean)) / torch.tensor(moments.std)
    assert bool(expected.isnan().any()), "a value is missing"
    assert torch.allclose(scaled.double(), expected.nan_to_num(0.0), atol=1e-4)


def test_the_command_reads_new_rows_with_the_columns_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = table_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    absent = str(Result.of(folder).label_counts()[1].tolist().index(0))
    tokens = ["query", str(folder), "--client", "1", "--classes", absent, "--new-data", "more.csv"]
    few = [w for k, v in CHANGES.items() for w in ("-s", f"{k}={v}")]
    assert call([*tokens, *few]) == 0
    assert "with 12 new examples" in capsys.readouterr().out


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
def test_a_students_file_has_everything_of_its_network(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "model": {"name": "low_rank", "of": "mlp", "arguments": {"hidden": (12,)}, "rank": 2}
    }
    if kind == "frozen entries":
        plain = spec_for("mlp", (1, 8, 8), 10, {"hidden": (16,)})
        save_model(tmp_path / "plain.safetensors", plain, initial(plain, 0))
        changes = {
            "start_from": str(tmp_path / "plain.safetensors"),
            "train_only": ("head.",),
        }
    folder = trained(tmp_path / "run", epochs=1, **changes)
    lacking, also_lacking = (row.tolist().index(0) for row in Result.of(folder).label_counts()[:2])
    short = {"plan.transfer.epochs": 1, "plan.refine.epochs": 1}
    first = answer_query(folder, 0, [lacking], changes=short)
    path = tmp_path / "student.safetensors"
    save_model(path, first.model, first.params)
    assert read_model(path)[0] == first.model
    assert (
        answer_query(
            folder, 0, [lacking], changes=short, client_changes=ClientChanges(path, None)
        ).before
        == first.after
    )
    assert (
        path.name
        in answer_query(folder, 1, [also_lacking], changes=short, teachers=[path]).names.values()
    )


def test_what_a_later_query_holds_out_is_new(local: Path) -> None:
    digits = load_dataset("digits")
    new = replace(digits, train=digits.train.take(torch.arange(30)))
    prepared = with_new_data(prepare(settings_of(local)), 0, new)
    total = len(prepared.sites.train) - 30
    for client in (0, 1):
        division = prepared.sites.division(client, 0.1)
        own = division.train
        held = division.held_out
        assert (held.min() >= total) == (client == 0)
        assert not set(own.tolist()) & set(held.tolist())
    assert len(prepared.sites.view(0, Stage(1, 1, "transfer", (0,))).data) == len(
        prepared.sites.positions(0)
    )


@pytest.mark.parametrize(
    ("tokens", "said"),
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
def test_a_raised_query_that_cannot_be_is_one_line(
    local: Path, capsys: pytest.CaptureFixture[str], tokens: list[str], said: str
) -> None:
    assert call(["query", str(local), "--client", "0", *tokens]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_client_for_which_no_need_is_named_has_no_query(local: Path) -> None:
    with pytest.raises(ConfigError, match="client 0"):
        answer_query(local, 0, {"by": ("need",), "needs": {"1": (7,)}})


def test_what_cannot_be_a_later_query_is_refused(
    local: Path, lacking: tuple[int, int], tmp_path: Path
) -> None:
    spec = spec_for("mlp", (1, 8, 8), 10, {"hidden": (16,)})
    save_model(tmp_path / "m.safetensors", spec, initial(spec, 0))
    with pytest.raises(ConfigError, match="all data of client 0"):
        answer_query(
            local,
            0,
            {"by": ("accuracy",), "accuracy_under": 0.5},
            client_changes=ClientChanges(tmp_path / "m.safetensors"),
        )
    wide = spec_for("mlp", (1, 8, 8), 10, {"hidden": (17,)})
    save_model(tmp_path / "wide.safetensors", wide, initial(wide, 0))
    with pytest.raises(ConfigError, match=r"wide\.safetensors .* mlp\(hidden=\(17,\)\)"):
        answer_query(
            local, 0, [lacking[0]], client_changes=ClientChanges(tmp_path / "wide.safetensors")
        )
    with pytest.raises(ConfigError, match=r"\(1, 4, 4\).*\(1, 8, 8\)"):
        answer_query(local, 0, [lacking[0]], client_changes=ClientChanges(new_data=toys.blobs()))
    with pytest.raises(
        ConfigError,
        match=r"client 0 .*1e-07 %",
    ):
        answer_query(local, 0, {"by": ("accuracy",), "accuracy_under": 1e-9})
    digits = load_dataset("digits")
    named = replace(digits, classes=(*digits.classes[:-1], "tenth"))
    with pytest.raises(ConfigError, match="'tenth'"):
        answer_query(local, 0, [lacking[0]], client_changes=ClientChanges(new_data=named))


def test_a_run_whose_clients_ask_again_says_what_each_query_gained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    tree = toys.asking_again(data={"name": "digits", "train_size": 300, "test_size": 100})
    (tmp_path / "again.toml").write_text(
        as_toml({k: v for k in KEYS if (v := getattr(tree, k)) != {}})
    )
    assert (
        call(["run", str(tmp_path / "again.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    )
    said = capsys.readouterr().out
    rounds = [e for e in read_journal(tmp_path / "run/journal.jsonl") if e["event"] == "round"]
    gains = [f"{100 * e['query_gain']:.2f} %" for e in rounds]
    assert len(gains) == 2
    (line,) = [line for line in said.splitlines() if line.startswith("gain by round")]
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


FEW = [word for key, value in CHANGES.items() for word in ("-s", f"{key}={value}")]


def query_of(folder: Path, lacking: int) -> list[str]:
    return ["query", str(folder), "--client", "0", "--classes", str(lacking), *FEW]


def test_the_students_file_may_be_in_a_new_folder_but_not_be_a_folder(
    local: Path, lacking: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = query_of(local, lacking[0])
    assert call([*tokens, "--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "directory" in err
    assert not out, "it is refused before the query is answered"
    assert call([*tokens, "--out", str(tmp_path / "new" / "m.safetensors")]) == 0
    assert read_model(tmp_path / "new" / "m.safetensors")


@pytest.mark.parametrize("option", ["--student", "--teachers"])
def test_a_model_that_a_query_reads_is_not_overwritten(
    option: str,
    local: Path,
    lacking: tuple[int, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = spec_for("mlp", (1, 8, 8), 10, {"hidden": (16,)})
    path = tmp_path / "m.safetensors"
    save_model(path, spec, initial(spec, 0))
    content = path.read_bytes()
    other_name = tmp_path / "link.safetensors"
    other_name.hardlink_to(path)
    tokens = [*query_of(local, lacking[0]), option, str(path)]
    for out in (path, other_name):
        assert call([*tokens, "--out", str(out)]) == 2
        assert "overwritten" in capsys.readouterr().err
    assert path.read_bytes() == content


def test_by_default_the_students_file_is_named_after_the_run_and_spares_other_files(
    local: Path, lacking: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(local, tmp_path / "mine"))
    monkeypatch.chdir(folder)
    tokens = query_of(Path(), lacking[0])
    first = Path(f"mine-client0-asked-{lacking[0]}.safetensors")
    first.write_text("precious")
    assert call(tokens) == 0
    assert first.read_text() == "precious"
    second = Path(f"mine-client0-asked-{lacking[0]}-2.safetensors")
    content = second.read_bytes()
    assert call([*tokens, "--student", str(second)]) == 0
    assert second.read_bytes() == content
    assert Path(f"mine-client0-asked-{lacking[0]}-3.safetensors").is_file()


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
    assert call(["query", "run", "--client", "0", "--by", "lack", *FEW]) == 0
    (file,) = tmp_path.glob("run-client0-*.safetensors")
    assert "classes" in file.name


def test_without_a_common_test_set_no_accuracy_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = table_run(tmp_path, standardise="own")
    absent = str(Result.of(folder).label_counts()[1].tolist().index(0))
    out = tmp_path / "m.safetensors"
    capsys.readouterr()
    tokens = ["query", str(folder), "--client", "1", "--classes", absent, "--out", str(out)]
    assert call([*tokens, *FEW]) == 0
    printed = capsys.readouterr().out
    assert "nan" not in printed
    assert "no common test set" in printed


def test_new_images_become_features_of_the_backbone_of_the_run(tmp_path: Path) -> None:
    spec = spec_for("mlp", (1, 8, 8), 10, {"hidden": (16,)})
    save_model(tmp_path / "body.safetensors", spec, initial(spec, 0))
    backbone = {"name": "mlp", "file": str(tmp_path / "body.safetensors"), "hidden": (16,)}
    digits = {"name": "digits", "train_size": 600, "test_size": 200}
    folder = trained(
        tmp_path / "run", epochs=1, data={**digits, "features_of": backbone}, model="logistic"
    )
    prepared = prepare(settings_of(folder))
    new = read_new_data(prepared, "digits")
    assert torch.equal(new.train.values, prepared.dataset.train.values)
    with pytest.raises(ConfigError, match=r"\(1, 4, 4\).*\(1, 8, 8\)"):
        read_new_data(prepared, toys.blobs())
    lacking = Result.of(folder).label_counts()[0].tolist().index(0)
    answer = answer_query(
        folder, 0, [lacking], changes=CHANGES, client_changes=ClientChanges(new_data="digits")
    )
    assert answer.new == len(new.train)
