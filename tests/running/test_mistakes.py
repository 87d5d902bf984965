"""A method with a mistake of a newcomer: the error names file and line, and the journal the clients
that were refused.
"""

from __future__ import annotations

import itertools
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
from journals import refusals
from newcomer import SHAPES, at_the_server, mine

pytestmark = pytest.mark.usefixtures("with_threads")

NO_LINE = "what the library stumbles over"

AT_CLIENTS = {
    "shape in terms": (SHAPES, "RuntimeError: ", "in terms"),
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
"""Mistakes in the client's part of a method: its code, a part of the error, and the place that the
error names.
"""

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
    [
        *itertools.product(AT_CLIENTS, ["serial"]),
        *itertools.product(IN_THREADS_AND_STACKS, ["pooled", "vectorised"]),
    ],
)
def test_the_error_for_a_mistake_at_a_client_has_its_file_and_line(
    mistake: str, engine: str, tmp_path: Path
) -> None:
    body, text, function = AT_CLIENTS[mistake]
    if (mistake, engine) == (NO_LINE, "vectorised"):
        text = "Error: "  # the text is vmap's and depends on the version of torch
    experiment, line = mine(tmp_path, body, engine=engine)
    with pytest.raises(ClientFailed) as stopped:
        run(experiment, tmp_path / "stopped", toys.blobs())
    with pytest.raises(TooFewReplies, match="0 of 4 clients") as caught:
        run(replace(experiment, clients=toys.TOLERANT), tmp_path / "run", toys.blobs())

    for message in (str(stopped.value), str(caught.value)):
        assert text in message
        assert f"line {line}, {function})" in message
    events = refusals(tmp_path / "run")
    assert [event["client"] for event in events] == [0, 1, 2, 3], "the journal names them all"
    for event in events:
        assert text in event["refused"]
        assert f"line {line}" in event["refused"]


def test_the_error_for_a_reply_without_a_group_names_the_function_that_sent_it(
    tmp_path: Path,
) -> None:
    client = """
    def end(self, params, start, result, view, world):  # HERE
        return Payload(weights=params), NOTHING
    """
    experiment, line = mine(tmp_path, client)

    with pytest.raises(TooFewReplies) as caught:
        run(experiment, tmp_path / "run", toys.blobs())

    message = str(caught.value)
    assert "missing ['params'], not asked for ['weights']" in message
    assert message.endswith(f"(sent by mine.py, line {line}, in end)")
    assert len(refusals(tmp_path / "run")) == 4


