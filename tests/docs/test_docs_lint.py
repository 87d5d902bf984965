"""The check of the documents' English."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools import docs_lint


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty repository."""
    (tmp_path / "docs" / "tutorials").mkdir(parents=True)
    return tmp_path


def test_a_clean_page_has_no_faults(repository: Path) -> None:
    (repository / "README.md").write_text(
        "# A title\n\nClients train on `their_own` data, see eq. 3. FedNTD v0.2 does too.\n"
    )
    assert list(docs_lint.faults(repository)) == []


def test_a_misspelt_word_is_found_with_its_line(repository: Path) -> None:
    (repository / "README.md").write_text("# A title\n\nA page.\n\n| a |\n|---|\n| trainning |\n")
    (fault,) = docs_lint.faults(repository)
    assert "README.md, line 7" in fault
    assert "'trainning'" in fault


def test_code_and_addresses_are_not_checked(repository: Path) -> None:
    text = "See `trainning` in [here](https://example.org/trainning).\n\n```\ntrainning\n```\n"
    (repository / "README.md").write_text(text)
    assert list(docs_lint.faults(repository)) == []


@pytest.mark.parametrize(("length", "faults"), [(30, 0), (31, 1)])
def test_a_sentence_may_have_thirty_words(repository: Path, length: int, faults: int) -> None:
    sentence = "A " + "word " * (length - 2) + "more."
    (repository / "README.md").write_text(f"A short one. {sentence} And another.\n")
    assert len(list(docs_lint.faults(repository))) == faults


def test_notebooks_are_checked_by_cell_without_their_code(repository: Path) -> None:
    cells = [
        {"cell_type": "code", "source": ["trainning = 1"]},
        {"cell_type": "markdown", "source": ["A\n", "trainning.\n"]},
    ]
    path = repository / "docs" / "tutorials" / "one.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    (fault,) = docs_lint.faults(repository)
    assert "cell 2" in fault


def test_a_broken_link_is_a_fault(repository: Path) -> None:
    (repository / "docs" / "one.md").write_text("[A link](two.md).\n")
    (fault,) = docs_lint.faults(repository)
    assert "two.md" in fault


def test_words_are_counted_outside_code_and_tables(repository: Path) -> None:
    (repository / "README.md").write_text(
        "# One two\n\nThree `four` – five.\n\n```\nx y z\n```\n\n| a |\n|---|\n| b |\n"
    )
    assert dict(docs_lint.word_counts(repository)) == {Path("README.md"): 5}
