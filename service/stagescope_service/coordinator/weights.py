"""Compares the stored records of a version of weights: verdict, findings, diverging replicas."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, TypedDict

from stagescope_service.coordinator.version_checks import VersionChecks, failure_fields
from stagescope_service.core.catalogue_rows import row_id
from stagescope_service.core.findings import FindingFields, FindingText, finding
from stagescope_service.core.instructions import CompareWeights, Delete, Put
from stagescope_service.core.weights.records import manifest_of, record_of
from stagescope_service.core.weights.verdicts import (
    AGREES,
    DIFFERS,
    MISSING,
    NOT_COMPARABLE,
    VERDICTS,
    Comparison,
    DivergingRank,
    Rename,
    WeightRecord,
    compare,
    newest,
    odd_replicas,
)
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Write, WriteRows
from stagescope_service.store.tables import ProcessColumns, WeightsRow
from stagescope_wire.links import Link

NAMED: Final = 20
"""Names listed in a finding and a stored verdict; `/weights/{version}` lists all of them."""


class RankDevice(TypedDict):
    """The device of a rank; `device` identifies it across attempts and runs."""

    device: str
    host: str | None
    node_id: str | None
    device_kind: str | None
    device_index: int | None
    device_serial: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class ComparedVersion:
    """One version of an attempt's weights."""

    run: str
    attempt_id: int
    version: int
    rows: list[WeightsRow]
    records: list[WeightRecord]
    comparisons: list[Comparison]
    odd: list[DivergingRank]
    #: All expected ranks have recorded, or no further record will come: missing ones stay missing.
    complete: bool

    @property
    def step(self) -> int | None:
        """The trainer's step, if known."""
        return max((row["step"] for row in self.rows if row["step"] is not None), default=None)

    @property
    def wall(self) -> float:
        """Time of its last record."""
        return max(row["wall"] for row in self.rows)

    def counts(self) -> dict[str, int]:
        """Return the number of weights by verdict, the worst first."""
        counted = Counter(each.verdict for each in self.comparisons)
        return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}

    def ranks(self) -> dict[str, dict[str, list[int]]]:
        """Return the ranks that recorded: side -> role -> ranks."""
        found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for record in self.records:
            found[record.side][record.role].add(record.rank)
        return {s: {r: sorted(ranks) for r, ranks in roles.items()} for s, roles in found.items()}


