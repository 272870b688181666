"""A comparison as values for strict JSON; `comparison.schema.json` describes them.

Non-finite numbers are floats here; `stagescope_wire.nonfinite` spells them where JSON is written.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from typing_extensions import Required, TypedDict

from stagescope_service.compare.pairing.token_alignment import COMPARED, ValueLocation
from stagescope_service.compare.results import (
    Cause,
    ComparisonFinding,
    DumpComparison,
    FirstDifference,
    PairResult,
    ShardResult,
    SideResult,
    TensorResult,
    Verdict,
)
from stagescope_service.compare.tolerances import NoiseFloor, severity
from stagescope_service.dumps.records import SECTIONS, Location
from stagescope_service.statistics.pairwise import Number, Pairwise
from stagescope_wire.nonfinite import Json, JsonObject

VERSION: Final = 1
"""Raised when a field changes its meaning or is removed; fields may be added without."""
SCHEMA_FILE: Final = Path(__file__).with_name("comparison.schema.json")
MAX_SAMPLES: Final = 100
"""Most differing samples that a tensor lists, the worst first; all are counted."""
MAX_TRAJECTORIES: Final = 10_000


class ShardLocationReport(TypedDict):
    """Location of a shard, and its text."""

    step: int | None
    stage: str | None
    role: str | None
    rank: int | None
    occurrence: int
    epoch: int
    minibatch: int
    microbatch: int
    text: str


class ValueReport(TypedDict):
    """Location of a value on one side."""

    place: ShardLocationReport
    coordinate: list[int]
    value: Number | None


class LocationReport(TypedDict):
    """Location of a pair of values."""

    sample: str | None
    position: int | None
    a: ValueReport
    b: ValueReport


class NonFiniteReport(TypedDict):
    """Numbers of pairs that agree and disagree, and of each kind on each side."""

    agree: int
    disagree: int
    a: dict[str, int]
    b: dict[str, int]


class StatisticsReport(TypedDict):
    """The numbers of `Pairwise`; `a` and `b` are min, max, mean and std of the sides."""

    pairs: int
    finite: int
    unequal: int
    over: int
    non_finite: NonFiniteReport
    max_abs: float
    mean_abs: float
    mean_difference: float
    relative: float
    severity: str
    cosine: float
    correlation: float
    a: dict[str, float]
    b: dict[str, float]


class ShardReport(TypedDict):
    """One tensor of one pair of shards."""

    a: ShardLocationReport
    b: ShardLocationReport
    verdict: str
    shapes: list[list[int]]
    extent: str
    key: str
    problem: str
    statistics: StatisticsReport


class SampleReport(TypedDict):
    """A sample that differs."""

    sample: str
    pairs: int
    unequal: int
    over: int
    max_abs: float
    mean_abs: float


class TensorReport(TypedDict):
    """One tensor over all shards; `order` is its index in the flow."""

    name: str
    order: int
    step: int | None
    station: str
    verdict: str
    reason: str
    dtypes: list[list[str]]
    tolerance: JsonObject
    statistics: StatisticsReport
    samples: dict[str, int]
    first: LocationReport | None
    largest: LocationReport | None
    places: list[ShardReport]
    differing_samples: list[SampleReport]


class SectionReport(TypedDict):
    """The tensors of a section."""

    section: str
    tensors: list[TensorReport]


class TrajectoryReport(TypedDict, total=False):
    """Comparison of a trajectory, over the fields that both sides have."""

    sample: Required[str]
    tokens_equal: bool
    tokens_lengths: list[int]
    mask_equal: bool
    mask_lengths: list[int]
    reward: list[float]


class TrajectoriesReport(TypedDict):
    """The first trajectories, and their number."""

    count: int
    rows: list[TrajectoryReport]


class PairReport(TypedDict):
    """The comparison of two sides."""

    sides: list[int]
    verdict: str
    reason: str
    first: JsonObject | None
    causes: list[JsonObject]
    excluded: list[str]
    findings: list[JsonObject]
    noise_floor: JsonObject | None
    trajectories: TrajectoriesReport
    keys: dict[str, list[str]]
    sections: list[SectionReport]


class ComparisonReport(TypedDict):
    """A comparison of two or three dumps."""

    schema: int
    verdict: str
    reason: str
    exit_status: int
    seconds: float
    bytes: int
    sides: list[JsonObject]
    pairs: list[PairReport]


def as_json(comparison: DumpComparison) -> dict[str, Json]:
    """Return a `ComparisonReport` as a dict; callers may add their own fields."""
    report: ComparisonReport = {
        "schema": VERSION,
        "verdict": str(comparison.verdict),
        "reason": comparison.reason,
        "exit_status": comparison.exit_status,
        "seconds": comparison.seconds,
        "bytes": comparison.bytes,
        "sides": [_fields(side) for side in comparison.sides],
        "pairs": [_pair(pair) for pair in comparison.pairs],
    }
    return {**report}


def _fields(result: SideResult | Cause | ComparisonFinding | FirstDifference | NoiseFloor) -> Json:
    """Return the fields of a result, which has the same ones in the report."""
    return {each.name: _plain(getattr(result, each.name)) for each in dataclasses.fields(result)}


def _pair(pair: PairResult) -> PairReport:
    noise_floor, order = pair.noise_floor, {id(each): at for at, each in enumerate(pair.tensors)}
    by_section = itertools.groupby(
        sorted(pair.tensors, key=lambda tensor: list(SECTIONS).index(tensor.section)),
        key=lambda tensor: tensor.section,
    )
    return {
        "sides": list(pair.sides),
        "verdict": str(pair.verdict),
        "reason": pair.reason,
        "first": None if pair.first is None else {
            **_fields(pair.first), "location": _location(pair.first.location),
        },
        "causes": [_fields(cause) for cause in pair.causes],
        "excluded": list(pair.excluded),
        "findings": [_fields(finding) for finding in pair.findings],
        "noise_floor": None if noise_floor is None else _fields(noise_floor),
        "trajectories": _trajectories(pair.tensors),
        "keys": {section: list(keys) for section, keys in pair.keys.items()},
        "sections": [
            {"section": section, "tensors": [_tensor(order[id(t)], t) for t in tensors]}
            for section, tensors in by_section
        ],
    }  # fmt: skip


_TOKEN_TENSORS: Final = ("tokens", "responses", "input_ids")
_MASK_TENSORS: Final = ("loss_mask", "response_mask")


def _trajectories(tensors: Sequence[TensorResult]) -> TrajectoriesReport:
    """Return the comparison of each trajectory's tokens, mask and reward."""
    rows: dict[str, TrajectoryReport] = {}
    tables = [
        (tensor.name, shard.comparison.rows)
        for tensor in tensors
        if tensor.section == "trajectories"
        for shard in tensor.shards
        if shard.comparison.rows is not None
    ]
    for name, table in tables:
        if name not in (*_TOKEN_TENSORS, *_MASK_TENSORS, "rewards"):
            continue
        for at, label in enumerate(table.labels):
            row = rows.setdefault(label, {"sample": label})
            is_equal = bool(table.states[at] == COMPARED and not table.numbers[at, 1])
            lengths = table.lengths[at].tolist()
            if name in _TOKEN_TENSORS:
                row["tokens_equal"] = is_equal and row.get("tokens_equal", True)
                row["tokens_lengths"] = lengths
            elif name in _MASK_TENSORS:
                row["mask_equal"] = is_equal and row.get("mask_equal", True)
                row["mask_lengths"] = lengths
            elif table.values is not None:
                row["reward"] = table.values[at].tolist()
    return {"count": len(rows), "rows": list(rows.values())[:MAX_TRAJECTORIES]}


