"""Reads one payload: statistics, ring, kept files, and rows for the catalogue.

No Ray in here: the ingestor passes values that it has fetched. A payload that cannot be used is
refused with a reason; the usable parts are kept all the same.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stagescope_service.core.catalogue_rows import text
from stagescope_service.core.findings import finding, of_job
from stagescope_service.core.instructions import IngestJob, PayloadJob, PayloadKey, StepJob
from stagescope_service.core.stream_attributes import stream_attributes
from stagescope_service.ingest.kept_files import Keeper, artifact_row, plain_job, work_of
from stagescope_service.ingest.non_finite import (
    CountedOnce,
    NonFiniteCounts,
    Skips,
    log_prob_rows,
    summarise_once,
    value_rows,
)
from stagescope_service.rows.positions import POSITION_TENSORS
from stagescope_service.rows.ragged import count_by_row, hash_rows, row_of_each
from stagescope_service.statistics import (
    StatisticsSettings,
    TokenBatch,
    WireTensor,
    available_pairs,
    update_pair,
)
from stagescope_service.statistics.codec import summary_to_bytes
from stagescope_service.statistics.payload import Payload, read_value
from stagescope_service.statistics.step_summary import REPEATED
from stagescope_service.statistics.summarise import MAX_ROUNDS
from stagescope_service.statistics.summary import Summary
from stagescope_service.store.contract import Put
from stagescope_service.store.parts import pair_name
from stagescope_service.store.queries.rollouts import TRAINER_STAGES
from stagescope_service.store.ring import Ring, RingKey
from stagescope_wire.errors import InvalidInput, InvalidTensor, StagescopeError
from stagescope_wire.names import MAX_ID
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.render import counted
from stagescope_wire.tensors import (
    RECENT_TENSORS,
    ROUTES_REFUSED,
    STREAM_TENSORS,
    WRITTEN_AFTER_HAND_OVER,
)

"""(row, first position, last) of tokens, half open."""

COPIES: Final = "copies"
"""In a ring file's metadata: pair of streams -> `Skips` of rows that repeat others of it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a payload: its final state, the reason, and its rows."""

    state: str
    reason: str | None
    rows: list[Put]
    columns: JsonObject


