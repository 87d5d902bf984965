"""A method with a mistake, written as a newcomer would: the message says where it is, the journal
who was refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import toys
from fedstill.core.errors import (
    ClientFailed,
    Diverged,
    IncompatibleMethod,
    MethodFailed,
    TooFewReplies,
)
from fedstill.running import journal as journals
from fedstill.running.runner import run
from newcomer import SHAPES, at_the_server, mine, refusals

pytestmark = pytest.mark.usefixtures("with_threads")

NO_LINE = "what the library stumbles over"

AT_CLIENTS = {
    "shape in terms": (
        SHAPES,
        "RuntimeError: ",
        "in terms",
    ),
    "name in begin": (
        """
        def begin(self, payload, client_state, view, world):
            return TrainingStart(params=parameters)  # HERE
        """,
        "NameError: name 'parameters' is not defined",
        "in begin",
    ),
    "teacher that was not given": (
        """
        def terms(self, step, start):
            return {"ce": cross_entropy(step.logits(), step.teacher("global").argmax(1))}  # HERE
        """,
        "KeyError: 'global'",
        "in terms",
    ),
    "group that was not sent": (
        """
        def begin(self, payload, client_state, view, world):
            return TrainingStart(params=payload.tensors("weights"))  # HERE
        """,
        "there is no group 'weights'",
        "in begin",
    ),
    "below a library": (
        """
        def terms(self, step, start):
            values = sorted([step, start], key=self.measure)  # the call, not the place
            return {"ce": cross_entropy(step.logits(), step.y)}

        def measure(self, one):
            return one.size  # HERE
        """,
        "AttributeError: ",
        "in measure",
    ),
    "a tensor, not a dict": (
        """
        def terms(self, step, start):  # HERE
            return cross_entropy(step.logits(), step.y)
        """,
        "LocalTraining.terms returns a Tensor",
        "in terms",
    ),
    "nothing returned": (
        """
        def terms(self, step, start):  # HERE
            terms = {"ce": cross_entropy(step.logits(), step.y)}
        """,
        "LocalTraining.terms returns None",
        "in terms",
    ),
    "a value a class": (
        """
        def terms(self, step, start):  # HERE
            return {"p": step.logits().softmax(1)}
        """,
        "LocalTraining.terms returns 'p' with shape (20, 5)",
        "in terms",
    ),
    "a number": (
        """
        def terms(self, step, start):  # HERE
            return {"ce": cross_entropy(step.logits(), step.y), "weight": 1.0}
        """,
        "LocalTraining.terms returns a float",
        "in terms",
    ),
    "a detached loss": (
        """
        def terms(self, step, start):  # HERE
            return {"ce": cross_entropy(step.logits().detach(), step.y)}
        """,
        "LocalTraining.terms returns terms that do not depend on",
        "in terms",
    ),
    "a loss of numbers": (
        """
        def terms(self, step, start):  # HERE
            import torch
            return {"ce": torch.tensor(cross_entropy(step.logits(), step.y).mean().item())}
        """,
        "LocalTraining.terms returns terms that do not depend on",
        "in terms",
    ),
    "one payload": (
        """
        def end(self, params, start, result, view, world):  # HERE
            return Payload(params=params)
        """,
        "LocalTraining.end returns a Payload",
        "in end",
    ),
    "no carry": (
        """
        def begin(self, payload, client_state, view, world):  # HERE
            return payload.params
        """,
        "a TrainingStart",
        "in begin",
    ),
    "words for a report": (
        """
        def report(self, params, start, view, world):  # HERE
            return "well"
        """,
        "LocalTraining.report returns a str",
        "in report",
    ),
    NO_LINE: (
        """
        def adjust_gradients(self, grads, start):  # HERE
            grads = {k: 2 * g for k, g in grads.items()}
        """,
        "NoneType",
        "class LocalTraining",
    ),
}


IN_THREADS_AND_STACKS = (
    "shape in terms",
    "name in begin",
    "a value a class",
    "a detached loss",
    "one payload",
    NO_LINE,
)


@pytest.mark.parametrize(
    ("mistake", "engine"),
    [(m, "serial") for m in AT_CLIENTS]
    + [(m, e) for m in IN_THREADS_AND_STACKS for e in ("pooled", "vectorised")],
)
def test_a_mistake_at_a_client_is_said_with_its_file_and_line(
    mistake: str, engine: str, tmp_path: Path
) -> None:
    body, text, function = AT_CLIENTS[mistake]
    if (mistake, engine) == (NO_LINE, "vectorised"):
        text = "Error: "  # the rest is vmap's, and other versions of torch have other words
    experiment, line = mine(tmp_path, body, engine=engine)
    with pytest.raises(ClientFailed) as stopped:
        run(experiment, tmp_path / "stopped", toys.blobs())
    with pytest.raises(TooFewReplies, match="0 of 4 clients") as caught:
        run(replace(experiment, clients=toys.TOLERANT), tmp_path / "run", toys.blobs())
    for said in (str(stopped.value), str(caught.value)):
        assert text in said
        assert f"(mine.py, line {line}, {function})" in said or f"line {line}, {function})" in said
    gone = refusals(tmp_path / "run")
    assert [e["client"] for e in gone] == [0, 1, 2, 3], "the journal names them all"
    assert all(text in e["refused"] and f"line {line}" in e["refused"] for e in gone)


def test_a_reply_that_lacks_a_group_says_where_it_is_sent_and_where_expected(
    tmp_path: Path,
) -> None:
    client = """
    def end(self, params, start, result, view, world):  # HERE
        return Payload(weights=params), NOTHING
    """
    experiment, line = mine(tmp_path, client)
    with pytest.raises(TooFewReplies) as caught:
        run(experiment, tmp_path / "run", toys.blobs())
    said = str(caught.value)
    assert "missing ['params'], not asked for ['weights']" in said
    assert said.endswith(f"(sent by mine.py, line {line}, in end)"), (
        "what is expected, the library says"
    )
    assert len(refusals(tmp_path / "run")) == 4


AT_THE_SERVER = {
    "initial_state": (
        "return world.initial_parameters",
        "before round 1: Mine.initial_state failed: AttributeError",
    ),
    "begin_round": (
        "return state.extra['shares']",
        "round 1: Mine.begin_round failed: there is no group 'shares', only []",
    ),
    "payload_for_client": (
        "return Payload(params=state.weights)",
        "round 1, stage 'train': Mine.payload_for_client failed: AttributeError",
    ),
    "work": ("return Trained(self)", "round 1, stage 'train': Mine.work failed: NameError"),
    "expected_reply": (
        "return Payload(params=sent)",
        "round 1, stage 'train': Mine.expected_reply failed: NameError",
    ),
    "aggregate": (
        "return {r.client: r for r in replies}[-7]",
        "round 1, stage 'train': Mine.aggregate failed: KeyError: -7",
    ),
    "predictors": (
        "return {'global': state.model.forward}",
        "before round 1: Mine.predictors failed: AttributeError",
    ),
}


@pytest.mark.parametrize("part", AT_THE_SERVER)
def test_a_mistake_at_the_server_is_one_line_with_its_file_and_line(
    part: str, tmp_path: Path
) -> None:
    mistake, text = AT_THE_SERVER[part]
    experiment, line = mine(tmp_path, server=at_the_server(part, mistake))
    with pytest.raises(MethodFailed) as caught:
        run(experiment, tmp_path / "run", toys.blobs())
    said = str(caught.value)
    assert said.startswith(text)
    assert said.endswith(f"(mine.py, line {line}, in {part})"), "Python shows the traceback"
    assert caught.value.in_shell == f"{said}; see the traceback with --debug"
    assert caught.value.__cause__ is not None
    assert caught.value.exit_code == 1


def test_a_function_that_predictors_gave_is_named_when_it_is_called(tmp_path: Path) -> None:
    server = at_the_server("predictors", "return {'global': lambda x: x.logits()}")
    experiment, line = mine(tmp_path, server=server)
    with pytest.raises(MethodFailed, match=r"Mine\.predictors failed: AttributeError") as caught:
        run(experiment, tmp_path / "run", toys.blobs())
    assert f"(mine.py, line {line}, in <lambda>)" in str(caught.value)


@pytest.mark.parametrize(
    ("part", "mistake", "kind"),
    [
        ("aggregate", "state.next(params=replies[0].content.params)", "a State"),
        ("aggregate", "return replies[0].content.params", "a State"),
        ("payload_for_client", "return state.params", "a Payload"),
        ("work", "LocalTraining(self)", "a ClientWork"),
        ("work", "return LocalTraining", "a ClientWork"),
    ],
)
def test_what_a_method_gives_must_be_what_it_is_asked_for(
    part: str, mistake: str, kind: str, tmp_path: Path
) -> None:
    experiment, line = mine(tmp_path, server=at_the_server(part, mistake))
    with pytest.raises(MethodFailed) as caught:
        run(experiment, tmp_path / "run", toys.blobs())
    message = str(caught.value)
    assert f"Mine.{part} " in message
    assert message.endswith(f"{kind} (mine.py, line {line - 1}, in {part})")


def test_down_that_returns_nothing_is_said_before_a_round_is_over(tmp_path: Path) -> None:
    experiment, line = mine(
        tmp_path, server=at_the_server("payload_for_client", "Payload(params=state.params)")
    )
    with pytest.raises(MethodFailed) as caught:
        run(experiment, tmp_path / "run", toys.blobs())
    message = str(caught.value)
    assert message.startswith("round 1, stage 'train': Mine.payload_for_client failed: ")
    assert "None" in message
    assert message.endswith(f"(mine.py, line {line - 1}, in payload_for_client)")
    chain, _ = mine(
        tmp_path,
        server=at_the_server("payload_for_client", "return None"),
        topology={"kind": "sequential", "clients": 3},
    )
    with pytest.raises(MethodFailed, match=r"Mine\.payload_for_client"):
        run(chain, tmp_path / "chain", toys.blobs())


NOTHING_TO_DO = """
def payload_for_client(self, state, client, stage, world):
    later = state.round > 1 or stage.name == 'before'
    return None if later else Payload(params=state.params)
