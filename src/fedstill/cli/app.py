"""The app that all commands belong to, the options they share, and how an error is printed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, get_args

from cyclopts import App, Parameter, Token, validators

from fedstill.errors import FedstillError
from fedstill.version import VERSION

app = App(
    name="fedstill",
    help="Federated learning that does not forget: train, measure and compare methods when clients' data differ.",
    version=VERSION,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)


def _comma_separated(type_: Any, tokens: Sequence[Token]) -> tuple[Any, ...]:
    """``1,2,3`` as a tuple; each part is converted, so that a wrong one is named."""
    one = get_args(type_)[0]
    return tuple(one(part.strip()) for token in tokens for part in token.value.split(",") if part.strip())


Names = Annotated[tuple[str, ...], Parameter(converter=_comma_separated, n_tokens=1, negative="", show_default=False)]
Seeds = Annotated[tuple[int, ...], Parameter(converter=_comma_separated, n_tokens=1, negative="")]
Grid = Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=False, show_default=False)]
Jobs = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
Settings = Annotated[
    tuple[str, ...], Parameter(name=["--set", "-s"], negative="", consume_multiple=False, show_default=False)
]
Debug = Annotated[bool, Parameter(negative="", show_default=False)]
Overwrite = Annotated[bool, Parameter(negative="", show_default=False)]
Quiet = Annotated[bool, Parameter(name=["--quiet", "-q"], negative="", show_default=False)]


@contextmanager
def tracebacks(shown: bool) -> Iterator[None]:
    """Print the traceback of an error, and of what caused it, if they are to be shown; the error goes on."""
    try:
        yield
    except FedstillError as error:
        if shown:
            traceback.print_exception(error)
        raise


def say(text: str, code: int) -> int:
    """One line on the standard error; the exit code is returned."""
    print(f"fedstill: {' '.join(text.split())}", file=sys.stderr)
    return code
