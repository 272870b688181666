"""The wire format of a canary: log-probs of short fixed sequences, scored after a weight sync.

The engine scores the sequences in several ways, its arms. The trainer scores the fixed sequences
once a version. The service compares the pairs of arms in `PAIRS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeVar

from stagescope_wire.errors import InvalidEvent
from stagescope_wire.nonfinite import Json, JsonObject, number

_Number = TypeVar("_Number", int, float)

Side = Literal["trainer", "engine"]
SIDES: Final = ("trainer", "engine")

FIXED: Final = "fixed"
"""The fixed sequences by prefill, without cached prefixes. The trainer has this arm alone."""
AGAIN: Final = "again"
"""The same a second time: the engine's own noise."""
DECODED: Final = "decoded"
"""What the engine decoded after the prompts at temperature 1, with the log-probs that it returned.

At temperature 1, raw and processed log-probs are the same numbers."""
DECODED_SCORED: Final = "decoded_scored"
"""The same tokens by prefill."""
CACHED: Final = "cached"
"""What the engine decoded after a shared prefix that its cache held before."""
UNCACHED: Final = "uncached"
"""The same tokens without the cache: decoded, or by prefill if decoding chose other tokens."""
BASE: Final = "base"
"""The fixed sequences by the base model, where the rollout uses an adapter."""
ARMS: Final = (FIXED, AGAIN, DECODED, DECODED_SCORED, CACHED, UNCACHED, BASE)


class Pair(NamedTuple):
    """Two arms that the service compares.

    Attributes:
        name: of the comparison, in tables and findings.
        first: the side and the arm.
        second: the side and the arm that it is compared with.
        is_equal: whether the two should be equal; False: they must differ.
    """

    name: str
    first: tuple[Side, str]
    second: tuple[Side, str]
    is_equal: bool = True


NOISE: Final = Pair("engine twice", ("engine", FIXED), ("engine", AGAIN))
PAIRS: Final = (
    Pair("trainer vs engine", ("trainer", FIXED), ("engine", FIXED)),
    Pair("decode vs prefill", ("engine", DECODED), ("engine", DECODED_SCORED)),
    Pair("cached vs uncached", ("engine", CACHED), ("engine", UNCACHED)),
    Pair("adapter vs base", ("engine", FIXED), ("engine", BASE), is_equal=False),
    NOISE,
)

MAX_SEQUENCES: Final = 8
MAX_VALUES: Final = 1 << 17
"""Most tokens of an event, over all its arms."""
_INT64: Final = 1 << 63
_MAX_CHECKS: Final = 20
_MAX_TEXT: Final = 1000


class Arm(NamedTuple):
    """The sequences of an arm, and the log-probs of the tokens at their ends.

    Attributes:
        rows: the token ids of each sequence, prompt included.
        log_probs: natural log-probs of the last tokens of each row; NaN where there is none.
    """

    rows: tuple[tuple[int, ...], ...]
    log_probs: tuple[tuple[float, ...], ...]

    def wire(self) -> JsonObject:
        """Return the arm as it is sent."""
        return {"rows": list(map(list, self.rows)), "log_probs": list(map(list, self.log_probs))}


class Check(NamedTuple):
    """A fact that needs no log-probs, such as the BOS of the two tokenizers.

    Attributes:
        name: of the check.
        ok: None: undecided.
        text: what was compared, with the numbers.
        short: what is wrong, as the rest of a sentence whose subject is the engine.
    """

    name: str
    ok: bool | None
    text: str
    short: str = ""