stages = frozenset({'before', 'train'})
schedule = {'before': 'before'}
"""


def test_down_may_return_nothing_in_a_stage_or_in_a_later_round(tmp_path: Path) -> None:
    experiment, _ = mine(tmp_path, server=NOTHING_TO_DO)
    result = run(experiment, tmp_path / "run", toys.blobs())
    assert len(result.history) == experiment.rounds


FOLDED = {
    "dropped": ("{k: v for k, v in mean.items() if 'bias' not in k}", "params differs: missing ['"),
    "added": (
        "{**mean, 'scale': mean['head.bias']}",
        "params differs: missing [], not asked for ['scale']",
    ),
    "cut": (
        "{**mean, 'head.bias': mean['head.bias'][:2]}",
        "params/head.bias has shape (2,), not (5,)",
    ),
    "cast": ("{k: v.double() for k, v in mean.items()}", " is torch.float64, not torch.float32"),
    "no tensor": ("{**mean, 'head.bias': 3.0}", "params/head.bias is not a dense tensor"),
}


@pytest.mark.parametrize("how", FOLDED)
def test_what_fold_makes_of_the_models_entries_is_said_in_its_stage(
    how: str, tmp_path: Path
) -> None:
    gives, why = FOLDED[how]
    mean = "from fedstill.core.aggregation import weighted_mean; mean = weighted_mean(replies)"
    fold = f"{mean}; return state.next(params={gives})"
    experiment, line = mine(tmp_path, server=at_the_server("aggregate", fold))
    with pytest.raises(MethodFailed) as caught:
        run(experiment, tmp_path / "run", toys.blobs())
    said = str(caught.value)
    assert said.startswith("round 1, stage 'train': Mine.aggregate failed: ")
    assert why in said
    assert said.endswith(f"(mine.py, line {line - 1}, in aggregate)")


def test_a_term_that_is_no_number_is_named_where_the_reply_is_refused(tmp_path: Path) -> None:
    terms = """
    def terms(self, step, start):
        return {"ce": cross_entropy(step.logits(), step.y), "far": step.logits().sum(1) / 0}
    """
    experiment, _ = mine(tmp_path, terms, plan={"epochs": 1, "batch": 1000})
    with pytest.raises(
        Diverged,
        match="'far'",
    ):
        run(experiment, tmp_path / "run", toys.blobs())


def test_errors_that_a_method_raises_on_purpose_stay_what_they_are(tmp_path: Path) -> None:
    server = """
    def begin_round(self, state, stages, world):
        from fedstill.core.errors import IncompatibleMethod
        raise IncompatibleMethod("mine needs an odd number of clients")
    """
    experiment, _ = mine(tmp_path, server=server)
    with pytest.raises(IncompatibleMethod, match="odd number of clients") as caught:
        run(experiment, tmp_path / "run", toys.blobs())
    assert caught.value.exit_code == 2


def test_refusals_before_a_mistake_in_fold_are_in_the_journal(tmp_path: Path) -> None:
    client = """
    def end(self, params, start, result, view, world):
        if view.client == 2:
            raise OSError("the disk is full")
        return Payload(params=params), NOTHING
    """
    experiment, _ = mine(
        tmp_path, client, at_the_server("aggregate", "return state.nothing"), clients=toys.TOLERANT
    )
    with pytest.raises(MethodFailed, match=r"Mine\.aggregate"):
        run(experiment, tmp_path / "run", toys.blobs())
    events = [
        e
        for e in journals.read_journal(tmp_path / "run" / "journal.jsonl")
        if e["event"] == "client"
    ]
    assert [e["client"] for e in events] == [0, 1, 3, 2]
    assert [e["client"] for e in refusals(tmp_path / "run")] == [2]


def test_a_mistake_in_the_librarys_own_method_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstill.methods.fedntd.nckd", None)
    with pytest.raises(ClientFailed, match=r"fedstill/methods/fedntd\.py, line \d+, in terms"):
        run(toys.toy("fedntd"), tmp_path / "run", toys.blobs())