class PayloadReader:
    """Reads payloads on one node; one at a time."""

    def __init__(
        self, data_dir: Path, node_id: str, ring: Ring, keeper: Keeper | None = None
    ) -> None:
        self.node_id = node_id
        self.ring = ring
        self.keeper = keeper or Keeper(data_dir, node_id)

    def read(self, key: PayloadKey, job: IngestJob, value: object) -> Outcome:
        """Read a payload.

        Args:
            key: its delivery identity.
            job: run, attempt, work, rank, layout and settings, from the coordinator.
            value: the payload of a probe or a raw caller.
        """
        rows: list[Put] = []
        try:
            payload = read_value(value)
        except StagescopeError as error:
            return Outcome("refused", str(error), [self._refusal(job, error)], {})
        problems: list[StagescopeError] = []
        known: list[StagescopeError] = []
        digest = None
        copies: dict[str, Skips] = {}
        differing: tuple[str, ...] = ()
        repeated: CountedOnce | None = None
        counts = NonFiniteCounts(payload.tensors)
        for once in self._summaries(key, job, payload, problems, known):
            rows += summary_rows(key, job, once.summary)
            counts.add(once.summary)
            digest = digest or once.summary.digest
            if once.copies:
                copies[pair_name(once.summary.pair)] = once.copies
                repeated = repeated or once
            differing = differing or once.differing
        if differing:
            rows.append(_differing_rows(job, differing))
        elif repeated is not None:
            rows.append(_repeated_rows(job, repeated))
        for summary in self._update_summaries(key, job, payload):
            rows.append(summary_row(key, job, summary))
            counts.add(summary)
        rows += [*log_prob_rows(job, counts), *value_rows(job, counts)]
        rows += self._keep(key, job, payload, copies)
        rows += _stream_rows(job, payload)
        rows += sample_rows(job, payload)
        rows += _written_rows(job, payload)
        rows += [self._refusal(job, error) for error in problems if error not in known]
        columns = {"digest": digest, "bytes": payload.nbytes, "node_id": self.node_id}
        wrong = next((error for error in problems if isinstance(error, InvalidTensor)), None)
        if wrong is not None and digest is None:
            return Outcome("refused", str(wrong), rows, columns)
        return Outcome("ingested", None, rows, columns)

    def _summaries(
        self,
        key: PayloadKey,
        job: IngestJob,
        payload: Payload,
        problems: list[StagescopeError],
        known: list[StagescopeError],
    ) -> Iterator[CountedOnce]:
        """Yield the batches to read; problems are added to `problems`.

        Problems of shapes and dtypes that a probe has reported itself are added to `known` as well.
        """
        meta = _with_producers(job, payload.meta)
        for pair in available_pairs(payload.tensors):
            try:
                settings = statistics_settings(job.get("settings"))
                try:
                    batch = TokenBatch.from_tensors(
                        payload.tensors, payload.strings, meta, pair=pair
                    )
                except InvalidTensor as error:
                    known += [error] if job.get("reported") else []
                    raise
                problems += [each for each in batch.problems if each not in problems]
                yield summarise_once(batch, settings, key)
            except StagescopeError as error:  # noqa: PERF203 - the other pairs stand
                problems.append(error)

    def _update_summaries(
        self, key: PayloadKey, job: IngestJob, payload: Payload
    ) -> Iterator[Summary]:
        """Yield the summary of current against old log-probs of a first mini-batch.

        If only the current ones are recorded, it is the summary of their sums. Problems of one
        stream belong to another pair, or to none.
        """
        pair = None
        if not (job["occurrence"] or job["epoch"] or job["minibatch"]):
            pair = update_pair(payload.tensors, payload.strings)
        if pair is None:
            return
        try:
            meta = _with_producers(job, payload.meta)
            batch = TokenBatch.from_tensors(payload.tensors, payload.strings, meta, pair=pair)
            once = summarise_once(batch, statistics_settings(job.get("settings")), key)
        except StagescopeError:
            return
        yield once.summary

    def _keep(
        self, key: PayloadKey, job: IngestJob, payload: Payload, copies: Mapping[str, Skips]
    ) -> Iterator[Put]:
        recent = {name: t for name, t in payload.tensors.items() if name in RECENT_TENSORS}
        if recent:
            about = {
                "strings": payload.strings,
                "meta": _with_producers(job, payload.meta),
                "settings": dict(job.get("settings") or {}),
                "job": plain_job(key, job, "settings"),  # a file names its own attempt and work
                COPIES: dict(copies),
            }
            entry = self.ring.keep(ring_key(key, job), recent, about)
            if entry is not None:
                yield artifact_row(key, job, "ring", self.node_id, entry.path, entry.bytes)
            elif self.ring.max_bytes:
                yield finding(
                    "ring_keeps_nothing",
                    f"the tensors of the last steps are not kept: {self.ring.health().reason}",
                    run=job["run"],
                    attempt_id=job["attempt_id"],
                    wall=time.time(),
                    evidence={"node_id": self.node_id, "not_kept": self.ring.not_kept},
                    advice="statistics are complete; tensors of these steps cannot be read later",
                )
        for entry in self.ring.take_unpinned():
            yield finding(
                "pin_not_kept",
                f"a payload of {entry.bytes} bytes of a pinned step is not pinned: pinned payloads "
                "already fill their share of the ring",
                run=job["run"],
                attempt_id=entry.key.attempt_id,
                step=entry.key.step,
                stage=job["stage"],
                role=job["role"],
                rank=job["rank"],
                wall=time.time(),
                evidence={"node_id": self.node_id, "share": self.ring.max_pinned},
                advice="unpin steps (stagescope unpin STEP), or raise STAGESCOPE_RING_BYTES",
            )
        for taken in self.ring.take_taken_over():
            name = f"ring/{taken.key.incarnation}/{taken.key.seq}"
            yield Put("artifacts", {"artifact_id": name, "node_id": self.node_id})
        for evicted in self.ring.take_evicted():
            name = f"ring/{evicted.key.incarnation}/{evicted.key.seq}"
            yield Put("artifacts", {"artifact_id": name, "deleted_wall": time.time()})
        yield from self.keeper.keep(key, job, payload)

    def _refusal(self, job: IngestJob, error: StagescopeError) -> Put:
        return finding(
            f"payload_{error.code}",
            str(error),
            **of_job(job, time.time()),
            severity="error",
            advice=error.advice or "the stage counts as done, without the numbers of this payload",
            see=error.see,
        )


def _with_producers(job: IngestJob, meta: JsonObject) -> dict[str, Json]:
    """Return a payload's metadata, with the producers of streams from the run's settings."""
    settings = job.get("settings")
    producers = settings.get("producers") if isinstance(settings, Mapping) else None
    known = {"producers": producers} if isinstance(producers, Mapping) else {}
    return {"policy_version": job.get("policy_version"), **known, **meta}


def summary_row(key: PayloadKey, job: PayloadJob, summary: Summary) -> Put:
    """Return the row of a payload's summary of one pair."""
    own = {**key._asdict(), "pair": pair_name(summary.pair), "data_rank": job["data_rank"]}
    return Put("summaries", {**work_of(job), **own, "summary": summary_to_bytes(summary)})