class Canary(NamedTuple):
    """What one side reports after a sync: the fields of a CANARY event.

    Attributes:
        side: who scored.
        source: the engine instance's name; "" for the trainer.
        arms: the name of each arm -> its numbers.
        checks: facts without log-probs.
        settings: of the scoring: temperature, dtype, processed, model ..., plain values.
        seconds: what the scoring took.
        problem: why arms are missing; "" if none is.
    """

    side: Side
    source: str
    arms: Mapping[str, Arm]
    checks: tuple[Check, ...] = ()
    settings: Mapping[str, Json] = {}
    seconds: float = 0.0
    problem: str = ""

    def wire(self) -> dict[str, object]:
        """Return the fields of the event, without its work fields."""
        return {
            "side": self.side,
            "source": self.source,
            "arms": {name: arm.wire() for name, arm in self.arms.items()},
            "checks": [list(check) for check in self.checks],
            "settings": dict(self.settings),
            "seconds": self.seconds,
            "problem": self.problem,
        }

    @classmethod
    def parse(cls, fields: JsonObject) -> Canary:
        """Read the fields of a CANARY event; unknown arms are left out.

        Raises:
            InvalidEvent: a field cannot be read, or there are too many tokens.
        """
        side, source = fields.get("side"), fields.get("source", "")
        arms, checks = fields.get("arms"), fields.get("checks", [])
        settings, seconds = fields.get("settings", {}), fields.get("seconds", 0.0)
        if side not in SIDES or not isinstance(source, str) or len(source) > _MAX_TEXT:
            raise InvalidEvent(
                f"a canary of side {side!r:.100} and source {source!r:.100}",
                expected=f"one of {SIDES}, and the engine's name",
            )
        if not isinstance(arms, dict) or not isinstance(settings, dict):
            raise InvalidEvent("a canary has no arms", expected="{arm: {rows, log_probs}}")
        found = {name: _arm(name, arms[name]) for name in ARMS if name in arms}
        if sum(len(row) for arm in found.values() for row in arm.rows) > MAX_VALUES:
            raise InvalidEvent(
                "a canary has too many tokens", expected=f"at most {MAX_VALUES} in all arms"
            )
        return cls(
            side="trainer" if side == "trainer" else "engine",
            source=source,
            arms=found,
            checks=_checks(checks),
            settings=settings,
            seconds=_seconds(seconds),
            problem=str(fields.get("problem") or "")[:_MAX_TEXT],
        )


def _arm(name: str, value: object) -> Arm:
    given = value if isinstance(value, dict) else {}
    rows = _rows(given.get("rows"), int, _token)
    log_probs = _rows(given.get("log_probs"), float, _number)
    if (
        rows is not None
        and log_probs is not None
        and len(rows) == len(log_probs) <= MAX_SEQUENCES
        and all(len(row) >= len(own) for row, own in zip(rows, log_probs, strict=True))
        and all(min(row) >= -_INT64 and max(row) < _INT64 for row in rows if row)
    ):
        return Arm(rows, log_probs)
    raise InvalidEvent(
        f"the arm {name} of a canary cannot be read",
        expected=f"at most {MAX_SEQUENCES} rows of token ids, and a log-prob for each token at "
        "the end of its row",
    )


def _rows(
    value: object, kind: type, read: Callable[[object], _Number]
) -> tuple[tuple[_Number, ...], ...] | None:
    """Return rows of numbers; None if they are something else.

    Args:
        value: the rows.
        kind: of the usual numbers, which need no reading.
        read: returns a number.
    """
    try:
        rows: list[tuple[Any, ...]] = [*map(tuple, value)]  # type: ignore[call-overload]
        return tuple(_row(row, kind, read) for row in rows)
    except (TypeError, ValueError, OverflowError):
        return None


def _row(
    row: tuple[Any, ...], kind: type, read: Callable[[object], _Number]
) -> tuple[_Number, ...]:
    return row if {*map(type, row)} <= {kind} else tuple(map(read, row))


def _number(value: object) -> float:
    value = number(value)  # over HTTP, NaN is spelled
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _token(value: object) -> int:
    return int(_number(value))


def _seconds(value: object) -> float:
    try:
        return _number(value)
    except (TypeError, OverflowError):
        return math.nan


def _checks(value: object) -> tuple[Check, ...]:
    if not isinstance(value, list | tuple):
        return ()
    found = []
    for each in value[:_MAX_CHECKS]:
        if isinstance(each, list | tuple) and 3 <= len(each) <= len(Check._fields):
            name, ok, *texts = each
            is_decided = ok is None or isinstance(ok, bool)
            said = (str(text)[:_MAX_TEXT] for text in texts)
            found.append(Check(str(name)[:_MAX_TEXT], ok if is_decided else None, *said))
    return tuple(found)
