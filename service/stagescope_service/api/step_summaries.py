"""The statistics of a step: the stored summary of a closed one, assembled now for another.

A slice (a rank, a role, another stage) is assembled from the parts like a whole, so that in it,
too, every token counts once.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, Final, Generic, NamedTuple, TypeVar

from stagescope.wire.errors import InvalidInput, NotFound
from stagescope.wire.names import misspelt
from stagescope.wire.schema import STREAM_TENSORS, WHOLE_STAGES
from stagescope_service.api.completeness import ALL_ROWS, missing_payloads
from stagescope_service.statistics.comparability import Comparability, examine
from stagescope_service.statistics.mismatch import publish
from stagescope_service.statistics.part import PartRecord
from stagescope_service.statistics.step_summary import (
    MISMATCH_PAIRS,
    NOISE_PAIR,
    StepSummary,
    assemble,
)
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.parts import pair_name, part_records

Value = TypeVar("Value")


class Lru(Generic[Value]):
    """The `size` values that were used last; usable from many threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of `key`, made if it is not remembered.

        Two threads may both make it: waiting for each other would cost more.
        """
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        return value

    def __len__(self) -> int:
        return len(self._values)


Row = dict[str, Any]


class Slice(NamedTuple):
    """Which tokens of a step: of a stage, a role, a rank; None takes the step's own summary."""

    stage: str | None = None
    role: str | None = None
    rank: int | None = None


class Place(NamedTuple):
    """A step in the catalogue, as of its aggregation (None: not aggregated)."""

    attempt_id: int
    step: int
    formed: float | None


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """A step summary, or a slice of one, with what is said beside its numbers."""

    whole: StepSummary
    noise: StepSummary | None
    payloads: Row
    """State -> how many payloads of the step."""
    streams: dict[str, Row]

    @cached_property
    def published(self) -> dict[str, float]:
        """The published numbers."""
        return publish(self.whole.summary)

    @cached_property
    def noise_floor(self) -> dict[str, float] | None:
        """The same numbers of the trainer against itself."""
        return None if self.noise is None else publish(self.noise.summary)

    @cached_property
    def comparability(self) -> Comparability:
        """Whether the streams can be compared."""
        return examine(self.whole.summary, self.whole.ranks)


