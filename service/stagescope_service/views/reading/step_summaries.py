"""Reads the statistics of steps: a closed step's summary is stored, any other is assembled.

A slice (a rank, a role, another stage) is assembled from the parts as a step is, so that every
token counts once in it too.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from cachetools import LRUCache

from stagescope_service.core.stream_attributes import stream_attributes
from stagescope_service.statistics.comparability import Comparability, examine, examine_ranks
from stagescope_service.statistics.mismatch import publish
from stagescope_service.statistics.part import PartRecord
from stagescope_service.statistics.step_summary import (
    MISMATCH_PAIRS,
    NOISE_PAIR,
    StepSummary,
    assemble,
    noise_floor,
)
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.parts import pair_name, part_records
from stagescope_service.store.queries.overview import ListedAttempt, StepOverview
from stagescope_service.store.tables import PayloadRow
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.reading.completeness import ROWS_REMOVED, missing_payloads
from stagescope_wire.errors import InvalidInput, NotFound, NotMeasured
from stagescope_wire.links import Link
from stagescope_wire.names import misspelt
from stagescope_wire.nonfinite import Json
from stagescope_wire.schema import STEP_SUMMARY_STAGES
from stagescope_wire.tensors import STREAM_TENSORS


class Slice(NamedTuple):
    """Tokens of a step by stage, role or rank; all None: those of the step summary."""

    stage: str | None = None
    role: str | None = None
    rank: int | None = None


class StepVersion(NamedTuple):
    """A step of the catalogue, as of its last aggregation."""

    attempt_id: int
    step: int
    aggregated_wall: float | None
    """Unix seconds; None: not aggregated."""


@dataclasses.dataclass(frozen=True)
class MeasuredSummary:
    """The summary of a step, or of a slice of one, and what its numbers rest on."""

    summary: StepSummary
    noise: StepSummary | None
    """Statistics of the trainer against itself; None: no recomputed log-probs."""
    payloads: Mapping[str, int]
    """State -> number of the step's payloads."""
    streams: Mapping[str, JsonObject]
    """Name of a log-prob series -> its known attributes."""

    @cached_property
    def published(self) -> dict[str, float]:
        """The published numbers."""
        return publish(self.summary.summary)

    @cached_property
    def noise_floor(self) -> dict[str, float] | None:
        """The same numbers of the trainer against itself."""
        return None if self.noise is None else publish(self.noise.summary)

    @cached_property
    def comparability(self) -> Comparability:
        """Whether the streams can be compared."""
        return examine(self.summary.summary, self.summary.ranks)

    @cached_property
    def rank_comparability(self) -> list[Comparability]:
        """Whether the streams of each of the ranks can be compared, in their order."""
        return examine_ranks(self.summary.summary, self.summary.ranks)


