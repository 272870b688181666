"""A simulated training of tp2 · pp2 · cp2 (zigzag) · dp2 ranks beside a rollout job of its own.

Nothing of the service is used to make it: samples are made token by token, cut as the layout says,
and handed over as a probe would. `Training.unsplit` is the same data in one batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from tests.support.measure import Handed

from stagescope_service.statistics import TokenBatch, WireTensor
from stagescope_wire.schema import BEGIN, END, FINISH, HELLO, Event, Part, Sender
from stagescope_wire.tensorfile import Array

TP, PP, CP, DP = 2, 2, 2, 2
ROWS_OF_A_MICROBATCH = 3


@dataclasses.dataclass
class Sample:
    """One trajectory: arrays over its tokens, environment's ones too."""

    uid: str
    mask: Array
    ids: Array
    old: Array
    rollout: Array
    rounds: Array
    turns: Array
    versions: Array

    def __len__(self) -> int:
        return len(self.mask)


class Span(NamedTuple):
    """Tokens of a sample that one rank (or one rollout) holds."""

    sample: Sample
    at: Array


class Reported(NamedTuple):
    """One event, with what is handed over with it."""

    sender: Sender
    event: Event
    payload: Handed | None


def make_samples(seed: int, count: int, version: int, prefix: str) -> list[Sample]:
    """Make samples of several rounds; some went on under later versions (partial rollouts)."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        pieces = [int(n) for n in rng.integers(1, 14, 2 * int(rng.integers(1, 4)))]
        mask = np.concatenate([np.full(n, 1 - i % 2) for i, n in enumerate(pieces)])
        size = len(mask)
        rollout = -rng.exponential(1.0, size)
        cuts = np.sort(rng.integers(0, size, 2)) if number % 2 else np.array([size, size])
        age = 2 - np.searchsorted(cuts, np.arange(size), side="right")
        whole = np.full(size, rng.integers(0, 3))
        made.append(
            Sample(
                uid=f"{prefix}/{number}",
                mask=mask.astype(np.int64),
                ids=rng.integers(0, 50_000, size),
                old=np.minimum(rollout + rng.normal(0.0, 0.1, size), -1e-4).astype(np.float32),
                rollout=rollout.astype(np.float32),
                rounds=np.where(mask == 1, _rounds(mask), 0),
                turns=np.where(mask == 1, 2 * _rounds(mask), 0),
                versions=version - (age if number % 2 else whole),
            )
        )
    return made


def _rounds(mask: Array) -> Array:
    starts = np.diff(mask, prepend=0) == 1
    return np.cumsum(starts) - 1


def zigzag(size: int, rank: int) -> Array:
    """Return the positions that a context-parallel rank holds: one early and one late chunk."""
    chunk = -(-size // (2 * CP))
    late = 2 * CP - 1 - rank
    every = np.arange(size)
    early_one = (every >= rank * chunk) & (every < (rank + 1) * chunk)
    late_one = (every >= late * chunk) & (every < (late + 1) * chunk)
    return np.flatnonzero(early_one | late_one)


def ragged(arrays: Sequence[Array], tag: str | None = None) -> WireTensor:
    """Return rows of different lengths as they travel."""
    packed = np.concatenate(arrays) if arrays else np.empty(0)
    offsets = np.cumsum([0, *(len(array) for array in arrays)]).astype(np.int64)
    return tag or packed.dtype.name, packed.shape, packed, offsets


def payload_of(
    spans: Sequence[Span], *, streams: Sequence[str], version: int, **extra: WireTensor
) -> Handed:
    """Return the payload that holds these spans."""
    fields = {
        "old_log_probs": "old", "log_probs": "old", "rollout_log_probs": "rollout",
        "response_mask": "mask", "responses": "ids", "positions": "", "round_ids": "rounds",
        "turn_ids": "turns", "versions": "versions",
    }  # fmt: skip
    tensors = {name: ragged([_values(span, fields[name]) for span in spans]) for name in streams}
    strings = {"sample_ids": [span.sample.uid for span in spans]}
    meta: dict[str, object] = {"policy_version": version}
    return {"schema": 1, "tensors": {**tensors, **extra}, "strings": strings, "meta": meta}


def _values(span: Span, field: str) -> Array:
    values: Array = getattr(span.sample, field)[span.at] if field else span.at
    return values


def whole_batch(samples: Sequence[Sample], version: int) -> TokenBatch:
    """Return all samples in one batch, unsplit."""
    spans = [Span(sample, np.arange(len(sample))) for sample in samples]
    names = ("old_log_probs", "rollout_log_probs", "response_mask", "responses", "versions")
    payload = payload_of(spans, streams=(*names, "turn_ids"), version=version)
    return TokenBatch.from_tensors(payload["tensors"], payload["strings"], payload["meta"])


class Process:
    """One process, as its probe would speak."""

    def __init__(
        self, role: str, rank: int, key: str, node: str, run: str = "moe", **hello: Any
    ) -> None:
        self.layout: dict[str, int] = hello.get("layout", {})
        self.role, self.rank = role, rank
        self.hello = hello
        self.sender = Sender(f"{key}-{role}-{rank}", run, key, role, rank, node, started=1000.0)
        self._seq = itertools.count(1)
        self._clock = 1000.0

    def say(self, kind: str, payload: Handed | None = None, **fields: object) -> Reported:
        """Return the next event."""
        self._clock += 0.25
        if payload is not None:
            tensors = {name: [t[0], list(t[1]), None] for name, t in payload["tensors"].items()}
            size = sum(t[2].nbytes for t in payload["tensors"].values())
            fields["payload"] = {"tensors": tensors, "bytes": size, "meta": payload["meta"]}
        event = Event(kind, next(self._seq), self._clock, self._clock - 900.0, fields)
        return Reported(self.sender, event, payload)

    def greet(self) -> Reported:
        """Say hello."""
        return self.say(HELLO, **self.hello)

    def stage(self, stage: str, payload: Handed | None, **work: Any) -> list[Reported]:
        """Begin and end a stage."""
        begun = self.say(BEGIN, stage=stage, **work)
        return [begun, self.say(END, payload, stage=stage, status="ok", **work)]

    def leave(self) -> Reported:
        """Take leave."""
        return self.say(FINISH)


class Training:
    """16 trainer ranks on one node, two rollout workers on another.

    Args:
        trainer_has_rollout: the trainer hands over both streams; else only the rollout job does.
        rollout_key: the attempt key of the rollout job; the trainer's is "job-1".
        perturbed: the rank whose old_log_probs are wrong.
        nodes: the trainer's node and the rollout workers'.
    """

    def __init__(
        self,
        *,
        trainer_has_rollout: bool = True,
        rollout_key: str = "job-1",
        perturbed: int | None = None,
        nodes: tuple[str, str] = ("node-a", "node-b"),
    ) -> None:
        self.trainer_has_rollout = trainer_has_rollout
        self.perturbed = perturbed
        locations = itertools.product(range(DP), range(PP), range(CP), range(TP))
        self.ranks = [
            Process(
                "actor",
                rank,
                "job-1",
                nodes[0],
                world_size=DP * PP * CP * TP,
                data_rank=dp,
                layout={
                    "dp_rank": dp, "dp_size": DP, "pp_rank": pp, "pp_size": PP,
                    "cp_rank": cp, "cp_size": CP, "tp_rank": tp, "tp_size": TP,
                },
            )
            for rank, (dp, pp, cp, tp) in enumerate(locations)
        ]  # fmt: skip
        self.rollouts = [
            Process("rollout", rank, rollout_key, nodes[1], world_size=2) for rank in range(2)
        ]
        self.first: dict[int, list[Sample]] = {}
        self.resampled: dict[int, list[Sample]] = {}
        self.repeated: dict[int, list[Sample]] = {}

    def version(self, step: int) -> int:
        """Return the trainer's policy version at a step."""
        return 10 * step

    def samples(self, step: int) -> list[Sample]:
        """Return each sample of a step once."""
        return self.first[step] + self.resampled[step]

    def unsplit(self, step: int) -> TokenBatch:
        """Return a step in one batch."""
        return whole_batch(self.samples(step), self.version(step))

    def of_rank(self, step: int, rank: int) -> TokenBatch:
        """Return what a rank handed over in actor_compute_log_prob, each token once."""
        process = self.ranks[rank]
        spans: dict[str, Span] = {}
        for pas in self.passes(step):
            for span in self._spans(pas, process):
                spans[span.sample.uid] = span
        names = ("old_log_probs", "rollout_log_probs", "response_mask", "responses", "versions")
        payload = payload_of(
            list(spans.values()),
            streams=(*names, "positions", "round_ids", "turn_ids"),
            version=self.version(step),
        )
        if rank == self.perturbed:
            payload["tensors"]["old_log_probs"] = _shifted(payload["tensors"]["old_log_probs"])
        return TokenBatch.from_tensors(payload["tensors"], payload["strings"], payload["meta"])

    def passes(self, step: int) -> list[list[Sample]]:
        """Return the batches of actor_compute_log_prob: the first pass and the resampling."""
        again = self.resampled[step] + self.repeated[step]
        # Interleaved, so that parts hold new samples and repeated ones.
        order = np.random.default_rng(step).permutation(len(again))
        return [self.first[step], [again[index] for index in order]]

    # --- what is said ---------------------------------------------------------------------
    def greetings(self) -> Iterator[Reported]:
        """Everybody's hello."""
        for process in (*self.rollouts, *self.ranks):
            yield process.greet()

    def generate(self, step: int) -> Iterator[Reported]:
        """The rollout job: by policy version, without a step."""
        version = self.version(step)
        self.first[step] = make_samples(step, 13, version, f"s{step}")
        self.resampled[step] = make_samples(100 + step, 6, version, f"s{step}-again")
        self.repeated[step] = self.first[step][1:8]
        names = ("rollout_log_probs", "response_mask", "responses")
        for clock in sorted({int(v) for s in self.samples(step) for v in s.versions}):
            for process in self.rollouts:
                mine = self.samples(step)[process.rank :: len(self.rollouts)]
                pieces = [Span(s, np.flatnonzero(s.versions == clock)) for s in mine]
                pieces = [piece for piece in pieces if len(piece.at)]
                offsets = np.array([piece.at[0] for piece in pieces], np.int64)
                extra = {"token_offset": ("int64", offsets.shape, offsets, None)}
                payload = payload_of(pieces, streams=names, version=clock, **extra)
                yield from process.stage(
                    "rollout_generate", payload, step=None, policy_version=clock
                )

    def log_probs(self, step: int) -> Iterator[Reported]:
        """actor_compute_log_prob on every rank: two passes in microbatches."""
        for occurrence, samples in enumerate(self.passes(step)):
            for process in self.ranks:
                spans = self._spans(samples, process)
                for micro, begin in enumerate(range(0, len(spans), ROWS_OF_A_MICROBATCH)):
                    piece = spans[begin : begin + ROWS_OF_A_MICROBATCH]
                    part = Part(occurrence=occurrence, microbatch=micro)
                    yield from self._trained("actor_compute_log_prob", process, step, piece, part)

    def update(self, step: int) -> Iterator[Reported]:
        """actor_update: two epochs of two mini-batches of two microbatches, on the last pp."""
        for process in self.ranks:
            if process.layout["pp_rank"] != PP - 1:
                yield from process.stage("actor_update", None, step=step)
                continue
            for epoch in range(2):
                order = np.random.default_rng(epoch).permutation(len(self.samples(step)))
                spans = self._spans([self.samples(step)[index] for index in order], process)
                quarters = np.array_split(np.arange(len(spans)), 4)
                for number, quarter in enumerate(quarters):
                    part = Part(0, epoch, number // 2, number % 2)
                    piece = [spans[index] for index in quarter]
                    yield from self._trained("actor_update", process, step, piece, part)

    def farewells(self) -> Iterator[Reported]:
        """Everybody's leave."""
        for process in (*self.ranks, *self.rollouts):
            yield process.leave()

    # --- the inside -----------------------------------------------------------------------
    def _spans(self, samples: Sequence[Sample], process: Process) -> list[Span]:
        mine = samples[process.layout["dp_rank"] :: DP]
        return [Span(s, zigzag(len(s), process.layout["cp_rank"])) for s in mine]

    def _trained(
        self, stage: str, process: Process, step: int, spans: Sequence[Span], part: Part
    ) -> list[Reported]:
        names = ["old_log_probs", "response_mask", "responses", "positions", "round_ids"]
        names += ["turn_ids"]
        if stage == "actor_update":
            names.append("log_probs")
        if self.trainer_has_rollout:
            names += ["rollout_log_probs", "versions"]
        version = self.version(step)
        payload = payload_of(spans, streams=names, version=version)
        if process.rank == self.perturbed and stage == "actor_compute_log_prob":
            payload["tensors"]["old_log_probs"] = _shifted(payload["tensors"]["old_log_probs"])
        work = part._asdict()
        return process.stage(stage, payload, step=step, policy_version=version, **work)


def _shifted(tensor: WireTensor) -> WireTensor:
    tag, shape, values, offsets = tensor
    return tag, shape, values - np.float32(0.25), offsets
