"""The comparison of pages with their sources finds what differs, and writes generated texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import docs_check, references, results_page
from tools.docs_check import Generated, References

CURRENT = "before\n<!-- toy -->\n\n| a |\n|---|\n| 1 |\n\n<!-- end of toy -->\nafter\n"
TOY = Generated("toy", "page.md", "test_docs_check:toy_table")


def toy_table() -> str:
    return "| a |\n|---|\n| 1 |\n"


def toy_problems() -> list[str]:
    return ["page.md: no file.py"]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page in a repository of its own."""
    for module in (docs_check, references, results_page):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    path = tmp_path / "page.md"
    path.write_text(CURRENT)
    return path


def test_a_page_with_the_generated_text_is_current(page: Path) -> None:
    assert docs_check.check(TOY).problems == ()


def test_a_changed_number_is_shown_and_written_anew(page: Path) -> None:
    page.write_text(CURRENT.replace("| 1 |", "| 2 |"))
    outcome = docs_check.check(TOY)
    assert {"-| 2 |", "+| 1 |"} <= set(outcome.problems)
    docs_check.write(outcome)
    assert page.read_text() == CURRENT


def test_a_page_without_its_marks_is_an_error(page: Path) -> None:
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match=r"page\.md"):
        docs_check.check(TOY)


def test_wrong_references_are_problems(page: Path) -> None:
    assert docs_check.check(
        References("toy", "page.md", "test_docs_check:toy_problems")
    ).problems == ("page.md: no file.py",)


def test_every_source_is_a_function() -> None:
    assert len(docs_check.selected([], writing=False)) == len(docs_check.ENTRIES), (
        "names are unique"
    )
    for entry in docs_check.ENTRIES:
        module, _, function = entry.source.partition(":")
        text = (Path(docs_check.__file__).parents[1] / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {function}() -> " in text


def test_a_link_to_no_file_and_one_to_no_heading_are_found(page: Path) -> None:
    (page.parent / "docs").mkdir()
    for name in ("README.md", "CONTRIBUTING.md"):
        (page.parent / name).write_text("# A title: with `code`\n")
    text = (
        "[a](../README.md#a-title-with-code) [b](nowhere.md) [c](../README.md#nothing) [d](#here)\n"
    )
    (page.parent / "docs" / "one.md").write_text(f"{text}\n## Here\n")
    links = list(references.broken_links())
    assert [line.partition(" links to ")[2].partition(":")[0] for line in links] == [
        "nowhere.md",
        "../README.md#nothing",
    ]


def test_lines_have_to_be_printed_in_their_order() -> None:
    assert results_page.absent(["a", "c"], ["a", "b", "c"]) == []
    assert results_page.absent(["c", "a"], ["a", "b", "c"]) == ["a"]


def test_a_row_that_no_group_has_is_found(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = results_page.Row("fedavg", frozenset({"90.0", "3"}))
    monkeypatch.setattr(results_page, "rows_of", lambda folder: [row])
    block = results_page.CommandBlock(
        "fedstill compare --out results/a", "  accuracy, last\nfedavg  90.0  3\nfedavg  91.0  3\n"
    )
    monkeypatch.setattr(results_page, "comparisons", lambda: [block] * 10)
    assert len(list(results_page.wrong_comparisons())) == 10
