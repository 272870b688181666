"""Add the keys of NexRL's comparison report to ours, so that its consumers keep working.

It also has data that NexRL's script leaves out: every trajectory and not only the first five, every
rank and microbatch, and non-finite numbers in strict JSON.

The keys keep NexRL's definitions. If two tensors have one shape, all values count, padding too (it
uses no masks). `std` divides by n - 1. `is_close` is |a - b| <= 1e-5 + 1e-4 |b| for every value,
and |a - b| < 1e-5 for scalars. The `verdict` beside them is ours: it compares paired rows, and
values under their masks.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from stagescope_service.compare.pairing.contents_rows import ContentsRows
from stagescope_service.compare.report.as_json import (
    ComparisonReport,
    PairReport,
    ShardLocationReport,
    ShardReport,
    TrajectoryReport,
)
from stagescope_service.compare.task_runner import COUNTERPART_SECTIONS
from stagescope_service.dumps.records import Dump, DumpContents, DumpEntry, Location, widened
from stagescope_service.statistics.pairwise import Pairwise, compare_values
from stagescope_service.store.tensorfile import WireTensor
from stagescope_wire.errors import StagescopeError
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.render import counted
from stagescope_wire.schema import Part

DIRECTORIES: Final = ("self_hosted_dir", "remote_api_dir", "weaver_dir")


class _ShardSection(NamedTuple):
    """A section that NexRL reports by rank and microbatch."""

    name: str
    item_name: str
    """NexRL's name of one rank and microbatch in it."""
    section: str
    """Our name of it."""
    tensors: tuple[str, ...]


_SHARD_SECTIONS: Final = (
    _ShardSection("forward_data_all", "forward_data", "forward_data",
                  ("log_probs", "entropy", "response_mask")),
    _ShardSection("loss_data_all", "loss_data", "loss", ("loss", "pg_loss", "entropy_loss")),
    _ShardSection("is_loss_debug_all", "is_loss_debug", "is_loss",
                  ("log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss",
                   "effective_valid", "loss")),
)  # fmt: skip

_RANK: Final = ("rank", "ranks")
_MICROBATCH: Final = ("microbatch", "microbatches")

_ATOL: Final = 1e-5
_RTOL: Final = 1e-4
_INPUTS: Final = "loss_fn_inputs/"
_CONSTANT: Final = 1e-8
"""A side with a smaller standard deviation has no correlation."""

_Json = dict[str, object]
_Float64 = npt.NDArray[np.float64]


def as_nexrl(
    report: JsonObject,
    dumps: Mapping[str, Dump],
    *,
    step: int | None = None,
    ranks: int | None = None,
    microbatches: int | None = None,
) -> dict[str, Json]:
    """Return our report with the keys of NexRL's.

    Args:
        report: a `ComparisonReport`, its sides in the order of `dumps`.
        dumps: name of a flag (DIRECTORIES) -> its dump.
        step, ranks, microbatches: as requested, None for what was found.
    """
    comparison = cast("ComparisonReport", report)
    sides = comparison["sides"]
    parts = {part.rpartition(".")[2] for side in sides for part in side["parts"]}
    found = {"ranks": max(len(side["ranks"]) for side in sides), "microbatches": len(parts)}
    remarks = [
        f"{counted(requested, *noun)} asked for, {found[noun[1]]} found: all of them were compared"
        for noun, requested in ((_RANK, ranks), (_MICROBATCH, microbatches))
        if requested is not None and requested != found[noun[1]]
    ]
    steps, names = sides[0]["steps"], list(dumps)
    return {
        **report,
        "step": step if step is not None or not steps else steps[0],
        **{name: dumps[name].name if name in dumps else None for name in DIRECTORIES},
        "num_ranks": found["ranks"],
        "num_micros": found["microbatches"],
        "remarks": remarks,
        "sections": [
            _trajectories(comparison, names),
            *(_shard_section(comparison, dumps, each) for each in _SHARD_SECTIONS),
            _datums(dumps.get("remote_api_dir")),
        ],
    }


def _pair(report: ComparisonReport, names: Sequence[str], other: str) -> PairReport | None:
    if other not in names:
        return None
    sides = [0, names.index(other)]
    return next((pair for pair in report["pairs"] if pair["sides"] == sides), None)


