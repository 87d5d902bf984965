"""Every field of every registered thing has its sentence, and it is read where it is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from fedstill.core import descriptions, registry


def entries_of_the_package() -> list[tuple[str, str]]:
    """The kind and the name of each entry of a registry that fedstill itself has."""
    entries: list[tuple[str, str]] = []
    for kind in registry.HOMES:
        modules = {
            name: registry.lookup(kind, name).target.__module__ for name in registry.names(kind)
        }
        ours = [name for name, module in modules.items() if module.startswith("fedstill.")]
        entries += [(kind, name) for name in ours]
    return entries


@pytest.mark.parametrize(("kind", "name"), entries_of_the_package())
def test_every_field_has_a_sentence(kind: str, name: str) -> None:
    entry = registry.lookup(kind, name)
    sentences = descriptions.plain_sentences(entry.target)
    for field in descriptions.fields(entry):
        sentence = sentences.get(field, "")
        assert sentence.endswith("."), f"{kind} {name}: {field}"
        assert not sentence[0].islower(), f"{kind} {name}: {field}"
        assert "``" not in sentence


@dataclass
class Base:
    """A first line.

    Another paragraph.
    """

    inherited: int = 0
    """Of the base."""
    changed: int = 1
    """Of the base,
    in two lines."""
    bare: int = 2

    def method(self) -> None:
        """No field."""


@dataclass
class Derived(Base):
    changed: int = 5
    added: float = 0.5
    """Its own."""


@dataclass
class Reworded(Derived):
    changed: int = 7
    """Of the class itself."""


def test_a_class_has_its_own_sentences_and_those_of_its_bases() -> None:
    assert descriptions.sentences(Base) == {
        "inherited": "Of the base.",
        "changed": "Of the base, in two lines.",
    }
    assert descriptions.sentences(Derived) == {**descriptions.sentences(Base), "added": "Its own."}
    assert descriptions.sentences(Reworded)["changed"] == "Of the class itself."


def test_a_function_has_the_sentences_of_its_parameters() -> None:
    def split(labels: object, alpha: float, seed: int, bare: int = 0) -> None:
        """Share them.

        Every example is used. Note: this is no parameter.

        labels: Class ids (n,).
        alpha: How even, over
            two lines: small is skewed.
        seed: What it is drawn from.

        Source: a paper.
        """

    assert descriptions.sentences(split) == {
        "labels": "Class ids (n,).",
        "alpha": "How even, over two lines: small is skewed.",
        "seed": "What it is drawn from.",
    }


def test_a_plain_class_has_those_of_its_constructor() -> None:
    class Network:
        """A network.

        width: Units of the hidden layer.
        """

        def __init__(
            self, input_shape: object, classes: int, width: int = 8, depth: int = 1
        ) -> None:
            """depth: How many there are."""

    assert descriptions.sentences(Network) == {
        "width": "Units of the hidden layer.",
        "depth": "How many there are.",
    }


def test_a_users_file_is_read_and_a_class_without_source_has_none(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedstill.methods.fedavg import FedAvg\n\n"
        "@dataclass(frozen=True)\n"
        "class Mine(FedAvg):\n"
        "    beta: float = 1.0\n"
        '    """Weight of mine."""\n'
    )
    entry = registry.lookup("method", "mine.py:Mine", tmp_path)
    sentences = descriptions.sentences(entry.target)
    fedavg = registry.lookup("method", "fedavg")
    assert sentences["beta"] == "Weight of mine."
    assert sentences["aggregation"] == descriptions.sentences(fedavg.target)["aggregation"]
    assert descriptions.sentences(type("Bare", (), {})) == {}


def test_a_summary_is_the_whole_first_paragraph() -> None:
    def split() -> None:
        """Share ``labels`` over
        two lines.

        Another paragraph.
        """

    entry = registry.Entry("partition", "split", split)
    assert descriptions.summary(entry) == "Share labels over two lines."
    entry = registry.Entry("partition", "split", split, about="By ``name``.")
    assert descriptions.summary(entry) == "By name."


def test_blocks_end_at_an_empty_line_or_the_next_label() -> None:
    text = """A method: not a label.

    Source: a paper,
    and another: see there.
    State: the global parameters; h = a sum,
    zeros at first; model.N = a model.
    Memory: nothing.

    Nothing of this belongs to it.
    """
    read = descriptions.blocks(text)
    assert read["Source"] == ["a paper, and another: see there."]
    assert read["Memory"] == ["nothing."]
    assert read["State"] == ["the global parameters; h = a sum, zeros at first; model.N = a model."]
