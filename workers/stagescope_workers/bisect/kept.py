"""The kept tokens of a step: what both sides recorded, and the rows that are scored again."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_wire.batch import Batch
from stagescope_wire.batch.converters import Trajectory, trajectories
from stagescope_wire.engines import Sampling
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import RankKey
from stagescope_wire.tensors import ROLLOUT_ROUTES

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]


class Place(NamedTuple):
    """The part of a step that has the mismatch.

    Attributes:
        text: where it is, such as "On actor rank 1".
        mean: mean |d| of its tokens, in nats.
        rest: mean |d| of the step's other tokens, in nats.
        ranks: its ranks; empty: it is no part by rank.
    """

    text: str
    mean: float
    rest: float
    ranks: tuple[RankKey, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One trajectory.

    Attributes:
        name: its sample id, else its row.
        ids: the tokens of prompt and response.
        start: number of tokens of the prompt.
        counted: bool [response], the tokens that the model sampled and both sides scored.
        q: the rollout's recorded log-probs, [response].
        p: the trainer's recorded log-probs, [response].
        group: its group, where it is known.
        routes: the recorded experts, [tokens of `ids`, layers, K]; -1 where there are none.
        rank: (role, rank) that recorded the trainer's log-probs, where it is known.
        engine: the engine instance, "" where it is unknown.
        rounds: the round of each response token, int64 [response], where it is known.
    """

    name: str
    ids: tuple[int, ...]
    start: int
    counted: Bool
    q: Float64
    p: Float64
    group: str | None = None
    routes: Int64 | None = None
    rank: RankKey | None = None
    engine: str = ""
    rounds: Int64 | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """The rows that are scored again, and how their tokens were sampled.

    Attributes:
        rows: see `Row`.
        total: number of rows of the step.
        sampling: as recorded.
        is_sampling_known: whether a temperature was recorded; otherwise it is assumed to be 1.
        heading: run, attempt and step.
        place: the part of the step that the rows are of; None: they are of all of it.
        step_rows: all rows of the step.
    """

    rows: tuple[Row, ...]
    total: int
    sampling: Sampling
    is_sampling_known: bool
    heading: str
    place: Place | None = None
    step_rows: tuple[Row, ...] = ()

    @property
    def q(self) -> Float64:
        """The rollout's recorded log-probs of all response tokens, NaN where none counts."""
        return self.flat([row.q for row in self.rows])

    @property
    def p(self) -> Float64:
        """The trainer's recorded log-probs of all response tokens, NaN where none counts."""
        return self.flat([row.p for row in self.rows])

    @property
    def tokens(self) -> int:
        """Number of counted tokens."""
        return sum(int(row.counted.sum()) for row in self.rows)

    def flat(self, values: Sequence[Float64]) -> Float64:
        """Return the response values of each row in one array, NaN where a token does not count."""
        pairs = zip(self.rows, values, strict=True)
        return np.concatenate([np.where(row.counted, own, np.nan) for row, own in pairs])

    def ends(self, scores: Sequence[Sequence[float]]) -> Float64:
        """Return the scores of whole rows as one array of their response tokens."""
        return self.flat(
            [
                np.array(own[row.start :], np.float64)
                for row, own in zip(self.rows, scores, strict=True)
            ]
        )

    def split(self, values: Float64) -> list[Float64]:
        """Return the values of one array by row."""
        return np.split(values, np.cumsum([len(row.q) for row in self.rows])[:-1])

    def digest(self) -> str:
        """Return a checksum of the tokens and of both sides' log-probs."""
        found = hashlib.sha256()
        for row in self.rows:
            found.update(np.array([len(row.ids), row.start, *row.ids], np.int64).tobytes())
        found.update(self.q.tobytes())
        found.update(self.p.tobytes())
        return found.hexdigest()


def kept_rows(batch: Batch) -> Kept:
    """Return all rows of a kept step; see `spread`.

    Raises:
        NotFound: prompts, responses, the mask or a side's log-probs were not kept.
        InvalidInput: no token has two finite log-probs.
    """
    names = [name for name in ROLLOUT_ROUTES if name in batch]
    ranks = _ranks(batch)
    found = [_row(each, batch, names[0] if names else None, ranks) for each in trajectories(batch)]
    rows = tuple(row for row in found if row.counted.any())
    if not rows:
        raise InvalidInput(
            f"no token of {batch.heading} has two finite log-probs",
            expected="a kept step with rollout_log_probs and old_log_probs",
        )
    sampling = recorded_sampling(batch.meta)
    return Kept(rows, len(rows), sampling or Sampling(temperature=1.0), sampling is not None,
                batch.heading, step_rows=rows)  # fmt: skip


