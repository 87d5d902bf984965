"""What the documents show is executed: the walk through a new method, the configs, the examples."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedstill.cli import call
from fedstill.experiment.config.experiment import load
from fedstill.experiment.config.settings import settle

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)


def blocks(page: str) -> list[tuple[str, str, str]]:
    return BLOCK.findall((ROOT / "docs" / page).read_text())


def test_a_method_is_added_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks("add_a_method.md")
    for _, title, text in found:
        if title:
            (tmp_path / title).write_text(text)
    commands = [line[2:] for kind, _, text in found if kind == "console" for line in text.splitlines()]
    assert len(commands) == 3
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "fedstill"
        assert call(arguments) == 0, command
    assert (tmp_path / "sweep" / "report.html").is_file()
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_fedgap.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    assert "1 passed" in tested.stdout


def test_the_configs_shown_resolve(tmp_path: Path) -> None:
    shown = [text for kind, _, text in blocks("configuration.md") if kind == "toml"]
    assert shown
    for i, text in enumerate(shown):
        path = tmp_path / f"{i}.toml"
        path.write_text(text)
        settle(load(path))


def test_the_python_shown_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, _, text in blocks("configuration.md"):
        if kind == "python":
            exec(compile(text, "configuration.md", "exec"), {})


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_runs_and_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 62
    done = subprocess.run([sys.executable, str(path), "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "OTHER BITS" not in done.stdout


def test_links_between_documents_lead_somewhere() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for page in pages:
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
