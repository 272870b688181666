"""A comparison as plain values, ready for strict JSON; `comparison.schema.json` describes them.

Non-finite numbers are floats here; `stagescope.wire.nonfinite` spells them where JSON is written.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stagescope_service.compare.pairing.token_alignment import COMPARED, Location
from stagescope_service.compare.results import (
    Comparison,
    Finding,
    First,
    PairResult,
    PlaceResult,
    SideResult,
    TensorResult,
)
from stagescope_service.compare.tolerances import severity
from stagescope_service.dumps.records import SECTIONS, Place
from stagescope_service.statistics.pairwise import Pairwise

VERSION: Final = 1
"""Raised when a field changes its meaning or goes; fields may be added without."""
SCHEMA_FILE: Final = Path(__file__).with_name("comparison.schema.json")
MOST_SAMPLES: Final = 100
"""Samples that differ that a tensor lists, the worst first; all are counted."""
MOST_TRAJECTORIES: Final = 10_000


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as dicts, lists, strings and numbers."""
    return {
        "schema": VERSION,
        "verdict": str(comparison.verdict),
        "reason": comparison.reason,
        "exit_status": comparison.exit_status,
        "seconds": comparison.seconds,
        "bytes": comparison.bytes,
        "sides": [_side(side) for side in comparison.sides],
        "pairs": [_pair(pair) for pair in comparison.pairs],
    }


def statistics(found: Pairwise) -> dict[str, Any]:
    """Return the numbers of a summary; `a` and `b` are the two sides."""
    relative = found.relative
    return {
        "pairs": found.pairs,
        "finite": found.finite,
        "unequal": found.unequal_count,
        "over": found.over_count,
        "non_finite": {
            "agree": found.agreeing_non_finite,
            "disagree": found.disagreeing_non_finite,
            "a": found.non_finite("x"),
            "b": found.non_finite("y"),
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
    }


def place(where: Place) -> dict[str, Any]:
    """Return a place and its text."""
    return dict(_place(where))


@functools.lru_cache(maxsize=1024)  # every tensor names the places of all others again
def _place(where: Place) -> dict[str, Any]:
    part = dict(zip(("occurrence", "epoch", "minibatch", "microbatch"), _part(where), strict=True))
    known = {"step": where.step, "stage": where.stage, "role": where.role, "rank": where.rank}
    return {**known, **part, "text": str(where)}


def _part(where: Place) -> tuple[int, int, int, int]:
    part = where.part
    return (part.occurrence, part.epoch, part.minibatch, part.microbatch)


def _side(side: SideResult) -> dict[str, Any]:
    return {
        "name": side.name, "kind": side.kind, "entries": side.entries, "bytes": side.bytes,
        "steps": list(side.steps), "ranks": list(side.ranks), "parts": list(side.parts),
        "sections": list(side.sections), "about": _plain(side.about),
    }  # fmt: skip


def _pair(pair: PairResult) -> dict[str, Any]:
    floor, order = pair.floor, {id(tensor): at for at, tensor in enumerate(pair.tensors)}
    by_section = itertools.groupby(
        sorted(pair.tensors, key=lambda tensor: list(SECTIONS).index(tensor.section)),
        key=lambda tensor: tensor.section,
    )
    return {
        "sides": list(pair.sides),
        "verdict": str(pair.verdict),
        "reason": pair.reason,
        "first": None if pair.first is None else _first(pair.first),
        "causes": [
            {"title": cause.title, "evidence": cause.evidence, "checks": list(cause.checks)}
            for cause in pair.causes
        ],
        "excluded": list(pair.excluded),
        "findings": [_finding(finding) for finding in pair.findings],
        "noise_floor": None if floor is None else {
            "mean": floor.mean, "max": floor.max, "source": floor.source,
        },
        "trajectories": _trajectories(pair),
        "keys": {section: list(keys) for section, keys in pair.keys.items()},
        "sections": [
            {"section": section, "tensors": [_tensor(order[id(t)], t) for t in tensors]}
            for section, tensors in by_section
        ],
    }  # fmt: skip


def _trajectories(pair: PairResult) -> dict[str, Any]:
    """Return what was found of each trajectory: its tokens, its mask and its reward."""
    rows: dict[str, dict[str, Any]] = {}
    for tensor in pair.tensors:
        field = _FIELDS.get(tensor.name) if tensor.section == "trajectories" else None
        for each in tensor.places if field is not None else ():
            table = each.piece.rows
            for at, label in enumerate(() if table is None else table.labels):
                assert table is not None
                row = rows.setdefault(label, {"sample": label})
                if field == "reward" and table.values is not None:
                    row["reward"] = table.values[at].tolist()
                elif field != "reward":
                    same = table.states[at] == COMPARED and not table.numbers[at, 1]
                    row[f"{field}_equal"] = bool(same) and row.get(f"{field}_equal", True)
                    row[f"{field}_lengths"] = table.lengths[at].tolist()
    return {"count": len(rows), "rows": list(rows.values())[:MOST_TRAJECTORIES]}


_FIELDS: Final = {
    "tokens": "tokens", "responses": "tokens", "input_ids": "tokens", "loss_mask": "mask",
    "response_mask": "mask", "rewards": "reward",
}  # fmt: skip


def _first(first: First) -> dict[str, Any]:
    return {
        "station": first.station, "section": first.section, "name": first.name,
        "reason": first.reason, "location": _location(first.location),
    }  # fmt: skip


def _location(location: Location | None) -> dict[str, Any] | None:
    if location is None:
        return None
    sides = zip(location.places, location.coordinates, location.values, strict=True)
    a, b = (
        {"place": place(where), "coordinate": list(at), "value": value}
        for where, at, value in sides
    )
    return {"sample": location.sample, "position": location.position, "a": a, "b": b}


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind, "message": finding.message, "side": finding.side,
        "section": finding.section, "items": list(finding.items), "verdict": str(finding.verdict),
    }  # fmt: skip


def _tensor(order: int, tensor: TensorResult) -> dict[str, Any]:
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
        "statistics": statistics(tensor.found),
        "samples": dict(tensor.samples),
        "first": _location(tensor.first),
        "largest": _location(tensor.largest),
        "places": [_place_result(each) for each in tensor.places],
        "differing_samples": [
            {"sample": label, "pairs": int(pairs), "unequal": int(unequal), "over": int(over),
             "max_abs": largest, "mean_abs": total / max(int(pairs), 1)}
            for label, (pairs, unequal, over, largest, total) in tensor.worst_samples(MOST_SAMPLES)
        ],
    }  # fmt: skip


def _place_result(each: PlaceResult) -> dict[str, Any]:
    piece = each.piece
    return {
        "a": place(piece.places[0]),
        "b": place(piece.places[1]),
        "verdict": str(each.verdict),
        "shapes": [list(shape) for shape in piece.shapes],
        "extent": piece.extent,
        "key": piece.key,
        "problem": piece.problem,
        "statistics": statistics(piece.found),
    }


def _plain(value: Any) -> Any:
    """Return what is known of a dump as JSON has it; anything else as its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
