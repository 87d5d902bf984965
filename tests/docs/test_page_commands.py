"""The commands on the pages: a wrong one is found, and the quick ones of the first pages run."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tools.commands import Page, all_pages, problems, program_problems

from fedstill.cli import call

CONSOLE = re.compile(r"```console\n.*?```", re.DOTALL)

SMALL = {
    "rounds = 20": "rounds = 2",
    "rounds = 30": "rounds = 5",
    "epochs = 5": "epochs = 1",
    "sampled = 5": "sampled = 2",
}
"""Settings of configs on the pages, and what is tested in their place."""

SHORT = {"--trials 8": "--trials 1", "--seeds 1,2,3": "--seeds 1"}
"""Words of commands, and what is tested in their place."""

RUN_NOTHING = {"reproduce": ["--table"]}
"""Words with which a command runs nothing that takes hours, by its first word."""

NOT_HERE = {"rank": "tests/benchmark/test_rank.py executes it"}
"""Commands that other tests execute."""


def made(text: str) -> Page:
    return Page("docs/made.md", text)


CONFIG = '```toml title="my.toml"\nrounds = 1\n[topology]\nsampled = 3\n```\n'


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("run my.toml -s metod.beta=1", "metod"),
        ("run my.toml --sed 3", "--sed"),
        ("run missing.toml", "missing.toml"),
        ("explain my.toml -s plan.learning=1", "learning"),
        ("compare my.toml --methods fedavg,nosuch", "nosuch"),
        ("compare my.toml --methods fedavg -s method.beta=1", "beta"),
        ("compare my.toml --seeds 1,2 -s seed=3", "seed"),
        ("compare my.toml --methods local_only,fedavg -s topology.sampled=2", "sampled"),
        ("tune my.toml --space method.beta=0.1..1", "beta"),
        ("reproduce fedadkd/table99", "table99"),
        ("reproduce fedadkd/table2 --cells Nobody:*", "Nobody"),
        ("reproduce fedadkd/table2 -s method.nosuch=1", "nosuch"),
        ("rank run digits --track nowhere", "nowhere"),
        ("list method nosuch", "nosuch"),
        ("nosuch my.toml", "nosuch"),
    ],
)
def test_a_wrong_command_is_found(command: str, named: str) -> None:
    page = made(f"{CONFIG}\n```\nfedstill {command}\n```\n")
    (problem,) = problems(page, page.files, page.commands())
    assert named in problem.removeprefix(f"docs/made.md: fedstill {command}")


def test_a_command_in_a_sentence_may_be_a_part() -> None:
    page = made("`fedstill query --by` and `fedstill tune`, but not `fedstill query --bye`.")
    (problem,) = problems(page, {}, page.commands())
    assert "--bye" in problem


def test_options_of_programs_and_targets_are_known() -> None:
    page = made("```\npython -m benchmarks.speed --nosuch 3\nmake nowhere\nmake test\n```\n")
    first, second = program_problems(page)
    assert "--nosuch" in first
    assert "nowhere" in second


def test_variables_and_continued_lines_are_read() -> None:
    page = made(
        '```\nS="--seeds 1"\nfedstill compare my.toml $S \\\n  --methods fedavg # all\n```\n'
    )
    (command,) = page.commands()
    assert command.words == ("compare", "my.toml", "--seeds", "1", "--methods", "fedavg")


def test_an_error_that_the_page_shows_is_none() -> None:
    page = made("```\nfedstill list method nosuch\n```\n")
    (problem,) = problems(page, {}, page.commands())
    shown = made(f"{page.text}\n{problem.partition('nosuch: ')[2]}")
    assert not list(problems(shown, {}, shown.commands()))


@pytest.mark.uses("benchmark")
@pytest.mark.parametrize(
    "path",
    ["README.md", "docs/forgetting.md", pytest.param("docs/tasks.md", marks=pytest.mark.slow)],
)
def test_the_commands_of_a_first_page_run(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = next(page for page in all_pages() if page.path == path)
    # tests/docs/test_documents.py follows the commands behind a prompt.
    page = Page(path, CONSOLE.sub("", whole.text))
    (tmp_path / "matrix.csv").write_text("90,\n45,80\n", encoding="utf-8")
    for name, text in page.files.items():
        for setting, tested in SMALL.items():
            text = text.replace(setting, tested)
        (tmp_path / name).write_text(text, encoding="utf-8")
    commands = [command for command in page.commands() if not command.in_sentence]
    assert commands
    for command in commands:
        first = command.words[0]
        if first in NOT_HERE or not _has_extra(first, command.words):
            continue
        text = " ".join(command.words)
        for words, tested in SHORT.items():
            text = text.replace(words, tested)
        assert call([*text.split(), *RUN_NOTHING.get(first, ())]) == 0, command.text
    capsys.readouterr()


def _has_extra(first: str, words: tuple[str, ...]) -> bool:
    """Whether what a command needs beside fedstill is installed."""
    needed = {"tune": ["optuna"]}.get(first, [])
    if "--onnx" in words:
        needed = ["onnx", "onnxscript", "onnxruntime"]
    return all(find_spec(name) for name in needed)