class StepSummaries:
    """Reads and caches the statistics of steps; thread-safe.

    Args:
        catalogue: the reading side of the store.
        size: closed steps and slices of them whose statistics are cached.
    """

    def __init__(self, catalogue: Catalogue, size: int) -> None:
        self._catalogue = catalogue
        self._cache: LRUCache[tuple[StepVersion, Slice], MeasuredSummary] = LRUCache(size)
        self._lock = threading.Lock()

    def measure(
        self,
        attempt_id: int,
        step: StepOverview,
        part: Slice = Slice(),  # noqa: B008
    ) -> MeasuredSummary:
        """Return the statistics of a step, or of a part of it.

        Args:
            attempt_id: the attempt's key in the catalogue.
            step: the step.
            part: which of the step's tokens.

        Raises:
            NotFound: nothing of that stage, role or rank was measured; names what was.
        """
        version = StepVersion(attempt_id, step["step"], step["summary_wall"])
        if not step["has_summary"]:
            return self._assemble(version, part)
        key = (version, part)
        with self._lock:
            cached: MeasuredSummary | None = self._cache.get(key)
        if cached is not None:
            return cached
        # Two threads may read the same step: waiting for each other would cost more.
        measured = self._read(version, part)
        if self._cache.maxsize:
            with self._lock:
                self._cache[key] = measured
        return measured

    def published(self, attempt_id: int, number: int) -> dict[str, float]:
        """Return the published metrics of a step, {} where nothing was measured."""
        rows = self._catalogue.steps(attempt_id, before=number + 1, limit=1)
        if not rows or rows[0]["step"] != number or not rows[0]["has_summary"]:
            return {}
        return self.measure(attempt_id, rows[0]).published

    def comparable(self, attempt_id: int, step: StepOverview) -> Comparability | None:
        """Return whether a step's streams can be compared; None where nothing was measured.

        Args:
            attempt_id: the attempt's key in the catalogue.
            step: the step.
        """
        return self.measure(attempt_id, step).comparability if step["has_summary"] else None

    def _read(self, version: StepVersion, part: Slice) -> MeasuredSummary:
        """Return the stored summary, or assemble it where that is of other tokens."""
        if part.role is not None or part.rank is not None:
            return self._assemble(version, part)
        states = self._payload_states(version)
        row = self._catalogue.step(version.attempt_id, version.step)
        if row is None or row["step_summary"] is None:
            return self._assemble(version, part)
        summary = StepSummary.from_bytes(row["step_summary"])
        if part.stage not in (None, summary.stage):
            return self._assemble(version, part)
        noise = self._parts(version, pair=NOISE_PAIR)
        return self._with_context(version, summary, noise, states)

    def _assemble(self, version: StepVersion, part: Slice) -> MeasuredSummary:
        states = self._payload_states(version)
        every = self._parts(version)
        parts = every
        if part.stage is None and (part.role is not None or part.rank is not None):
            # The slice of a rank is of the step's own stage, even if the rank has others.
            parts = _of_summary_stage(parts)
        for name in ("stage", "role", "rank"):
            if getattr(part, name) is not None:
                parts = _matching(parts, name, getattr(part, name), version.step)
        try:
            summary = assemble(parts, stage=part.stage)
        except InvalidInput as error:
            raise self._unmeasured(version, every, part.stage) from error
        noise = [each for each in parts if each.summary.pair == NOISE_PAIR]
        return self._with_context(version, summary, noise, states)

    def _payload_states(self, version: StepVersion) -> Mapping[str, int]:
        """Return state -> number of the step's payloads.

        It is read before the summaries. So a payload that is ingested between the two reads counts
        as pending in an answer that has its tokens, never as ingested in one that lacks them.
        """
        states: Counter[str] = Counter()
        for row in self._catalogue.payload_states([version.attempt_id], [version.step]):
            states[row["state"]] += row["count"]
        return states

    def _with_context(
        self,
        version: StepVersion,
        summary: StepSummary,
        noise: Sequence[PartRecord],
        states: Mapping[str, int],
    ) -> MeasuredSummary:
        """Return a summary with its noise floor, the states of payloads and the streams."""
        floor = noise_floor(noise, summary.stage)
        streams = self._streams(version, summary)
        return MeasuredSummary(summary, floor, dict(states), streams)

    def _streams(self, version: StepVersion, summary: StepSummary) -> dict[str, JsonObject]:
        """Return the attributes of the summary's streams: those of the step, where it has them."""
        attempt_id = version.attempt_id
        rows = self._catalogue.payloads(
            attempt_id, version.step, stage=summary.stage, state="ingested", limit=_PAYLOADS_ASKED
        )
        metas = [row["meta"] for row in rows if row["meta"]]
        attributes = {
            row["stream"]: {
                name: value
                for name, value in row.items()
                if value is not None and name not in _STREAM_KEYS
            }
            for row in self._catalogue.streams(attempt_id, stage=summary.stage)
        }
        for name, dtypes in summary.summary.dtypes.items():
            # The catalogue has those of the attempt's first step.
            own = attributes.setdefault(name, {})
            for field, values in _said(metas, name).items():
                own.pop(field, None)
                if len(values) == 1:
                    own[field] = values[0]
            if attributes.get(name, {}).pop("dtype", None) is not None and len(dtypes) == 1:
                attributes[name]["dtype"] = dtypes[0]
        return {
            name: {**attributes.get(name, {}), "dtypes": list(dtypes)}
            for name, dtypes in summary.summary.dtypes.items()
        }

    def _parts(
        self, version: StepVersion, *, pair: tuple[str, str] | None = None
    ) -> list[PartRecord]:
        catalogue, (attempt_id, step, _) = self._catalogue, version
        text = None if pair is None else pair_name(pair)
        rows = catalogue.summaries(attempt_id, step, pair=text)
        if not rows:
            return []
        replaced = catalogue.replaced(attempt_id, step)
        return part_records(rows, catalogue.processes(attempt_id), replaced)

    def _unmeasured(
        self, version: StepVersion, parts: Sequence[PartRecord], stage: str | None
    ) -> NotFound:
        """Return the error for a step without numbers, with the reason."""
        row = self._catalogue.step(version.attempt_id, version.step)
        if row is not None and row["rows_removed"] is not None:
            return NotMeasured(
                f"step {version.step} has no numbers of that: {ROWS_REMOVED}",
                advice="raise STAGESCOPE_KEEP_ROW_STEPS for later steps, or pin them",
            )
        measured = sorted({part.stage for part in parts if part.summary.pair in MISMATCH_PAIRS})
        if measured:
            beside = {part.stage for part in parts if part.summary.pair[0] == "current"}
            of_update = stage in beside
            return NotFound(
                f"nothing of step {version.step} was measured there",
                expected=f"a stage of {', '.join(measured)}",
                advice=f"{stage} has no log-probs of the rollout beside its own: the doctor "
                "compares these with the old ones (current_differs), and findings count those that "
                "are not finite"
                if of_update
                else "",
                see=self._see(version)[-1:] if of_update else (),
            )
        rows = self._catalogue.payloads(version.attempt_id, version.step, limit=_PAYLOADS_DESCRIBED)
        recorded = _recorded_tensors(rows)
        names = {name for each in recorded.values() for name in each}
        misspellings = dict(pair for each in recorded.values() for pair in misspelt(each))
        states = self._catalogue.payload_states([version.attempt_id], [version.step])
        reason = missing_payloads(states)
        if not reason and all(names & tensors for tensors in _TENSORS_OF_SIDES):
            reason = "both streams were handed over, by different payloads, and are not joined"
        reason = reason or "no rank has handed over both streams"
        for name, why in _left_out(rows).items():
            reason += f"; {name} is left out: {why}"
        described = "; ".join(
            f"in {stage}: {', '.join(sorted(each)[:_NAMES_LISTED]) or 'no tensor'}"
            for stage, each in sorted(recorded.items())
        )
        hints = [f"{name} seems to mean {meant}" for name, meant in misspellings.items()]
        attempt = self._catalogue.attempt(version.attempt_id)
        newest = self._newest_measured(attempt)
        if newest is not None and newest != version.step:
            hints.append(f"`measured` names the newest step with numbers: {newest}")
        yet = "" if attempt is None or attempt["ended_wall"] is not None else " (yet)"
        return NotMeasured(
            f"step {version.step} has no numbers{yet}: {reason}; "
            + (f"it recorded {described}" if described else "it recorded no tensor"),
            expected="rollout_log_probs and old_log_probs (or log_probs) with response_mask",
            advice="; ".join(hints),
            see=self._see(version),
        )

    def _newest_measured(self, attempt: ListedAttempt | None) -> int | None:
        """Return the newest step with numbers of an attempt's run, as `measured` names it."""
        if attempt is None:
            return None
        rows = self._catalogue.steps(run=attempt["run"], superseded=False, measured=True, limit=1)
        return rows[0]["step"] if rows else None

    def _see(self, version: StepVersion) -> list[Link]:
        links = (
            Link.to_step("stages", version.step, shows="who has arrived"),
            Link("losses", shows="what was lost"),
            Link("findings", shows="what was refused or not joined"),
        )
        attempt = self._catalogue.attempt(version.attempt_id)
        if attempt is None:
            return list(links)
        return [link.within(attempt["run"], attempt["number"]) for link in links]


