"""Compares steps, attempts, runs or directories: tensors, or fingerprints."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.fingerprints import (
    AttemptFingerprint,
    FingerprintDifference,
    fingerprint_differences,
    in_order,
    not_compared,
    stream_differences,
)
from stagescope_service.compare.report import as_json
from stagescope_service.compare.results import DumpComparison
from stagescope_service.compare.tolerances import Tolerances
from stagescope_service.core.stream_attributes import StreamValues, streams_of_payloads
from stagescope_service.views.comparisons.sides import ComparedSide, find_sides, open_side
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.bodies import ComparisonRequest
from stagescope_service.views.reading.dependencies import Dependencies, wait_for
from stagescope_service.views.reading.target import Target
from stagescope_wire.errors import InvalidInput, NotReady
from stagescope_wire.schema import read_target

SIDE_PATTERN: Final = r"^(?!\.{1,2}([@:]|$))[A-Za-z0-9._-]{1,100}(@[0-9]{1,9})?(:[0-9]{1,18})?$"

_Key: TypeAlias = tuple[str, ...]
_PAYLOADS: Final = 10_000
"""Payloads of a side that are searched for attributes of their streams."""


class _Compared(NamedTuple):
    """A comparison of tensors, and the differences of the first two attempts' fingerprints."""

    comparison: DumpComparison
    changes: JsonObject | None
    """As `/diff` returns them; None: fewer than two sides are attempts."""

    def to_json(self) -> JsonObject:
        """Return the answer of `POST /comparisons`."""
        return {**as_json(self.comparison), "changes": self.changes}


async def compare_sides(deps: Dependencies, body: ComparisonRequest) -> _Compared:
    """Return the result of a comparison.

    Raises:
        NotReady: it takes longer than a request waits.
    """
    key, began, future = await asyncio.to_thread(_start, deps, body)
    if not await wait_for(future):
        done, planned = deps.comparing.get(key, (0, 0))
        pieces = f", and {done} of {planned} pieces are done" if planned else ""
        raise NotReady(
            f"they have been compared for {time.monotonic() - began:.0f} s{pieces}",
            advice="ask the same again in a moment",
        )
    return future.result()


def _start(deps: Dependencies, body: ComparisonRequest) -> tuple[_Key, float, Future[_Compared]]:
    texts = body.tolerances or []
    tolerances = Tolerances.parse(texts)
    sides = find_sides(deps, [side for side in (body.a, body.b, body.c) if side is not None])
    # The key changes when a step grows or a file goes.
    key: _Key = ("comparison", *(side.version() for side in sides), *texts)
    return key, *deps.long_computations.start_once(key, _compared, deps, key, sides, tolerances)


def _compared(
    deps: Dependencies, key: _Key, sides: Sequence[ComparedSide], tolerances: Tolerances
) -> _Compared:
    def note(done: int, planned: int) -> None:
        deps.comparing[key] = done, planned

    root = deps.settings.data_path / "copies"
    root.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=root) as copies:
            dumps = [open_side(deps, side, Path(copies)) for side in sides]
            comparison = compare(dumps, tolerances=tolerances, progress=note)
    finally:
        deps.comparing.pop(key, None)
    of_runs = [side for side in sides if side.target is not None]
    targets = [side.target for side in sides if side.target is not None]
    if len(targets) < 2:
        return _Compared(comparison, None)
    of_streams = stream_differences(*(_streams_of(deps, side) for side in of_runs[:2]))
    differences = attempt_differences(deps, targets[0], targets[1], of_streams)
    return _Compared(comparison, {**differences.heading, "rows": differences.rows})


def _streams_of(deps: Dependencies, side: ComparedSide) -> StreamValues:
    """Return the attributes of streams that the payloads of a side's steps report."""
    assert side.target is not None
    attempt_id, steps = side.target.attempt_id, list(side.steps)
    rows = deps.catalogue.payloads(attempt_id, steps, state="ingested", limit=_PAYLOADS)
    return streams_of_payloads(rows, deps.catalogue.replaced(attempt_id, steps))


# --- fingerprints ---------------------------------------------------------------------------
class AttemptDifferences(NamedTuple):
    """The differences of two attempts' fingerprints."""

    heading: JsonObject
    """First fields of the answer."""
    rows: list[JsonObject]


def attempt_differences(
    deps: Dependencies, a: Target, b: Target, also: Sequence[FingerprintDifference] = ()
) -> AttemptDifferences:
    """Return the differences between two attempts, as `/diff` answers them, and others."""
    fingerprints = {"a": _fingerprint(deps, a), "b": _fingerprint(deps, b)}
    differences = in_order([*fingerprint_differences(*fingerprints.values()), *also])
    heading: JsonObject = {
        "a": _attempt_heading(a),
        "b": _attempt_heading(b),
        "counts": dict(Counter(each.weight for each in differences)),
        "unknown": [name for name, each in fingerprints.items() if not each.fingerprint],
        "note": "; ".join(not_compared(fingerprints["a"], fingerprints["b"])) or None,
    }
    return AttemptDifferences(heading, [each._asdict() for each in differences])


def _fingerprint(deps: Dependencies, target: Target) -> AttemptFingerprint:
    processes = deps.catalogue.processes(target.attempt_id)
    return AttemptFingerprint(deps.catalogue.fingerprint(target.attempt_id), processes)


def _attempt_heading(target: Target) -> JsonObject:
    row = target.attempt
    return {
        "run": target.run,
        "attempt": target.number,
        "begun": row["opened_wall"],
        "resumed_from_step": row["resumed_from_step"],
    }


def find_attempt(deps: Dependencies, text: str) -> Target:
    """Return the attempt that `run[@attempt]` names.

    Raises:
        NotFound: no such run or attempt.
        InvalidInput: the text names a step too, or cannot be parsed.
    """
    requested = read_target(text)
    if requested.step is not None:
        raise InvalidInput(f"{text!r} names a step", expected="RUN[@ATTEMPT]")
    return deps.finder.attempt(requested.run, requested.attempt)