def _location(location: ValueLocation | None) -> LocationReport | None:
    if location is None:
        return None
    sides = zip(location.locations, location.coordinates, location.values, strict=True)
    a, b = (
        ValueReport(place=_shard_location(place), coordinate=list(coordinate), value=value)
        for place, coordinate, value in sides
    )
    return {"sample": location.sample, "position": location.position, "a": a, "b": b}


def _shard_location(location: Location) -> ShardLocationReport:
    return _cached_shard_location(location).copy()


@functools.lru_cache(maxsize=1024)  # the shards of every tensor have the same locations
def _cached_shard_location(location: Location) -> ShardLocationReport:
    part = location.part
    return {
        "step": location.step, "stage": location.stage, "role": location.role,
        "rank": location.rank, "occurrence": part.occurrence, "epoch": part.epoch,
        "minibatch": part.minibatch, "microbatch": part.microbatch, "text": str(location),
    }  # fmt: skip


def _tensor(order: int, tensor: TensorResult) -> TensorReport:
    tolerance = tensor.tolerance
    return {
        "name": tensor.name,
        "order": order,
        "step": tensor.step,
        "station": tensor.station,
        "verdict": str(tensor.verdict),
        "reason": tensor.reason,
        "dtypes": [list(pair) for pair in tensor.dtypes],
        "tolerance": {
            "atol": tolerance.atol, "rtol": tolerance.rtol, "relative": tolerance.relative,
            "reason": tolerance.reason,
        },
        "statistics": _statistics(tensor.found),
        "samples": dict(tensor.samples),
        "first": _location(tensor.first),
        "largest": _location(tensor.largest),
        "places": [_shard(each) for each in tensor.shards],
        "differing_samples": [
            {"sample": label, "pairs": int(pairs), "unequal": int(unequal), "over": int(over),
             "max_abs": largest if finite else math.nan,
             "mean_abs": total / finite if finite else math.nan}
            for label, (pairs, unequal, over, largest, total, finite)
            in tensor.worst_samples(MAX_SAMPLES)
        ],
    }  # fmt: skip


def _shard(shard: ShardResult) -> ShardReport:
    comparison = shard.comparison
    return {
        "a": _shard_location(comparison.locations[0]),
        "b": _shard_location(comparison.locations[1]),
        "verdict": str(shard.verdict),
        "shapes": [list(shape) for shape in comparison.shapes],
        "extent": comparison.extent,
        "key": comparison.key,
        "problem": comparison.problem,
        "statistics": _statistics(comparison.statistics),
    }


def _statistics(found: Pairwise) -> StatisticsReport:
    relative = found.relative
    return {
        "pairs": found.pairs,
        "finite": found.finite,
        "unequal": found.unequal_count,
        "over": found.over_count,
        "non_finite": {
            "agree": found.agreeing_non_finite, "disagree": found.disagreeing_non_finite,
            "a": found.non_finite("x"), "b": found.non_finite("y"),
        },
        "max_abs": found.max_abs,
        "mean_abs": found.mean_abs,
        "mean_difference": found.mean_difference,
        "relative": relative,
        "severity": severity(relative),
        "cosine": found.cosine,
        "correlation": found.correlation,
        "a": found.side("x"),
        "b": found.side("y"),
    }  # fmt: skip


def _plain(value: object) -> object:
    """Return a value as one of JSON; other objects become their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    is_plain = isinstance(value, str | int | float | bool) and not isinstance(value, Verdict)
    return value if is_plain or value is None else str(value)