def renaming(rules: Sequence[tuple[str, str]]) -> Rename:
    """Return the function that applies regular expressions one after the other."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def rename(name: str) -> str:
        for pattern, replacement in compiled:
            name = pattern.sub(replacement, name)
        return name

    return rename


def compare_version(
    catalogue: Catalogue, attempt_id: int, version: int, rules: Sequence[tuple[str, str]] = ()
) -> ComparedVersion | None:
    """Compare a version of an attempt's weights; None if there is no record of it.

    Args:
        catalogue: with the records.
        attempt_id: the attempt.
        version: the policy version.
        rules: (pattern, replacement), for the names of both sides.
    """
    attempt = catalogue.attempt(attempt_id)
    rows = catalogue.weights(attempt_id, version)
    if attempt is None or not rows:
        return None
    processes = {row["incarnation"]: row for row in catalogue.processes(attempt_id)}
    blobs = catalogue.weight_manifests(sorted({row["manifest"] for row in rows}))
    manifests = {name: manifest_of(blob) for name, blob in blobs.items()}
    records = newest(
        record_of(row, manifests[row["manifest"]], processes.get(row["incarnation"], {}))
        for row in rows
        if row["manifest"] in manifests
    )
    later = catalogue.newest_weights(attempt_id)
    return ComparedVersion(
        run=attempt["run"],
        attempt_id=attempt_id,
        version=version,
        rows=rows,
        records=records,
        comparisons=compare(records, renaming(rules)),
        odd=odd_replicas(records),
        complete=(later is not None and later > version) or _all_there(records, processes),
    )


def _all_there(records: Sequence[WeightRecord], processes: Mapping[str, ProcessColumns]) -> bool:
    sizes: dict[str, int] = {}
    for process in processes.values():
        if process["world_size"] is not None:
            sizes[process["role"]] = process["world_size"]
    there: dict[tuple[str, str], set[int]] = defaultdict(set)
    for record in records:
        there[record.side, record.role].add(record.rank)
    return all(
        role in sizes and ranks.issuperset(range(sizes[role])) for (_, role), ranks in there.items()
    )


def judge(
    catalogue: Catalogue, instruction: CompareWeights, rules: Sequence[tuple[str, str]] = ()
) -> list[Put | Delete]:
    """Return the rows of a version's comparison.

    For earlier versions no further record is expected: their verdicts become final.
    """
    earlier = catalogue.incomplete_weights(instruction.attempt_id, instruction.version)
    processes = catalogue.processes(instruction.attempt_id)
    out: list[Put | Delete] = []
    for version in (*earlier, instruction.version):
        compared = compare_version(catalogue, instruction.attempt_id, version, rules)
        if compared is not None:
            out += rows_of(compared, processes)
    return out


# --- what is written --------------------------------------------------------------------------


def rows_of(compared: ComparedVersion, processes: Sequence[ProcessColumns]) -> list[Put | Delete]:
    """Return the rows of a verdict, which replace the rows of an earlier one."""
    version_key = {"attempt_id": compared.attempt_id, "version": compared.version}
    return [
        _verdict(compared),
        Delete("odd_replicas", version_key),
        *(_odd_row(compared, odd, processes) for odd in compared.odd),
        _judged(compared, "weights_differ", _differ(compared)),
        _judged(compared, "replica_weights_differ", _replicas_differ(compared, processes)),
    ]


class _Found(FindingText):
    """The fields of a finding about a version."""

    stage: str | None
    role: str | None
    rank: int | None


def _names(compared: ComparedVersion, verdict: str) -> list[str]:
    return [each.name for each in compared.comparisons if each.verdict == verdict]


def _verdict(compared: ComparedVersion) -> Put:
    counts = compared.counts()
    odd = sorted({name for odd in compared.odd for name in odd.names})
    named = {verdict: _names(compared, verdict)[:NAMED] for verdict in (DIFFERS, MISSING)}
    return Put(
        "weight_verdicts",
        {
            "attempt_id": compared.attempt_id,
            "version": compared.version,
            "step": compared.step,
            "records": len(compared.rows),
            "agree": counts.get(AGREES, 0),
            "differ": counts.get(DIFFERS, 0),
            "missing": counts.get(MISSING, 0),
            "not_comparable": counts.get(NOT_COMPARABLE, 0),
            "replicas_differ": len(odd),
            "complete": compared.complete,
            "ranks": compared.ranks(),
            "names": {**named, "replicas differ": odd[:NAMED]},
            "wall": compared.wall,
        },
    )


def _judged(compared: ComparedVersion, kind: str, found: _Found | None) -> Put | Delete:
    """Return a finding, or the deletion of one that no longer holds."""
    finding_id = row_id(kind, compared.attempt_id, compared.version)
    if found is None:
        return Delete("findings", {"finding_id": finding_id})
    made = finding(
        kind,
        run=compared.run,
        attempt_id=compared.attempt_id,
        wall=compared.wall,
        step=compared.step,
        **found,
    )
    # For one version: a later version of the same step makes another finding.
    return Put("findings", {**made.row, "finding_id": finding_id})


def _differ(compared: ComparedVersion) -> _Found | None:
    differ = _names(compared, DIFFERS)
    missing = _names(compared, MISSING) if compared.complete else []
    if not differ and not missing:
        return None
    count = len(compared.comparisons)
    words = [f"{len(differ)} of {count} weights differ ({_listed(differ)})"] if differ else []
    if missing:
        words.append(f"{len(missing)} of {count} are missing on one side ({_listed(missing)})")
    ranks = sorted({rank for each in compared.comparisons for rank in each.ranks})
    unlike = not compared.counts().keys() - {MISSING}
    return {
        "message": f"version {compared.version}, trainer against rollout: {' and '.join(words)}",
        "severity": "error",
        "evidence": {
            "version": compared.version,
            "differ": differ[:NAMED],
            "missing": missing[:NAMED],
            "rollout_ranks": ranks,
        },
        "advice": "no name is on both sides: map them with STAGESCOPE_WEIGHT_NAMES or names="
        if unlike
        else "the engine samples from other weights than were trained: look at this sync of these "
        "tensors",
        "see": () if unlike else (Link("weights"),),
        "stage": "weight_sync",
        "role": "rollout",
        "rank": ranks[0] if len(ranks) == 1 else None,
    }


def _replicas_differ(
    compared: ComparedVersion, processes: Sequence[ProcessColumns]
) -> _Found | None:
    if not compared.odd:
        return None
    outvoted = [odd for odd in compared.odd if odd.is_outvoted]
    named = outvoted or compared.odd
    shown = [
        f"{odd.side} {odd.role} rank {odd.rank} on {device_of(compared, odd, processes)['device']}"
        for odd in named
    ]
    names = sorted({name for odd in named for name in odd.names})
    verb = "holds" if len(named) == 1 else "hold"
    rest = "other weights than its replicas" if outvoted else "unlike replicas, without a majority"
    return {
        "message": f"version {compared.version}: {'; '.join(shown[:NAMED])} {verb} {rest}: "
        f"{_listed(names)}",
        "severity": "error",
        "evidence": {
            "version": compared.version,
            "odd": [{**odd._asdict(), "names": odd.names[:NAMED]} for odd in named[:NAMED]],
        },
        "advice": "a device that computes wrong, or a step that these ranks did not take together",
        "see": (Link("devices"),),
        "stage": None,
        "role": named[0].role if len({odd.role for odd in named}) == 1 else None,
        "rank": named[0].rank if len(named) == 1 else None,
    }


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _odd_row(
    compared: ComparedVersion, odd: DivergingRank, processes: Sequence[ProcessColumns]
) -> Put:
    return Put(
        "odd_replicas",
        {
            "attempt_id": compared.attempt_id,
            "version": compared.version,
            "side": odd.side,
            "role": odd.role,
            "rank": odd.rank,
            "run": compared.run,
            "step": compared.step,
            **device_of(compared, odd, processes),
            "is_outvoted": odd.is_outvoted,
            "replicas": odd.replicas,
            "tensors": len(odd.names),
            "names": list(odd.names[:NAMED]),
            "wall": compared.wall,
        },
    )


def device_of(
    compared: ComparedVersion, odd: DivergingRank, processes: Sequence[ProcessColumns]
) -> RankDevice:
    """Return the device of a diverging replica.

    Its name is the serial number, else the host (a node's id is new in every cluster) and device
    index.
    """
    own = [r for r in compared.rows if (r["side"], r["role"], r["rank"]) == odd[:3]]
    row = max(own, key=lambda row: (row["wall"], row["incarnation"], row["seq"]))
    process = next((p for p in processes if p["incarnation"] == row["incarnation"]), None)
    host = node = None
    kind, index, serial = row["device_kind"], row["device_index"], row["device_serial"]
    if process is not None:
        host, node = process["host"], process["node_id"]
        kind = process["device_kind"] if kind is None else kind
        index = process["device_index"] if index is None else index
        # The layout that the process reports was set by its user, who knows better.
        serial = serial if process["device_serial"] is None else process["device_serial"]
    name = f"{host or node or 'unknown host'}/{kind or 'device'}{'' if index is None else index}"
    return {
        "device": serial or name,
        "host": host,
        "node_id": node,
        "device_kind": kind,
        "device_index": index,
        "device_serial": serial,
    }


NOT_COMPARED = "weights_not_compared"
"""A version of weights could not be compared; the next try that succeeds ends this."""


class WeightComparer(VersionChecks[CompareWeights]):
    """Compares the versions of weights of one coordinator; see `VersionChecks`."""

    def __init__(
        self, catalogue: Catalogue, write: WriteRows, rules: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(catalogue, write, what="the comparison of weights", failure=NOT_COMPARED)
        self._rules = rules

    def rows_of(self, order: CompareWeights) -> Sequence[Write]:
        """Return the rows of a version's comparison."""
        return judge(self._catalogue, order, self._rules)

    def left_over(self) -> Sequence[CompareWeights]:
        """Return the versions with records that were not compared."""
        return [CompareWeights(*each) for each in self._catalogue.uncompared()]

    def failed(self, order: CompareWeights, reason: str, tried: int) -> tuple[str, FindingFields]:
        """Return the finding of a version that could not be compared."""
        attempt = self._catalogue.attempt(order.attempt_id)
        run = "" if attempt is None else attempt["run"]
        what = f"the weights of version {order.version} could not be compared"
        message = f"{what} ({tried} tries): {reason}"
        return message, failure_fields(run, order.attempt_id, reason, tried, version=order.version)
