"""Routes about weights: the verdict of each version and tensor, and devices that stood out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path, Query

from stagescope.wire.errors import NotFound
from stagescope_service.api.dependencies import (
    AttemptTarget,
    Dependencies,
    Deps,
    Row,
    Run,
    StepTarget,
)
from stagescope_service.api.models import service as models
from stagescope_service.api.requests import Answer, Page, PageOf
from stagescope_service.api.target import Target
from stagescope_service.coordinator.weight_comparer import (
    ComparedVersion,
    compare_version,
    renaming,
)
from stagescope_service.core.weights import (
    DIFFERS,
    MISSING,
    VERDICTS,
    Comparison,
    Tensor,
)

router = APIRouter(tags=["weights"])

REPLICAS: Final = "replicas differ"
_WORST: Final = (DIFFERS, MISSING, REPLICAS, *VERDICTS)

Word = Annotated[
    Literal["differs", "missing", "replicas differ", "not comparable", "not compared", "agrees"]
    | None,
    Query(description="Only weights of this verdict."),
]
Version = Annotated[int, Path(gt=-(10**18), lt=10**18, description="A policy version.")]


@router.get("/weights", response_model=models.WeightVersions)
def versions(deps: Deps, target: AttemptTarget, page: PageOf) -> Answer:
    """List the versions of an attempt's weights, newest first, and how many weights have which
    verdict; `names` has the first of those that differ or are missing.
    """
    found = deps.catalogue.weight_verdicts(
        target.attempt_id, limit=page.limit + 1, offset=page.offset
    )
    rows = [{name: row[name] for name in row if name != "attempt_id"} for row in found]
    answer = page.answer(rows[: page.limit], more=len(rows) > page.limit)
    return Answer({**target.heading(), **answer})


@router.get("/weights/{version}", response_model=models.WeightsOfVersion)
def version(
    deps: Deps, target: AttemptTarget, version: Version, page: PageOf, verdict: Word = None
) -> Answer:
    """List the weights of a version, the worst first: what was sent against what was received."""
    return Answer({**target.heading(), **_answer(deps, target, [version], page, verdict)})


@router.get("/steps/{step}/weights", response_model=models.WeightsOfStep)
def of_step(deps: Deps, target: StepTarget, page: PageOf, verdict: Word = None) -> Answer:
    """List the weights that were recorded at a step, the worst first.

    `verdict`: `differs`, `missing` (on one side), `not comparable` (another dtype or shape, fused,
    cut up otherwise: see `reason`), `not compared` (one side recorded nothing) or `agrees`, bit
    for bit. `ranks` are those of the rollout that differ, `odd_ranks` those of either side whose
    replicas hold something else. Of several versions the newest answers; `versions` names them.
    """
    assert target.step is not None
    number = int(target.step["step"])
    found = deps.catalogue.weight_versions(target.attempt_id, number)
    if not found:
        raise NotFound(
            f"no weights were recorded at step {number}",
            advice="probe.record_weights(..., step=...) on both sides of a sync; see /weights",
        )
    return Answer({**target.heading(), **_answer(deps, target, found, page, verdict)})


@router.get("/devices", response_model=models.Devices)
def devices(deps: Deps, page: PageOf, run: Run = None) -> Answer:
    """List the devices whose weights were not their replicas', the most often outvoted first.

    `odd`: in how many recorded versions most replicas held something else; `suspected`: in how
    many there was no majority (of two, either may be right). Over all runs, unless `run` is given.
    """
    rows = device_rows(deps.catalogue.odd_replicas(), run)
    return Answer({"run": run, **page.cut(rows)})


def device_rows(odd: Sequence[Row], run: str | None = None) -> list[Row]:
    """Return a row a device of the times that it stood out, given the last first."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in odd:
        if run in (None, row["run"]):
            groups[row["device"]].append(row)
    rows = [_device_row(device, times) for device, times in groups.items()]
    return sorted(rows, key=lambda row: (-row["odd"], -row["suspected"], row["device"]))


def _device_row(device: str, times: Sequence[Row]) -> Row:
    last = times[0]
    outvoted = sum(bool(row["is_outvoted"]) for row in times)
    return {
        "device": device,
        "odd": outvoted,
        "suspected": len(times) - outvoted,
        "runs": sorted({row["run"] for row in times}),
        "attempts": len({row["attempt_id"] for row in times}),
        **{f"last_{name}": last[name] for name in ("run", "step", "version", "role", "rank")},
        "tensors": last["tensors"],
        "names": last["names"],
        **{name: last[name] for name in ("host", "node_id", "device_kind", "device_index")},
        "device_serial": last["device_serial"],
        "last_wall": last["wall"],
    }


def _answer(
    deps: Dependencies, target: Target, versions: Sequence[int], page: Page, verdict: str | None
) -> Row:
    rules = deps.settings.weight_names
    weighed = compare_version(deps.catalogue, target.attempt_id, versions[0], rules)
    if weighed is None:
        raise NotFound(f"no weights of version {versions[0]} were recorded", advice="see /weights")
    rows = tensor_rows(weighed, rules)
    counts = {**weighed.counts()}
    odd = sum(bool(row["odd_ranks"]) for row in rows)
    if verdict == REPLICAS:
        rows = [row for row in rows if row["odd_ranks"]]
    elif verdict is not None:
        rows = [row for row in rows if row["verdict"] == verdict]
    return {
        "version": weighed.version,
        "versions": list(versions),
        "complete": weighed.complete,
        "counts": counts | ({REPLICAS: odd} if odd else {}),
        "recorded": weighed.ranks(),
        **page.cut(rows),
    }


def tensor_rows(weighed: ComparedVersion, rules: Sequence[tuple[str, str]] = ()) -> list[Row]:
    """Return a row a weight, the worst first."""
    rename = renaming(rules)
    odd: dict[str, list[Row]] = defaultdict(list)
    for each in weighed.odd:
        for name in each.names:
            place = {"role": each.role, "rank": each.rank}
            if place not in odd[rename(name)]:
                odd[rename(name)].append(place)
    rows = [_tensor_row(each, odd) for each in weighed.comparisons]
    return sorted(rows, key=_badness)


def _badness(row: Mapping[str, Any]) -> int:
    is_odd = row["odd_ranks"] and row["verdict"] not in (DIFFERS, MISSING)
    return _WORST.index(REPLICAS if is_odd else row["verdict"])


def _tensor_row(each: Comparison, odd: Mapping[str, Sequence[Row]]) -> Row:
    shown: Tensor | None = each.trainer or each.rollout
    return {
        "name": each.name,
        "verdict": each.verdict,
        "dtype": None if shown is None else shown.dtype,
        "shape": None if shown is None else list(shown.shape),
        "ranks": list(each.ranks),
        "odd_ranks": list(odd.get(each.name, ())),
        "reason": each.reason or None,
        "trainer": _hex(each.trainer_checksum),
        "rollout": _hex(each.rollout_checksum),
        "kind": each.kind,
        "trainer_name": None if each.trainer is None else each.trainer.name,
        "rollout_name": None if each.rollout is None else each.rollout.name,
    }


def _hex(checksum: int | None) -> str | None:
    return None if checksum is None else f"{checksum:016x}"