def spread(kept: Kept, limit: int) -> Kept:
    """Return at most `limit` of the rows.

    They are spread evenly over the rows ordered by mean |d|, so that they represent all of them and
    contain the worst one.
    """
    if len(kept.rows) <= limit:
        return kept
    ordered = sorted(kept.rows, key=lambda row: float(np.abs(row.p - row.q)[row.counted].mean()))
    chosen = tuple(ordered[round(at)] for at in np.linspace(len(ordered) - 1, 0, limit))
    return dataclasses.replace(kept, rows=chosen)


def _ranks(batch: Batch) -> dict[int, RankKey]:
    """Return row -> the rank that recorded its log-probs, else the one that recorded anything."""
    found: dict[int, RankKey] = {}
    for part in sorted(batch.parts, key=lambda part: "old_log_probs" in part.names):
        if part.rank is not None:
            found |= dict.fromkeys(map(int, part.rows), (part.role or "rank", part.rank))
    return found


def _row(one: Trajectory, batch: Batch, routes: str | None, ranks: Mapping[int, RankKey]) -> Row:
    ids = one.all_tokens()
    q = one.tensor("rollout_log_probs").astype(np.float64)
    p = one.tensor("old_log_probs").astype(np.float64)
    mask = one.tensor("response_mask") != 0
    rounds = one.tensors.get("round_ids", one.tensors.get("turn_ids"))
    return Row(
        name=one.sample_id or str(one.row),
        ids=tuple(ids),
        start=len(ids) - len(q),
        counted=mask & np.isfinite(q) & np.isfinite(p),
        q=q,
        p=p,
        group=one.group_id or None,
        routes=None if routes is None else _routes(one, batch, routes),
        rank=ranks.get(one.row),
        engine=one.strings.get("engine_ids", ""),
        rounds=None if rounds is None else rounds.astype(np.int64),
    )


def _routes(one: Trajectory, batch: Batch, name: str) -> Int64 | None:
    """Return the experts of each token of a row, -1 where none are recorded."""
    ids = one.all_tokens()
    found = one.tensors.get(name)  # as wide as the responses
    begin = len(ids) - len(one.tensor("responses"))
    if found is None:  # as wide as prompt and response together, both padded
        found, begin = batch[name][one.row], 0
        width = batch["prompts"].shape[1]
        if found.shape[0] < width:
            return None
        if "attention_mask" in batch:
            found = found[int(np.argmax(batch["attention_mask"][one.row] != 0)) :]
        elif batch.side("prompts") == "left":
            found = found[width - (len(ids) - len(one.tensor("responses"))) :]
    if found.ndim != 3:
        return None
    routes = np.full((len(ids), *found.shape[1:]), -1, np.int64)
    count = min(len(found), len(ids) - begin)
    routes[begin : begin + count] = found[:count]
    return routes


def recorded_sampling(meta: JsonObject) -> Sampling | None:
    """Return how the tokens of a batch were sampled; None if no temperature was recorded."""
    stages = meta.get("stages")
    places: list[object] = [meta.get("sampling")]
    if isinstance(stages, Mapping):
        for own in stages.values():
            streams = own.get("streams") if isinstance(own, Mapping) else None
            if isinstance(streams, Mapping):
                places.append(streams.get("rollout"))
    for place in places:
        if not isinstance(place, Mapping):
            continue
        temperature = _number(place.get("temperature"))
        if temperature is not None and temperature >= 0:
            top_p, top_k = _number(place.get("top_p")), _number(place.get("top_k"))
            return Sampling(
                temperature=temperature,
                top_p=top_p if top_p is not None and 0 < top_p <= 1 else 1.0,
                top_k=int(top_k) if top_k is not None and top_k > 0 else 0,
            )
    return None


def _number(value: object) -> float | None:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_real and math.isfinite(value) else None  # type: ignore[arg-type]


def decoded_positions(kept: Kept, most: int) -> list[tuple[int, int]]:
    """Return (row, response position) of tokens that are decoded one by one: at most `most`.

    They are spread evenly over the counted tokens of each row and begin with its first one.
    """
    each = max(most // len(kept.rows), 1)
    found = []
    for index, row in enumerate(kept.rows[:most]):
        places = np.flatnonzero(row.counted)
        chosen = np.unique(np.linspace(0, len(places) - 1, min(each, len(places))).round())
        found += [(index, int(places[int(at)])) for at in chosen]
    return found
