"""Checks of the arguments of the coordinator's calls.

Calls over HTTP were checked before; calls of an actor's handle were not. Events are checked one by
one when they are read, for speed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Annotated, ParamSpec, TypeVar

import pydantic
from pydantic_core import ErrorDetails

from stagescope_service.refusals import expected_of, is_missing
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import STEP_BOUND

P = ParamSpec("P")
R = TypeVar("R")

_BELOW = 1 << 63
"""Integers from here on do not fit into a column of the catalogue."""

AttemptId = Annotated[int, pydantic.Field(ge=1, lt=_BELOW)]
StepNumber = Annotated[int, pydantic.Field(ge=0, lt=STEP_BOUND)]
Revision = Annotated[int, pydantic.Field(ge=-_BELOW, lt=_BELOW)]
Seconds = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
Ranks = Annotated[
    Sequence[Annotated[int, pydantic.Field(ge=0, lt=1 << 31)]], pydantic.Field(max_length=100_000)
]
Seqs = Annotated[
    Sequence[Annotated[int, pydantic.Field(ge=0, lt=_BELOW)]], pydantic.Field(max_length=100_000)
]


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("it holds characters that cannot be printed")
    return value


Name = Annotated[
    str,
    pydantic.Field(min_length=1, max_length=500),
    pydantic.AfterValidator(_printable),
]
Message = Annotated[str, pydantic.Field(min_length=1, max_length=4000)]
Fields = JsonObject

_STRICT = pydantic.ConfigDict(strict=True, arbitrary_types_allowed=True)


def checked(method: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
    """Refuse arguments that do not match the annotations of `method`.

    Raises:
        InvalidInput: by the call; names each argument, its value and the expected type.
    """

    arguments = [*inspect.signature(method).parameters][1:]

    @pydantic.validate_call(config=_STRICT)
    @functools.wraps(method)
    def begin(*positional: P.args, **named: P.kwargs) -> Awaitable[R]:
        # Not a coroutine: errors of the call itself are not errors of its arguments.
        return method(*positional, **named)

    @functools.wraps(method)
    async def call(*positional: P.args, **named: P.kwargs) -> R:
        try:
            running = begin(*positional, **named)
        except pydantic.ValidationError as error:
            raise InvalidInput(_wrong(error), expected=_expected(error, arguments)) from None
        return await running

    return call


def names_checked(method: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[object, object, R]]:
    """Refuse arguments that `method` does not have, or lacks; values are left to it, for speed.

    Raises:
        InvalidInput: by the call; names the arguments.
    """
    parameters = inspect.signature(method).parameters
    known = {name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    required = {name for name in known if parameters[name].default is inspect.Parameter.empty}

    @functools.wraps(method)
    async def call(*positional: P.args, **named: P.kwargs) -> R:
        if not required <= named.keys() <= known:
            unknown, missing = sorted(named.keys() - known), sorted(required - named.keys())
            wrong = [f"{name} is no argument" for name in unknown[:5]]
            wrong += [f"{name} is missing" for name in missing]
            raise InvalidInput("; ".join(wrong), expected=", ".join(sorted(known)) or "none")
        return await method(*positional, **named)

    return call


def check_batch(events: object, payloads: object) -> None:
    """Refuse a value that is not a batch of events; each event is checked where it is read.

    Raises:
        InvalidInput: not a list of events, or payloads that are not seq -> payload.
    """
    if not isinstance(events, list | tuple):
        raise InvalidInput(f"events is a {type(events).__name__}", expected="a list of events")
    if payloads is not None and not isinstance(payloads, Mapping):
        raise InvalidInput(
            f"payloads is a {type(payloads).__name__}", expected="a dict of seq to payload"
        )


_UNEXPECTED = ("unexpected_keyword_argument", "unexpected_positional_argument")


def _wrong(error: pydantic.ValidationError) -> str:
    return "; ".join(_text_of(item) for item in error.errors()[:5])


def _text_of(item: ErrorDetails) -> str:
    name = ".".join(map(str, item["loc"]))
    if is_missing(item):
        return f"{name} is missing"
    if item["type"] in _UNEXPECTED:
        return f"{name} is no argument"
    return f"{name} is {item['input']!r:.100}"


def _expected(error: pydantic.ValidationError, arguments: Sequence[str]) -> str:
    """Return what the values should be, or the names of the arguments if none is wrong."""
    items = [
        item for item in error.errors() if not is_missing(item) and item["type"] not in _UNEXPECTED
    ]
    reasons = dict.fromkeys(map(expected_of, items))
    return "; ".join(list(reasons)[:5]) or ", ".join(sorted(arguments)) or "none"
