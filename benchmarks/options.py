"""The command-line options of the benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from importlib.util import find_spec


def option_parser(docstring: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the docstring of a benchmark with its line breaks."""
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def require_ray(parser: argparse.ArgumentParser) -> None:
    """End the program with a message if Ray is not installed."""
    if find_spec("ray") is None:
        parser.error("Ray is not installed: pip install 'fedstill[flower-simulation]'")


def names_among(choices: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of the choices, separated by commas."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(choices)}")
        return chosen

    return names


def integers(text: str) -> list[int]:
    """The type of an option that takes integers, separated by commas."""
    return [int(number) for number in text.split(",")]


def numbers(text: str) -> list[float]:
    """The type of an option that takes numbers, separated by commas."""
    return [float(number) for number in text.split(",")]