_TENSORS_OF_SIDES: Final = (
    {STREAM_TENSORS["rollout"]},
    {STREAM_TENSORS["old"], STREAM_TENSORS["current"]},
)
"""Tensors of the rollout's streams, and of the trainer's."""
_PAYLOADS_DESCRIBED: Final = 200
_NAMES_LISTED: Final = 20
_PAYLOADS_ASKED: Final = 1000
"""Payloads of a step that are searched for the attributes of its streams."""
_STREAM_KEYS = ("attempt_id", "stream", "role", "stage")


def _recorded_tensors(payloads: Iterable[PayloadRow]) -> dict[str, list[str]]:
    """Return stage -> names of the tensors that were recorded in it, in the order of recording."""
    by_stage: dict[str, dict[str, None]] = {}
    for row in payloads:
        names = by_stage.setdefault(row["stage"], {})
        names.update(dict.fromkeys(map(str, row["tensors"] or ())))
    return {stage: list(names) for stage, names in by_stage.items()}


def _left_out(payloads: Iterable[PayloadRow]) -> dict[str, str]:
    """Return stream's tensor -> why it was left out, as its trainer or its dump says."""
    found: dict[str, str] = {}
    for row in payloads:
        named = (row["meta"] or {}).get("left_out")
        if isinstance(named, Mapping):
            streams = [*STREAM_TENSORS.values()]
            found |= {name: f"{named[name]:.300}" for name in streams if name in named}
    return found


def _of_summary_stage(parts: Sequence[PartRecord]) -> list[PartRecord]:
    """Return the parts of the stage that the step summary is taken from."""
    stages = {part.stage for part in parts if part.summary.pair in MISMATCH_PAIRS}
    preferred = [*(name for name in STEP_SUMMARY_STAGES if name in stages), *sorted(stages)]
    return [part for part in parts if part.stage == preferred[0]] if preferred else list(parts)


def _matching(
    parts: Sequence[PartRecord], name: str, value: str | int, step: int
) -> list[PartRecord]:
    """Return the parts whose attribute `name` is `value`.

    Raises:
        NotFound: there is none; names the values that exist.
    """
    matching = [part for part in parts if getattr(part, name) == value]
    if matching or not parts:
        return matching
    values = sorted({getattr(part, name) for part in parts})
    raise NotFound(
        f"nothing of {name} {value!r:.100} was measured in step {step}",
        expected=f"one of {', '.join(map(str, values[:20]))}",
    )


def _said(metas: Sequence[Mapping[str, Json]], stream: str) -> dict[str, list[Json]]:
    """Return the attributes of a stream, each with its values, that payloads say."""
    found: dict[str, list[Json]] = {}
    for meta in metas:
        for field, value in stream_attributes(meta, stream).items():
            values = found.setdefault(field, [])
            if value not in values:
                values.append(value)
    return found
