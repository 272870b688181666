"""The arguments of `init`, checked."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope_wire.discovery import NAMESPACE
from stagescope_wire.errors import InvalidInput, StagescopeError
from stagescope_wire.keep import validate_keep
from stagescope_wire.names import closest_field, display_name, normal_run_name, run_name
from stagescope_wire.nonfinite import JsonObject, valid_text
from stagescope_wire.plan import KeepSpec
from stagescope_wire.schema import ROLES, STEP_BOUND, check_attempt_key, check_role
from stagescope_workers.device import DEFAULT_PINNED_BYTES
from stagescope_workers.probe.watchdog import DEFAULT_SECONDS
from stagescope_workers.transport.outbox import DEFAULT_MAX_BYTES, DEFAULT_MAX_EVENTS

_YEAR: Final = 365 * 86400.0
_INT64: Final = 1 << 63


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """The arguments of `stagescope_workers.init`, which describes them."""

    run: str
    role: str = "actor"
    rank: int = 0
    world_size: int | None = None
    data_rank: int | None = None
    attempt_key: str | None = None
    layout: Mapping[str, object] = dataclasses.field(default_factory=dict)
    resumed_from_step: int | None = None
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    plan: str | Path | Mapping[str, object] | None = None
    keep: KeepSpec | None = None
    captures: bool | str = True
    expects: Sequence[str] = ()
    data_root: str | None = None
    strict: bool = False
    url: str | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    max_pending_bytes: int = DEFAULT_MAX_BYTES
    max_pending_events: int = DEFAULT_MAX_EVENTS
    max_pinned_bytes: int = DEFAULT_PINNED_BYTES
    device_events: bool = False
    watchdog: float = DEFAULT_SECONDS
    namespace: str = NAMESPACE
    display_name: str | None = None
    """The run's name as it was given; None if `run` is the same text."""
    is_single: bool = False
    """Whether neither an argument nor a variable names other ranks of the role."""
    problems: tuple[StagescopeError, ...] = ()
    """Errors of the arguments that were refused; the other arguments are used."""


_VARIABLES: Final = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "attempt_key": "STAGESCOPE_ATTEMPT",
    "data_root": "STAGESCOPE_DATA_DIR",
    "watchdog": "STAGESCOPE_WATCHDOG",
}


def checked_options(arguments: JsonObject) -> ProbeOptions:
    """Return the options of a probe; environment variables replace arguments that are None.

    Args:
        arguments: the keywords of `init` that are fields of ProbeOptions.

    Raises:
        InvalidInput: an impossible name or number.
    """
    given = arguments["run"]
    given = os.environ.get("STAGESCOPE_RUN") or None if given is None else given
    if given is None:
        raise InvalidInput(
            "no run is named", expected='init(run="..."), or its name in STAGESCOPE_RUN'
        )
    options = {**arguments, **_named(given)}
    for name, variable in _VARIABLES.items():
        if options.get(name) is None or options[name] == "":
            options[name] = os.environ.get(variable) or None
    is_single = options["rank"] is None and options["world_size"] is None
    if options["rank"] is None:
        options["rank"] = 0
    for name in ("rank", "world_size", "data_rank", "resumed_from_step"):
        value: object = options.get(name)
        is_number = isinstance(value, str) and value.isascii() and value.isdigit()
        options[name] = index(name, int(str(value)) if is_number else value)
    options["role"] = check_role(options.get("role", "actor"))
    if options["rank"] < 0:
        raise InvalidInput(f"rank is {options['rank']!r}", expected="a rank from 0")
    if options["rank"] == 0:  # one rank says how the name is stored
        run_name(given)
    if options.get("attempt_key") is not None:
        key = options["attempt_key"]  # a variable may hold bytes that are not UTF-8
        options["attempt_key"] = check_attempt_key(valid_text(key) if isinstance(key, str) else key)
    options["watchdog"] = _seconds("watchdog", options.get("watchdog"), DEFAULT_SECONDS)
    for name in ("layout", "settings"):
        options[name] = dict(options.get(name) or {})
    problems = tuple(_replaced(options))
    return ProbeOptions(**options, is_single=is_single, problems=problems)


def _named(given: object) -> dict[str, object]:
    """Return the fields of a run's name that is any text."""
    run = normal_run_name(given)
    return {"run": run, "display_name": None if run == given else display_name(str(given))}


def _replaced(options: dict[str, Any]) -> Iterator[StagescopeError]:
    """Replace values that cannot be right by None; yield an error for each."""
    role, rank, size = options["role"], options["rank"], options["world_size"]
    if (meant := closest_field(role, ROLES)) is not None:
        yield InvalidInput(
            f"role {role!r:.100} counts as one of your own", expected=f"{meant}, the closest"
        )
    if size is not None and rank >= size:
        # Its data is valid nevertheless; the number of ranks is then unknown.
        options["world_size"] = None
        yield InvalidInput(
            f"rank {rank} is not one of the {size} ranks of world_size",
            expected=f"a rank from 0 to {size - 1}" if size > 0 else "a world_size from 1",
            advice="both are those of the role; where they are not given, the variables RANK and "
            "WORLD_SIZE are used. This world_size is ignored",
        )
    resumed = options["resumed_from_step"]
    if resumed is not None and not 0 <= resumed < STEP_BOUND:
        options["resumed_from_step"] = None
        yield InvalidInput(
            f"resumed_from_step is {resumed}",
            expected="a step from 0 of at most 18 digits, or None where the training starts over",
            advice="it is ignored",
        )
    if options.get("keep") is not None:
        # The service, which does the keeping, receives it with the settings.
        try:
            options["keep"] = options["settings"]["keep"] = validate_keep(options["keep"])
        except StagescopeError as error:
            options["keep"] = None
            yield error


def _seconds(name: str, value: object, default: float) -> float:
    try:
        seconds = default if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < _YEAR:
        raise InvalidInput(f"{name} is {value!r:.100}", expected="seconds; 0 switches it off")
    return seconds


def step_index(value: object) -> int | None:
    """Return a trainer's step as an int, or None.

    Raises:
        InvalidInput: it is not an integer, negative, or of more than 18 digits.
    """
    step = index("step", value)
    if step is not None and not 0 <= step < STEP_BOUND:
        raise InvalidInput(
            f"step is {step}", expected="an int from 0 of at most 18 digits, or None"
        )
    return step


def index(name: str, value: object) -> int | None:
    """Return `value` as an int (numpy ints and tensors of one int too), or None.

    Raises:
        InvalidInput: it is not an integer.
    """
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"{name} is {value!r:.200}", expected="an int, or None") from error
    if not -_INT64 <= number < _INT64:
        raise InvalidInput(
            f"{name} is an int of {number.bit_length()} bits", expected="at most 63 and a sign"
        )
    return number
