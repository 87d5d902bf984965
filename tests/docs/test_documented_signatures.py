"""Methods in the pages' code have the parameters of the methods that they override."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from tools.commands import Page, all_pages

import fedstill
from fedstill.measures.base import Measure

BASES = {"Measure": Measure, "Method": fedstill.Method, "ClientWork": fedstill.ClientWork}


def python_of(page: Page) -> Iterator[ast.Module]:
    for block in page.blocks:
        if block.language == "python":
            yield ast.parse(block.text)


def overriding(tree: ast.Module) -> Iterator[tuple[type, ast.FunctionDef]]:
    """The methods of subclasses, each with the class that it overrides."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for base in [BASES[name] for name in map(ast.unparse, node.bases) if name in BASES]:
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and hasattr(base, member.name):
                    yield base, member


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def overrides_something(page: Page) -> bool:
    return any(list(overriding(tree)) for tree in python_of(page))


PAGES = {page.path: page for page in all_pages() if overrides_something(page)}


def test_pages_were_found() -> None:
    assert len(PAGES) > 5


@pytest.mark.parametrize("path", PAGES)
def test_a_method_has_the_parameters_of_its_base(path: str) -> None:
    for tree in python_of(PAGES[path]):
        for base, method in overriding(tree):
            shown = [argument.arg for argument in method.args.args]
            assert shown == parameters(getattr(base, method.name)), f"{method.name} of {base}"