def _trajectories(report: ComparisonReport, names: Sequence[str]) -> _Json:
    pair = _pair(report, names, "remote_api_dir")
    section: _Json = {"section": "trajectories"}
    if pair is None or not pair["trajectories"]["count"]:
        return {**section, "status": _not_found(report, pair, "trajectories", "remote_api")}
    rows = pair["trajectories"]["rows"]
    unmatched = [0, 0]
    for finding in pair["findings"]:
        is_sample = finding["kind"] == "only" and finding["section"] == "trajectories"
        if is_sample and finding["verdict"] == "different":
            unmatched[finding["side"]] += len(finding["items"])
    count = pair["trajectories"]["count"]
    return {
        **section,
        "status": "compared" if unmatched[0] == unmatched[1] else "count_mismatch",
        "sh_num_trajectories": count + unmatched[0],
        "ra_num_trajectories": count + unmatched[1],
        "trajectory_comparisons": [_trajectory(at, row) for at, row in enumerate(rows)],
    }


def _trajectory(index: int, row: TrajectoryReport) -> _Json:
    lengths, reward = row.get("tokens_lengths", (None, None)), row.get("reward", (None, None))
    return {
        "index": index, "sample": row["sample"], "tokens_match": row.get("tokens_equal"),
        "sh_tokens_len": lengths[0], "ra_tokens_len": lengths[1],
        "loss_mask_match": row.get("mask_equal"), "sh_reward": reward[0], "ra_reward": reward[1],
    }  # fmt: skip


def _shard_section(
    report: ComparisonReport, dumps: Mapping[str, Dump], keys: _ShardSection
) -> _Json:
    """Return a section with an item for each rank and microbatch."""
    names = list(dumps)
    pair = _pair(report, names, "weaver_dir") or _pair(report, names, "remote_api_dir")
    sections = () if pair is None else pair["sections"]
    section = next((each for each in sections if each["section"] == keys.section), None)
    if pair is None or section is None:
        short = "weaver" if "weaver_dir" in names else "remote_api"
        status = _not_found(report, pair, keys.section, short)
        return {"section": keys.name, "status": status, "comparisons": []}
    shards: dict[tuple[int | None, int], list[tuple[str, ShardReport]]] = {}
    for tensor in section["tensors"]:
        for shard in tensor["places"]:
            place = shard["a"] if shard["a"]["rank"] is not None else shard["b"]
            of_place = shards.setdefault((place["rank"], place["microbatch"]), [])
            of_place.append((tensor["name"], shard))
    sides = [_SectionTensors(list(dumps.values())[at], keys.section) for at in pair["sides"]]
    comparisons = []
    for rank, micro in sorted(shards, key=lambda at: (at[0] is None, *at)):
        compared = [_compared(name, shard, sides) for name, shard in shards[rank, micro]]
        names_here = {name for name, _ in shards[rank, micro]}
        compared += [
            {"name": name, "status": "not_compared"}
            for name in keys.tensors
            if name not in names_here
        ]
        comparisons.append(
            {"section": keys.item_name, "status": "compared", "rank": rank, "micro": micro,
             "comparisons": compared}
        )  # fmt: skip
    return {"section": keys.name, "comparisons": comparisons}


class _SectionTensors:
    """The tensors of a section of a dump as its files hold them; one file is in memory."""

    def __init__(self, dump: Dump, section: str) -> None:
        self._dump = dump
        self._sections = (section, *COUNTERPART_SECTIONS.get(section, ()))
        self._entries = {
            (entry.section, entry.location): entry
            for entry in dump.entries
            if entry.section in self._sections
        }
        self._records: dict[DumpEntry, DumpContents] = {}

    def tensor(self, name: str, place: ShardLocationReport) -> WireTensor | None:
        """Return the tensor of a location of the report, None if there is none."""
        part = Part(place["occurrence"], place["epoch"], place["minibatch"], place["microbatch"])
        location = Location(place["step"], place["stage"], place["role"], place["rank"], part)
        for section in self._sections:
            entry = self._entries.get((section, location))
            record = None if entry is None else self._read(entry)
            if record is not None and name in record.tensors:
                return record.tensors[name]
        return None

    def _read(self, entry: DumpEntry) -> DumpContents:
        if entry not in self._records:
            if self._records and next(iter(self._records)).location != entry.location:
                self._records.clear()
            self._records[entry] = self._dump.read(entry)
        return self._records[entry]