AT_THE_SERVER = {
    "incompatibility": (
        "return world.public.labels",
        "before round 1: Mine.incompatibility failed: AttributeError",
    ),
    "setting_warnings": (
        "return world.warnings",
        "before round 1: Mine.setting_warnings failed: AttributeError",
    ),
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

    message = str(caught.value)
    assert message.startswith(text)
    assert message.endswith(f"(mine.py, line {line}, in {part})"), "Python shows the traceback"
    assert caught.value.in_shell == f"{message}; see the traceback with --debug"
    assert caught.value.__cause__ is not None
    assert caught.value.exit_code == 1


def test_the_error_for_a_predictor_that_fails_has_its_file_and_line(tmp_path: Path) -> None:
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
def test_a_value_of_another_type_than_a_method_must_return_is_an_error(
    part: str, mistake: str, kind: str, tmp_path: Path
) -> None:
    experiment, line = mine(tmp_path, server=at_the_server(part, mistake))
    with pytest.raises(MethodFailed) as caught:
        run(experiment, tmp_path / "run", toys.blobs())
    message = str(caught.value)
    assert f"Mine.{part} " in message
    assert message.endswith(f"{kind} (mine.py, line {line - 1}, in {part})")


def test_a_payload_that_is_missing_for_every_client_is_an_error(tmp_path: Path) -> None:
    without_return = at_the_server("payload_for_client", "Payload(params=state.params)")
    experiment, line = mine(tmp_path, server=without_return)
    with pytest.raises(MethodFailed) as caught:
        run(experiment, tmp_path / "run", toys.blobs())
    message = str(caught.value)
    assert message.startswith("round 1, stage 'train': Mine.payload_for_client failed: ")
    assert "None" in message
    assert message.endswith(f"(mine.py, line {line - 1}, in payload_for_client)")

    of_none = at_the_server("payload_for_client", "return None")
    sequential = {"kind": "sequential", "clients": 3}
    chain, _ = mine(tmp_path, server=of_none, topology=sequential)
    with pytest.raises(MethodFailed, match=r"Mine\.payload_for_client"):
        run(chain, tmp_path / "chain", toys.blobs())


NOTHING_TO_DO = """
def payload_for_client(self, state, client, stage, world):
    later = state.round > 1 or stage.name == 'before'
    return None if later else Payload(params=state.params)
stages = frozenset({'before', 'train'})
schedule = {'before': 'before'}
"""


def test_a_method_may_have_no_payload_in_a_stage_or_in_a_later_round(tmp_path: Path) -> None:
    experiment, _ = mine(tmp_path, server=NOTHING_TO_DO)
    result = run(experiment, tmp_path / "run", toys.blobs())
    assert len(result.history) == experiment.rounds


AGGREGATED = {
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
"""Parameters that ``aggregate`` returns, and a part of the error."""


@pytest.mark.parametrize("name", AGGREGATED)
def test_aggregated_parameters_that_do_not_fit_the_network_are_an_error(
    name: str, tmp_path: Path
) -> None:
    params, words = AGGREGATED[name]
    mean = "from fedstill.core.aggregation import weighted_mean; mean = weighted_mean(replies)"
    line_of_code = f"{mean}; return state.next(params={params})"
    experiment, line = mine(tmp_path, server=at_the_server("aggregate", line_of_code))

    with pytest.raises(MethodFailed) as caught:
        run(experiment, tmp_path / "run", toys.blobs())

    message = str(caught.value)
    assert message.startswith("round 1, stage 'train': Mine.aggregate failed: ")
    assert words in message
    assert message.endswith(f"(mine.py, line {line - 1}, in aggregate)")


def test_the_refusal_of_a_reply_names_the_term_that_is_not_finite(tmp_path: Path) -> None:
    terms = """
    def terms(self, step, start):
        return {"ce": cross_entropy(step.logits(), step.y), "far": step.logits().sum(1) / 0}
    """
    experiment, _ = mine(tmp_path, terms, plan={"epochs": 1, "batch": 1000})

    with pytest.raises(Diverged, match="'far'"):
        run(experiment, tmp_path / "run", toys.blobs())


def test_errors_of_fedstill_that_a_method_raises_are_not_replaced(tmp_path: Path) -> None:
    server = """
    def begin_round(self, state, stages, world):
        from fedstill.core.errors import IncompatibleMethod
        raise IncompatibleMethod("mine needs an odd number of clients")
    """
    experiment, _ = mine(tmp_path, server=server)

    with pytest.raises(IncompatibleMethod, match="odd number of clients") as caught:
        run(experiment, tmp_path / "run", toys.blobs())
    assert caught.value.exit_code == 2


def test_refusals_are_in_the_journal_if_the_aggregation_fails_afterwards(tmp_path: Path) -> None:
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

    events = journals.read_journal(tmp_path / "run" / "journal.jsonl")
    clients = [event["client"] for event in events if event["event"] == "client"]
    assert clients == [0, 1, 3, 2]
    assert [event["client"] for event in refusals(tmp_path / "run")] == [2]


def test_a_mistake_in_the_librarys_own_method_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstill.methods.fedntd.nckd", None)
    with pytest.raises(ClientFailed, match=r"fedstill/methods/fedntd\.py, line \d+, in terms"):
        run(toys.toy("fedntd"), tmp_path / "run", toys.blobs())