def summary_rows(key: PayloadKey, job: PayloadJob, summary: Summary) -> Iterator[Put]:
    """Return the row of a payload's summary of one pair, and the finding of ignored tensors."""
    yield summary_row(key, job, summary)
    if summary.ignored:
        ignored = ", ".join(summary.ignored)
        yield finding(
            "too_many_rounds",
            f"{ignored} of {pair_name(summary.pair)} distinguish more than {MAX_ROUNDS} rounds, "
            "turns or versions, or name a round below 0: rounds are counted by the mask"
            + (f", from {MAX_ROUNDS} on as one" if "response_mask" in summary.ignored else ""),
            **of_job(job, time.time()),
            evidence={"tensors": list(summary.ignored), "most": MAX_ROUNDS},
            advice="count round_ids and turn_ids from 0 in each sample. All tokens still count",
        )


def _differing_rows(job: PayloadJob, samples: Sequence[str]) -> Put:
    """Return the finding of samples that are in several rows of a payload and differ there."""
    named = ", ".join(repr(sample[:60]) for sample in samples[:_NAMED])
    named += ", ..." if len(samples) > _NAMED else ""
    return finding(
        "rows_differ",
        f"{len(samples)} sample ids occur in several rows of one payload whose log-probs or masks "
        f"differ ({named}): the last row of each counts",
        **of_job(job, time.time()),
        evidence={"samples": list(samples[:_LISTED])},
        advice="give each row a sample_id of its own; the id of a prompt belongs in group_ids",
    )


def _repeated_rows(job: PayloadJob, once: CountedOnce) -> Put:
    """Return the finding of rows of a payload that repeat another one under the same sample id."""
    rows = len({row for row, _, _ in once.copies})
    tokens = once.summary.left_out[REPEATED]
    return finding(
        "rows_repeated",
        f"of {counted(rows, 'row')} the same payload has a copy under the same sample id: "
        f"{counted(tokens, 'token')} are left out as repeated, and "
        f"{once.summary.total.masked} of the payload are left",
        **of_job(job, time.time()),
        severity="info",
        evidence={"rows": rows, "tokens": tokens},
        advice="nothing, if the rows fill up a batch. Else find out why samples are handed over "
        "twice: the others may be missing",
    )


def statistics_settings(settings: object) -> StatisticsSettings:
    """Return the settings of a run that the statistics depend on.

    If verl has no such rollout_is or threshold, the weights are computed without settings. The
    finding `refused_setting` says so, and no number is lost.
    """
    try:
        return StatisticsSettings.of_run(settings if isinstance(settings, Mapping) else {})
    except InvalidInput:
        return StatisticsSettings()


def ring_key(key: PayloadKey, job: StepJob) -> RingKey:
    """Return the key of a payload in the ring."""
    return RingKey(job["attempt_id"], job["step"], key.incarnation, key.seq)


def _written_rows(job: IngestJob, payload: Payload) -> Iterator[Put]:
    """Return the findings of tensors that are missing because their owner overwrote them, and of
    routes that could not be counted."""
    refused = payload.meta.get(ROUTES_REFUSED)
    if refused and not job.get("reported"):
        yield finding(
            "routes_refused",
            f"the routes of experts are not compared: {refused!s:.1000}",
            **of_job(job, time.time()),
            advice="all other numbers count. docs/routing.md has the shapes of routes",
        )
    written = payload.meta.get(WRITTEN_AFTER_HAND_OVER)
    if written:
        yield finding(
            "tensor_written",
            f"tensors were written after they were handed over: {', '.join(map(str, written))}",
            **of_job(job, time.time()),
            severity="error",
            advice="give them to `stage.record`, which copies, or write other tensors",
        )


def _stream_rows(job: IngestJob, payload: Payload) -> Iterator[Put]:
    """Return the row of each stream: its source, dtype and producer."""
    for stream, name in STREAM_TENSORS.items():
        tensor = payload.tensors.get(name)
        if tensor is None and stream == "ref":
            tensor = payload.tensors.get("ref_log_prob")
        if tensor is None:
            continue
        row: dict[str, Json] = {
            "attempt_id": job["attempt_id"],
            "stream": stream,
            "role": job["role"],
            "stage": job["stage"],
            "dtype": tensor[0],
        }
        row |= stream_attributes(_with_producers(job, payload.meta), stream)
        yield Put("streams", row)


MAX_SAMPLES: Final = 20_000
"""Samples of a payload with rows of their own; the statistics include all samples."""
_UPDATE: Final = "actor_update"
_NAMED: Final = 3
_LISTED: Final = 100
"""Samples named in a message, and listed as evidence."""
_OF_PIECES: Final = POSITION_TENSORS | {"round_offset"}
"""Tensors of payloads whose rows may be pieces of samples."""