class StepSummaries:
    """Reads and remembers the statistics of steps; usable from many threads."""

    def __init__(self, catalogue: Catalogue, size: int) -> None:
        self._catalogue = catalogue
        self._memory: Lru[MeasuredStep] = Lru(size)

    def of(self, attempt_id: int, step: Row, cut: Slice = Slice()) -> MeasuredStep:  # noqa: B008
        """Return the statistics of a step (a row of `Catalogue.steps`).

        Raises:
            NotFound: nothing of that stage, role or rank was measured, with what was.
        """
        place = Place(attempt_id, int(step["step"]), step["whole_wall"])
        if not step["has_whole"]:
            return self._assembled(place, cut)
        return self._memory.get((place, cut), lambda: self._closed(place, cut))

    def published(self, attempt_id: int, number: int) -> dict[str, float]:
        """Return the published metrics of a step, {} where nothing was measured."""
        found = self._catalogue.steps(attempt_id, before=number + 1, limit=1)
        if not found or found[0]["step"] != number or not found[0]["has_whole"]:
            return {}
        return self.of(attempt_id, found[0]).published

    def comparable(self, attempt_id: int, step: Row) -> Comparability | None:
        """Return whether a step's streams can be compared; None where nothing was measured.

        Args:
            attempt_id: the attempt.
            step: a row of `Catalogue.steps`.
        """
        return self.of(attempt_id, step).comparability if step["has_whole"] else None

    def _closed(self, place: Place, cut: Slice) -> MeasuredStep:
        row = self._catalogue.step(place.attempt_id, place.step)
        if row is None or row["whole"] is None:
            return self._assembled(place, cut)
        whole = StepSummary.from_bytes(row["whole"])
        if cut.role is not None or cut.rank is not None or cut.stage not in (None, whole.stage):
            return self._assembled(place, cut)
        parts = self._parts(place.attempt_id, place.step, pair=NOISE_PAIR)
        return self._measured(place, whole, parts)

    def _assembled(self, place: Place, cut: Slice) -> MeasuredStep:
        every = self._parts(place.attempt_id, place.step)
        parts = every
        if cut.stage is None and (cut.role is not None or cut.rank is not None):
            # A rank's slice is of the step's own stage, not of another that it alone has.
            parts = _of_stage(parts)
        for name in ("stage", "role", "rank"):
            if getattr(cut, name) is not None:
                parts = _only(parts, name, getattr(cut, name), place.step)
        try:
            whole = assemble(parts, stage=cut.stage)
        except InvalidInput as error:
            raise self._unmeasured(place, every) from error
        noise = [part for part in parts if part.summary.pair == NOISE_PAIR]
        return self._measured(place, whole, noise)

    def _measured(
        self, place: Place, whole: StepSummary, noise: Sequence[PartRecord]
    ) -> MeasuredStep:
        own = [part for part in noise if part.stage == whole.stage]
        floor = assemble(own, stage=whole.stage, pairs=[NOISE_PAIR]) if own else None
        payloads = self._catalogue.payloads(place.attempt_id, place.step, limit=ALL_ROWS)
        states = Counter(str(row["state"]) for row in payloads)
        return MeasuredStep(whole, floor, dict(states), self._streams(place.attempt_id, whole))

    def _streams(self, attempt_id: int, whole: StepSummary) -> dict[str, Row]:
        known = {}
        for row in self._catalogue.streams(attempt_id, stage=whole.stage):
            kept = {name: value for name, value in row.items() if value is not None}
            known[row["stream"]] = {k: v for k, v in kept.items() if k not in _STREAM_KEYS}
        return {
            name: {**known.get(name, {}), "dtypes": list(dtypes)}
            for name, dtypes in whole.summary.dtypes.items()
        }

    def _parts(
        self, attempt_id: int, step: int, *, pair: tuple[str, str] | None = None
    ) -> list[PartRecord]:
        catalogue = self._catalogue
        text = None if pair is None else pair_name(pair)
        rows = catalogue.summaries(attempt_id, step, pair=text)
        if not rows:
            return []
        replaced = catalogue.replaced(attempt_id, step)
        return part_records(rows, catalogue.processes(attempt_id), replaced)

    def _unmeasured(self, place: Place, parts: Sequence[PartRecord]) -> NotFound:
        has_pair = sorted({part.stage for part in parts if part.summary.pair in MISMATCH_PAIRS})
        if has_pair:
            return NotFound(
                f"nothing of step {place.step} was measured there",
                expected=f"a stage of {', '.join(has_pair)}",
            )
        recorded, advice, streams = self._recorded(place)
        states = self._catalogue.payload_states([place.attempt_id], [place.step])
        why = missing_payloads(states) or "no rank has handed over both streams"
        if not missing_payloads(states) and streams >= {"rollout", "trainer"}:
            why = "both streams were handed over, by different payloads, and are not joined"
        return NotFound(
            f"step {place.step} has no numbers (yet): {why}; recorded is {recorded}",
            expected="rollout_log_probs and old_log_probs (or log_probs) with response_mask",
            advice=f"{advice}see /steps/{place.step}/stages for who has arrived, /losses for what "
            "was lost, /findings for what was refused or not joined",
        )

    def _recorded(self, place: Place) -> tuple[str, str, set[str]]:
        """Return what was recorded in a step, which of its names seem to be misspelt, and of whom.

        The last names whose streams are there: `rollout`, `trainer`.
        """
        rows = self._catalogue.payloads(place.attempt_id, place.step, limit=_PAYLOADS_LOOKED_AT)
        by_stage: dict[str, dict[str, None]] = {}
        for row in rows:
            names = by_stage.setdefault(str(row["stage"]), {})
            names.update(dict.fromkeys(map(str, row["tensors"] or ())))
        told = [
            f"in {stage}: {', '.join(sorted(names)[:_NAMES_TOLD]) or 'no tensor'}"
            for stage, names in sorted(by_stage.items())
        ]
        wrong = dict(pair for names in by_stage.values() for pair in misspelt(names))
        advice = "".join(f"{name} seems to mean {meant}; " for name, meant in wrong.items())
        there = {name for names in by_stage.values() for name in names}
        streams = {whose for whose, names in _STREAMS_OF.items() if there & names}
        return "; ".join(told) or "nothing", advice, streams


_STREAMS_OF: Final = {
    "rollout": {STREAM_TENSORS["rollout"]},
    "trainer": {STREAM_TENSORS["old"], STREAM_TENSORS["current"]},
}
_PAYLOADS_LOOKED_AT: Final = 200
_NAMES_TOLD: Final = 20
_STREAM_KEYS = ("attempt_id", "stream", "role", "stage")


def _of_stage(parts: Sequence[PartRecord]) -> list[PartRecord]:
    """Return the parts of the stage of which the step summary is made."""
    there = {part.stage for part in parts if part.summary.pair in MISMATCH_PAIRS}
    order = [*(name for name in WHOLE_STAGES if name in there), *sorted(there)]
    return [part for part in parts if part.stage == order[0]] if order else list(parts)


def _only(parts: Sequence[PartRecord], name: str, value: Any, step: int) -> list[PartRecord]:
    found = [part for part in parts if getattr(part, name) == value]
    if found or not parts:
        return found
    there = sorted({getattr(part, name) for part in parts})
    raise NotFound(
        f"nothing of {name} {value!r:.100} was measured in step {step}",
        expected=f"one of {', '.join(map(str, there[:20]))}",
    )
