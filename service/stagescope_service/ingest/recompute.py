"""Reads payloads from the ring again: without tokens that count elsewhere, or joined.

No Ray in here: data of other nodes is passed as arguments.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypedDict

from stagescope_service.core.instructions import PayloadJob, PayloadKey, StepJob
from stagescope_service.ingest.non_finite import (
    NonFiniteCounts,
    Skips,
    log_prob_rows,
    summarise_once,
)
from stagescope_service.ingest.reader import (
    COPIES,
    PayloadReader,
    ring_key,
    statistics_settings,
    summary_rows,
)
from stagescope_service.ingest.rollout_join import (
    Joined,
    RolloutRows,
    join,
    rollout_rows,
    skip_rows,
    stream_of,
)
from stagescope_service.statistics import TokenBatch, WireTensor, skip_of, summarise
from stagescope_service.statistics.codec import summary_to_bytes
from stagescope_service.statistics.summary import Summary
from stagescope_service.statistics.token_batch import PROCESS
from stagescope_service.store.contract import Put
from stagescope_service.store.parts import pair_name, part_key
from stagescope_service.store.ring import Pinned, RingKey
from stagescope_wire.errors import InvalidTensor, StagescopeError
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.policy_versions import VERSION_NAMES
from stagescope_wire.tensors import STREAM_TENSORS

_LEFT_OUT: Final = "left_out_rows"
_JOINED: Final = "joined_tensors"


class Source(NamedTuple):
    """A rollout's payload in some node's ring; `age` orders the rollouts of one sample."""

    node_id: str | None
    incarnation: str
    seq: int
    attempt_id: int
    step: int | None
    age: tuple[int, int]


class JoinAnswer(TypedDict):
    """The outcome of joining a trainer's payload with rollouts."""

    rows: list[Put]
    """For the catalogue."""
    left_out: dict[str, list[str]]
    """Reason -> samples whose tokens do not count."""
    tokens: dict[str, int]
    """Reason -> number of those tokens, if no row counts."""
    used: list[tuple[int, int]]
    """Ages of the rollouts with samples of it."""