def _compared(name: str, shard: ShardReport, sides: Sequence[_SectionTensors]) -> _Json:
    statistics, shapes, verdict = shard["statistics"], shard["shapes"], shard["verdict"]
    if shapes == [[], []]:
        return {"name": name, "status": "compared", "s1": statistics["a"]["mean"],
                "s2": statistics["b"]["mean"], "diff": statistics["max_abs"],
                "is_close": bool(statistics["max_abs"] < _ATOL), "verdict": verdict}  # fmt: skip
    report: _Json = {"name": name, "t1_shape": shapes[0], "t2_shape": shapes[1]}
    report["verdict"] = verdict
    if shapes[0] != shapes[1]:
        return {**report, "status": "shape_mismatch"}
    one, other = (s.tensor(name, at) for s, at in zip(sides, (shard["a"], shard["b"]), strict=True))
    if one is None or other is None or one[3] is not None or other[3] is not None:
        return {**report, "status": "not_compared"}
    return {**report, "status": "compared", **_statistics(one, other)}


def _statistics(one: WireTensor, other: WireTensor) -> _Json:
    """Return NexRL's numbers of two tensors of one shape."""
    found, _ = compare_values(one[2], other[2], dtypes=(one[0], other[0]), tolerance=(_ATOL, _RTOL))
    if not found.pairs or found.finite < found.pairs:
        return _non_finite_statistics(one, other)
    is_close = found.max_abs <= _ATOL
    if not is_close and not found.over_count:
        # Our relative tolerance is of the larger value, NexRL's of the second.
        is_close = bool(np.allclose(widened(one), widened(other), rtol=_RTOL, atol=_ATOL))
    report: _Json = {"max_diff": found.max_abs, "mean_diff": found.mean_abs}
    stds = []
    for side, prefix in (("x", "t1"), ("y", "t2")):
        numbers = _unbiased(found, side)
        stds.append(numbers["std"])
        report |= {f"{prefix}_{key}": numbers[key] for key in ("mean", "std", "min", "max")}
    report["is_close"] = is_close
    if all(std > _CONSTANT for std in stds):
        report["correlation"] = found.correlation
    return report


def _unbiased(found: Pairwise, side: str) -> dict[str, float]:
    """Return min, max, mean and std of a side, std with n - 1."""
    numbers = found.side(side)
    n = found.finite
    return {**numbers, "std": numbers["std"] * math.sqrt(n / (n - 1)) if n > 1 else math.nan}


def _non_finite_statistics(one: WireTensor, other: WireTensor) -> _Json:
    """Return the same for tensors that are empty or hold NaN or infinities, which all count."""
    x, y = (widened(each).astype(np.float64).reshape(-1) for each in (one, other))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # of means of no values
        distance = np.abs(x - y)
        report: _Json = {
            "max_diff": _reduced(np.max, distance), "mean_diff": _reduced(np.mean, distance),
        }  # fmt: skip
        for prefix, values in (("t1", x), ("t2", y)):
            report |= {
                f"{prefix}_mean": _reduced(np.mean, values),
                f"{prefix}_std": _reduced(functools.partial(np.std, ddof=1), values),
                f"{prefix}_min": _reduced(np.min, values),
                f"{prefix}_max": _reduced(np.max, values),
            }
        return {**report, "is_close": bool(np.allclose(x, y, rtol=_RTOL, atol=_ATOL))}


def _reduced(reduction: Callable[[_Float64], np.floating[Any]], values: _Float64) -> float:
    return float(reduction(values)) if values.size else math.nan


def _not_found(report: ComparisonReport, pair: PairReport | None, section: str, other: str) -> str:
    if pair is None:
        return f"{other}_not_found"
    sections = report["sides"][pair["sides"][0]]["sections"]
    return f"{other}_not_found" if section in sections else "self_hosted_not_found"


def _datums(dump: Dump | None) -> _Json:
    """Return the number of datums that were sent, and the contents of the first."""
    report: _Json = {"section": "datums_analysis"}
    entries = [] if dump is None else [e for e in dump.entries if e.section == "datums"]
    if dump is None or not entries:
        return {**report, "status": "not_found"}
    count, first = 0, dict[str, int]()
    try:
        for entry in entries:
            rows = ContentsRows(dump.read(entry))
            if not count and rows.count:
                first = {name: int(rows.tensor(name).lengths[0]) for name in rows.names}
            count += rows.count or 0
    except StagescopeError as error:
        return {**report, "status": "damaged", "message": str(error)}
    report |= {"status": "analyzed", "num_datums": count}
    if count:
        report["first_datum_keys"] = [*dict.fromkeys(name.partition("/")[0] for name in first)]
    inputs = [name.partition("/")[2] for name in first if name.startswith(_INPUTS)]
    if inputs:
        report["loss_fn_inputs_keys"] = inputs
    if "input_tokens" in first:
        report["input_tokens_len"] = first["input_tokens"]
    return report
