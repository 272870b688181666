"""Weights: verdicts by version and tensor, and devices that differ from replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from stagescope_service.coordinator.weights import ComparedVersion, compare_version, renaming
from stagescope_service.core.weights.verdicts import (
    DIFFERS,
    MISSING,
    VERDICTS,
    Comparison,
    WeightTensor,
)
from stagescope_service.fields import RoleRank
from stagescope_service.store.tables import OddReplicaRow
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.service import Device, Weight
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.completeness import ROWS_REMOVED, rows_removed
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_wire.errors import NotFound
from stagescope_wire.links import Link

REPLICAS: Final = "replicas differ"

_WORST_FIRST: Final = (DIFFERS, MISSING, REPLICAS, *VERDICTS)


def device_rows(odd: Sequence[OddReplicaRow], run: str | None = None) -> list[Device]:
    """Return a row for each device.

    Args:
        odd: the divergences, the last first.
        run: only of this run.
    """
    by_device: dict[str, list[OddReplicaRow]] = defaultdict(list)
    for row in odd:
        if run in (None, row["run"]):
            by_device[row["device"] or ""].append(row)
    rows = [_device_row(device, own) for device, own in by_device.items()]
    return sorted(rows, key=lambda row: (-row["odd"], -row["suspected"], row["device"]))


def _device_row(device: str, rows: Sequence[OddReplicaRow]) -> Device:
    last = rows[0]
    outvoted = sum(bool(row["is_outvoted"]) for row in rows)
    return {
        "device": device,
        "odd": outvoted,
        "suspected": len(rows) - outvoted,
        "runs": sorted({row["run"] or "" for row in rows}),
        "attempts": len({row["attempt_id"] for row in rows}),
        "last_run": last["run"],
        "last_step": last["step"],
        "last_version": last["version"],
        "last_role": last["role"],
        "last_rank": last["rank"],
        "tensors": last["tensors"],
        "names": last["names"],
        "host": last["host"],
        "node_id": last["node_id"],
        "device_kind": last["device_kind"],
        "device_index": last["device_index"],
        "device_serial": last["device_serial"],
        "last_wall": last["wall"],
    }


def answer(
    deps: Dependencies, target: Target, versions: Sequence[int], page: Page, verdict: str | None
) -> JsonObject:
    """Return the weights of the first of `versions`, with verdict `verdict` (None: any)."""
    rules = deps.settings.weight_names
    compared = compare_version(deps.catalogue, target.attempt_id, versions[0], rules)
    gap = _removed_records(deps, target, versions[0])
    if compared is None and gap is not None:
        raise NotFound(
            f"no weights of version {versions[0]} are left: {gap}",
            advice="its verdict remains",
            see=(Link("weights"),),
        )
    if compared is None:
        raise NotFound(f"no weights of version {versions[0]} were recorded", see=(Link("weights"),))
    rows = weight_rows(compared, rules)
    odd = sum(bool(row["odd_ranks"]) for row in rows)
    if verdict == REPLICAS:
        rows = [row for row in rows if row["odd_ranks"]]
    elif verdict is not None:
        rows = [row for row in rows if row["verdict"] == verdict]
    return {
        "version": compared.version,
        "versions": list(versions),
        "complete": compared.complete,
        "counts": {**compared.counts(), **({REPLICAS: odd} if odd else {})},
        "recorded": compared.ranks(),
        "gap": gap,
        **page.cut(rows),
    }


def _removed_records(deps: Dependencies, target: Target, version: int) -> str | None:
    """Return why fewer records of a version are left than its verdict is based on."""
    verdicts = deps.catalogue.weight_verdicts(target.attempt_id, version=version)
    left = len(deps.catalogue.weights(target.attempt_id, version))
    removed = bool(verdicts) and (verdicts[0]["records"] or 0) > left
    return ROWS_REMOVED if removed else None


def weight_rows(compared: ComparedVersion, rules: Sequence[tuple[str, str]] = ()) -> list[Weight]:
    """Return a row for each weight, the worst first.

    Args:
        compared: a version.
        rules: (pattern, replacement) that unify the names of both sides.
    """
    rename = renaming(rules)
    odd: dict[str, list[RoleRank]] = defaultdict(list)
    for each in compared.odd:
        rank: RoleRank = {"role": each.role, "rank": each.rank}
        for name in each.names:
            if rank not in odd[rename(name)]:
                odd[rename(name)].append(rank)
    rows = [_weight_row(each, odd) for each in compared.comparisons]
    return sorted(rows, key=_rank_by_verdict)


def _rank_by_verdict(row: Weight) -> int:
    is_odd = row["odd_ranks"] and row["verdict"] not in (DIFFERS, MISSING)
    return _WORST_FIRST.index(REPLICAS if is_odd else row["verdict"])


def _weight_row(each: Comparison, odd: Mapping[str, Sequence[RoleRank]]) -> Weight:
    tensor: WeightTensor | None = each.trainer or each.rollout
    return {
        "name": each.name,
        "verdict": each.verdict,
        "dtype": None if tensor is None else tensor.dtype,
        "shape": None if tensor is None else list(tensor.shape),
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


def versions(deps: Dependencies, target: Target, page: Page) -> JsonObject:
    """List the versions of an attempt's weights, newest first, with the count of each verdict."""
    verdicts = deps.catalogue.weight_verdicts(
        target.attempt_id, limit=page.limit + 1, offset=page.offset
    )
    rows = [
        {name: value for name, value in row.items() if name != "attempt_id"} for row in verdicts
    ]
    return {**target.heading(), **page.first_of(rows)}


def of_step(
    deps: Dependencies,
    target: Target,
    page: Page,
    verdict: Literal[
        "differs", "missing", "replicas differ", "not comparable", "not compared", "agrees"
    ]
    | None = None,
) -> JsonObject:
    """List the weights that were recorded at a step, the worst first."""
    versions = deps.catalogue.weight_versions(target.attempt_id, target.step_number)
    if not versions and (removed := rows_removed(target.step_row)) is not None:
        raise NotFound(
            f"no weights of step {target.step_number} are left: {removed}",
            advice="the verdict of each version remains",
            see=(Link("weights"),),
        )
    if not versions:
        raise NotFound(
            f"no weights were recorded at step {target.step_number}",
            advice="probe.record_weights(..., step=...) on both sides of a sync",
            see=(Link("weights"),),
        )
    return {**target.heading(), **answer(deps, target, versions, page, verdict)}


def devices(deps: Dependencies, page: Page, run: str | None = None) -> JsonObject:
    """List the devices whose weights differed from their replicas', most often first."""
    if run is not None:
        run = deps.finder.run(run)
    rows = device_rows(deps.catalogue.odd_replicas(), run)
    return {"run": run, **page.cut(rows)}
