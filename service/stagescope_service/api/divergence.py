"""Two dumps held against each other: the first operator in which they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request

from stagescope.wire.errors import InvalidInput
from stagescope_service.api.dependencies import Dependencies, Deps, Row
from stagescope_service.api.models import operators as models
from stagescope_service.api.operator_tables import (
    Side,
    check_fields,
    find_side,
    read_sides,
    sides_schema,
    whole_number,
)
from stagescope_service.api.requests import Answer, read_json
from stagescope_service.compare.operators import apart
from stagescope_service.compare.operators.differences import Thresholds
from stagescope_service.compare.operators.divergence import MOST_VERDICTS

router = APIRouter(tags=["operators"])

OTHER_DEVICE: Final = 100.0
"""The factor of the thresholds where the two sides ran on devices of two kinds."""

_BODY: Final[dict[str, Any]] = sides_schema(
    factor={"type": "number", "description": "Threshold in eps; default 4."},
    by_dtype={"type": "object", "description": "dtype -> threshold."},
    exact={"type": "boolean", "description": "Every number must be equal."},
    skip_sharded={"type": "boolean", "description": "Leave out shards."},
    limit={"type": "integer", "minimum": 1, "maximum": 1000},
)


@router.post(
    "/operators/divergence", response_model=models.Divergence, openapi_extra={"requestBody": _BODY}
)
async def divergence(request: Request, deps: Deps) -> Answer:
    """Find the first operator in which two dumps differ: ranks, steps, attempts, runs, devices.

    Calls are paired by what they are and where, not by their counters, and compared in the order
    of side `a` by the relative difference of min, max, mean and norm. The threshold is `factor`
    times the eps of the coarsest dtype up to there (4; 100 where the devices are of two kinds).
    `first_parameter` and `first_gradient` are answers of their own: between replicas on different
    data every activation differs, and no parameter may. What side `b` leaves out is as in `a`.
    """
    said = await read_json(request, deps.settings)
    check_fields(said, "a", "b", "factor", "by_dtype", "exact", "skip_sharded", "limit")
    return Answer(await deps.comparisons.run(_divergence, deps, said))


def _divergence(deps: Dependencies, said: Mapping[str, Any]) -> Row:
    of_a, of_b = read_sides(said)
    a = find_side(deps, of_a, "a")
    b = find_side(deps, of_b, "b", like=a)
    devices = [_device(deps, side) for side in (a, b)]
    other_device = None not in devices and devices[0] != devices[1]
    thresholds = _thresholds(said, OTHER_DEVICE if other_device else Thresholds().factor)
    found = apart.divergence(
        deps.operator_files.path(a.row),
        deps.operator_files.path(b.row),
        thresholds,
        rows=a.row["rows"] + b.row["rows"],
        skip_sharded=_flag(said, "skip_sharded"),
        limit=whole_number(said, "limit", MOST_VERDICTS, least=1, most=1000),
    )
    return {
        "a": {**a.heading(), "device": devices[0]},
        "b": {**b.heading(), "device": devices[1]},
        "factor": None if thresholds.exact else thresholds.factor,
        "exact": thresholds.exact,
        **found,
    }


def _device(deps: Dependencies, side: Side) -> str | None:
    row = side.row
    processes = deps.catalogue.processes(row["attempt_id"], role=row["role"], rank=row["rank"])
    kinds = [p["device_kind"] for p in processes if p["incarnation"] == row["incarnation"]]
    kind: str | None = next(iter(kinds), None)
    return kind


def _thresholds(said: Mapping[str, Any], factor: float) -> Thresholds:
    by_dtype = said.get("by_dtype") or {}
    if not isinstance(by_dtype, Mapping):
        raise InvalidInput(f"by_dtype is {by_dtype!r:.100}", expected="dtype -> threshold")
    return Thresholds(
        factor=factor if said.get("factor") is None else _positive(said["factor"], "factor"),
        by_dtype={
            str(name).removeprefix("torch."): _positive(value, f"by_dtype.{name}"[:100])
            for name, value in by_dtype.items()
        },
        exact=_flag(said, "exact"),
    )


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
        raise InvalidInput(f"{name} is {value!r:.100}", expected="a number from 0")
    return float(value)


def _flag(said: Mapping[str, Any], name: str) -> bool:
    value = said.get(name, False)
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is {value!r:.100}", expected="true or false")
    return value