class Recomputer:
    """An ingestor's work on payloads that it has read before."""

    def __init__(self, intake: PayloadReader) -> None:
        self._ring = intake.ring
        self._intake = intake

    def recompute(
        self, key: PayloadKey, job: StepJob, pair: tuple[str, str],
        skips: Sequence[tuple[int, int, int]],
    ) -> bytes:  # fmt: skip
        """Recompute a payload's statistics, without tokens that count elsewhere.

        Raises:
            NotFound: the ring no longer holds it.
        """
        kept = self._ring.read(ring_key(key, job))
        strings, meta = kept.metadata["strings"], kept.metadata["meta"]
        batch = TokenBatch.from_tensors(kept.tensors, strings, meta, pair=pair)
        left_out = kept.metadata.get(_LEFT_OUT, [])
        copies = kept.metadata.get(COPIES, {}).get(pair_name(pair), ())
        skip = skip_of(batch, [*skips, *copies]) | skip_rows(batch, left_out)
        settings = kept.metadata["settings"]
        summary = summarise(batch, statistics_settings(settings), skip=skip, name=part_key(*key))
        return summary_to_bytes(_without_unknown(summary, batch, left_out))

    def pin(self, attempt_id: int, step: int) -> Pinned:
        """Pin the payloads of a step."""
        return self._ring.pin_step(attempt_id, step)

    def unpin(self, attempt_id: int, step: int) -> bool:
        """Unpin the payloads of a step; return whether that worked."""
        try:
            self._ring.unpin_step(attempt_id, step)
        except OSError:
            return False
        return True

    def samples(self, key: PayloadKey, job: StepJob) -> list[str]:
        """Return the sample ids of a payload.

        Raises:
            NotFound: the ring no longer holds it.
        """
        kept = self._ring.read(ring_key(key, job))
        return [str(sample) for sample in kept.metadata["strings"].get("sample_ids", ())]

    def rollouts(self, sources: Iterable[Source], wanted: Collection[str]) -> list[RolloutRows]:
        """Return the rows of requested samples in these payloads, if the ring holds them."""
        found: list[RolloutRows] = []
        names = set(wanted)
        for source in sources:
            key = RingKey(source.attempt_id, source.step, source.incarnation, source.seq)
            try:
                kept = self._ring.read(key)
                strings, meta = kept.metadata["strings"], kept.metadata["meta"]
                rows = rollout_rows(kept.tensors, strings, meta, names, source.age)
            except StagescopeError:
                continue  # its samples stay without a rollout, which the answer reports
            if rows is not None:
                found.append(dataclasses.replace(rows, incarnation=source.incarnation))
        return found

    def join(self, key: PayloadKey, job: PayloadJob, found: Sequence[RolloutRows]) -> JoinAnswer:
        """Add the rollout's stream to a trainer's payload, and compute its statistics.

        Raises:
            NotFound: the ring no longer holds it.
            InvalidTensor: its tensors do not fit.
        """
        kept = self._ring.read(ring_key(key, job))
        added = kept.metadata.get(_JOINED, [])
        tensors = {name: t for name, t in kept.tensors.items() if name not in added}
        stream = next((s for s in ("old", "current") if STREAM_TENSORS[s] in tensors), None)
        if stream is None:
            raise InvalidTensor(
                "the payload has neither old_log_probs nor log_probs", expected="one"
            )
        batch = stream_of(tensors, kept.metadata["strings"], kept.metadata["meta"], stream)
        joined = join(batch, found, split=(job.get("cp_size") or 1) > 1)
        producers = producers_of(key.incarnation, batch.producers[0], found)
        joined = dataclasses.replace(
            joined, batch=dataclasses.replace(joined.batch, producers=producers)
        )
        left_out: dict[str, list[str]] = {}
        for row, why in joined.why.items():
            sample = batch.sample_ids[row] if batch.sample_ids else ""
            left_out.setdefault(why, []).append(sample)
        tokens = joined.tokens_left_out
        used = sorted({rows.age for rows in found})
        answer: JoinAnswer = {"rows": [], "left_out": left_out, "tokens": tokens, "used": used}
        if len(joined.left_out) < batch.rows:
            settings = statistics_settings(kept.metadata["settings"])
            once = summarise_once(joined.batch, settings, key, joined.skip)
            self._keep(key, job, kept.metadata, tensors, joined, once.copies)
            summary = _without_unknown(once.summary, joined.batch, joined.left_out)
            every = dict(Counter(tokens) + Counter(summary.left_out))
            summary = dataclasses.replace(summary, left_out=every)
            counts = NonFiniteCounts(tensors)
            counts.add(summary, ["rollout"])  # rows without a rollout count in the others
            answer["rows"] = [*summary_rows(key, job, summary), *log_prob_rows(job, counts)]
            answer["tokens"] = {}
        return answer

    def _keep(
        self,
        key: PayloadKey,
        job: StepJob,
        metadata: JsonObject,
        tensors: Mapping[str, WireTensor],
        joined: Joined,
        copies: Skips,
    ) -> None:
        """Store the joined stream beside the others, for later readers."""
        batch = joined.batch
        _, shape, _, offsets = tensors[STREAM_TENSORS[batch.pair[0]]]
        added: dict[str, WireTensor] = {
            STREAM_TENSORS["rollout"]: (batch.q_dtype, shape, batch.q.reshape(shape), offsets)
        }
        if batch.versions is not None and "versions" not in tensors:
            added["versions"] = ("int64", shape, batch.versions.reshape(shape), offsets)
        meta = dict(metadata["meta"])
        if batch.version_names:
            meta[VERSION_NAMES] = {str(code): text for code, text in batch.version_names.items()}
        if None not in batch.producers:
            known = dict(zip(batch.pair, batch.producers, strict=True))
            meta["producers"] = {**(meta.get("producers") or {}), **known}
        added_to = {"meta": meta, _JOINED: list(added), _LEFT_OUT: list(joined.left_out)}
        every = {**metadata.get(COPIES, {}), pair_name(batch.pair): copies}
        about = {**metadata, **added_to, COPIES: every}
        self._ring.keep(ring_key(key, job), {**tensors, **added}, about)


def producers_of(
    incarnation: str, trainer: str | None, found: Sequence[RolloutRows]
) -> tuple[str | None, str | None]:
    """Return the producers of p and q of a joined payload.

    If neither side names its producer, the two processes are two producers. If only one side does,
    it may be the other one under another name: then the producers are unknown.
    """
    producers = {rows.producer for rows in found}
    if trainer is None and producers <= {None}:
        others = {rows.incarnation for rows in found}
        if not others or incarnation in others:
            return None, None
        return f"{PROCESS}{incarnation}", ", ".join(f"{PROCESS}{name}" for name in sorted(others))
    names = sorted(name for name in producers if name is not None)
    if trainer is None or len(names) < len(producers) or not names:
        return None, None
    return trainer, trainer if trainer in names else ", ".join(names)


def _without_unknown(summary: Summary, batch: TokenBatch, left_out: Sequence[int]) -> Summary:
    """Return a summary that does not count left-out rows as empty."""
    out = {batch.sample_ids[row] for row in left_out} if batch.sample_ids else set()
    empty = tuple(sample for sample in summary.empty_samples if sample not in out)
    return dataclasses.replace(summary, empty_samples=empty)