def sample_rows(job: IngestJob, payload: Payload) -> Iterator[Put]:
    """Return the rows of a payload's samples, without the columns that the payload lacks."""
    ids = payload.strings.get("sample_ids")
    if not ids:
        return
    step, version = job.get("step"), job.get("policy_version")
    clock = f"s{step}" if step is not None else f"v{version}"
    groups = payload.strings.get("group_ids") or []
    prompts = payload.strings.get("prompt_hashes") or []
    rewards = _per_row(payload.tensors.get("rewards"), len(ids))
    hashes, rounds = None, None
    if not _is_of_loss(job, payload):
        hashes = _token_hashes(payload, len(ids))
        rounds = _round_counts(payload, len(ids))
    meta = payload.meta
    for row, uid in enumerate(ids[:MAX_SAMPLES]):
        columns: dict[str, Json] = {
            "attempt_id": job["attempt_id"],
            "clock": clock,
            "sample_uid": uid,
            "step": step,
            "policy_version": version,
        }
        if step is not None and job["stage"] in TRAINER_STAGES:
            columns["consumed_step"] = step
        if row < len(groups):
            columns["group_id"] = groups[row]
        if row < len(prompts):
            columns["prompt_hash"] = prompts[row]
        if rewards is not None:
            columns["reward"] = float(rewards[row])
        if hashes is not None:
            columns["tokens_hash"], columns["tokens"] = hashes[row]
        if rounds is not None:
            columns["rounds"] = rounds[row]
        for name in ("split", "data_source"):
            value = meta.get(name)
            if isinstance(value, str):
                columns[name] = text(value, MAX_ID)
            elif isinstance(value, list) and row < len(value):
                columns[name] = text(value[row], MAX_ID)
        yield Put("samples", columns)


def _is_of_loss(job: IngestJob, payload: Payload) -> bool:
    """Return whether the mask may be that of a loss: it leaves out tokens that were sampled."""
    return job["stage"] == _UPDATE and STREAM_TENSORS["rollout"] not in payload.tensors


def _per_row(tensor: WireTensor | None, rows: int) -> npt.NDArray[Any] | None:
    if tensor is None or tensor[0] == "bfloat16" or tensor[2].size != rows:
        return None
    return tensor[2].reshape(-1)


def _token_hashes(payload: Payload, rows: int) -> list[tuple[str, int]] | None:
    """Return (hash, count) of each row's model tokens; samples are paired across runs by them."""
    responses = payload.tensors.get("responses")
    mask = payload.tensors.get("response_mask")
    if responses is None or mask is None or responses[2].size != mask[2].size:
        return None
    if (offsets := _row_offsets(payload, "responses", rows)) is None:
        return None
    tokens = responses[2].reshape(-1).astype(np.int64, copy=False)
    on = mask[2].reshape(-1) != 0
    hashes, counts = hash_rows(tokens, offsets, on), count_by_row(on, offsets)
    return list(zip(hashes, counts.tolist(), strict=True))


def _round_counts(payload: Payload, rows: int) -> list[int] | None:
    """Return the number of rounds of each row; None if rows may be pieces of samples."""
    mask, ids = payload.tensors.get("response_mask"), payload.tensors.get("round_ids")
    if mask is None or not _OF_PIECES.isdisjoint(payload.tensors):
        return None
    if (offsets := _row_offsets(payload, "response_mask", rows)) is None:
        return None
    on = mask[2].reshape(-1) != 0
    if ids is None:
        begins = on.copy()
        begins[1:] &= ~on[:-1]
        first = offsets[:-1][offsets[:-1] < len(on)]
        begins[first] = on[first]  # the row before may end with a model token
        counts: list[int] = count_by_row(begins, offsets).tolist()
        return counts
    if ids[2].size != len(on):
        return None
    row = row_of_each(offsets)[on]
    distinct = np.unique(np.stack([row, ids[2].reshape(-1)[on]], axis=1), axis=0)
    counts = np.bincount(distinct[:, 0], minlength=rows).tolist()
    return counts


def _row_offsets(payload: Payload, name: str, rows: int) -> npt.NDArray[np.int64] | None:
    """Return int64 [rows + 1], where rows begin in a tensor; None if it has other rows."""
    _, shape, values, offsets = payload.tensors[name]
    packed = payload.tensors.get("cu_seqlens")
    if offsets is None and packed is not None and shape in ((values.size,), (1, values.size)):
        offsets = packed[2].reshape(-1).astype(np.int64, copy=False)
    elif offsets is None and len(shape) == 2:
        offsets = np.arange(rows + 1, dtype=np.int64) * shape[1]
    if offsets is None or len(offsets) != rows + 1 or (np.diff(offsets, prepend=0) < 0).any():
        return None
    return offsets if offsets[0] == 0 and offsets[-1] == values.size else None
