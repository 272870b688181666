"""The keys of NexRL's comparison report beside ours, so that its readers go on working.

What its script leaves out is there too: every trajectory and not the first five, every rank and
microbatch that there is, and non-finite numbers in strict JSON.

Its keys have its definitions: of tensors of one shape all values count, padding too (it knows no
masks); `std` is with n - 1; `is_close` is |a - b| <= 1e-5 + 1e-4 |b| of every value, of scalars
|a - b| < 1e-5. Beside them `verdict` is ours, of what masks cover and of rows that are paired.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stagescope.render import counted
from stagescope.wire.errors import StagescopeError
from stagescope.wire.schema import Part
from stagescope_service.compare.pairing.record_rows import RecordRows
from stagescope_service.compare.plan import COUNTERPART_SECTIONS
from stagescope_service.dumps.formats.nexrl_rows import widened
from stagescope_service.dumps.records import Dump, Entry, Place, Record
from stagescope_service.statistics.pairwise import Pairwise, compare_values
from stagescope_service.store.tensorfile import WireTensor

DIRECTORIES: Final = ("self_hosted_dir", "remote_api_dir", "weaver_dir")
_SHORT: Final = ("self_hosted", "remote_api", "weaver")
_BY_PLACE: Final = (
    ("forward_data_all", "forward_data", "forward_data", ("log_probs", "entropy", "response_mask")),
    ("loss_data_all", "loss_data", "loss", ("loss", "pg_loss", "entropy_loss")),
    ("is_loss_debug_all", "is_loss_debug", "is_loss",
     ("log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss",
      "effective_valid", "loss")),
)  # fmt: skip
"""(NexRL's section, that of one place in it, ours, the tensors that it names)."""

_RANK: Final = ("rank", "ranks")
_MICROBATCH: Final = ("microbatch", "microbatches")

_ATOL: Final = 1e-5
_RTOL: Final = 1e-4
_INPUTS: Final = "loss_fn_inputs/"
_CONSTANT: Final = 1e-8
"""Of sides with a smaller standard deviation no correlation is said."""

_Json = Mapping[str, Any]


def as_nexrl(
    said: _Json,
    dumps: Mapping[str, Dump],
    *,
    step: int | None = None,
    ranks: int | None = None,
    microbatches: int | None = None,
) -> dict[str, Any]:
    """Return our report with the keys of NexRL's.

    Args:
        said: our report, its sides in the order of `dumps`.
        dumps: by the name of its flag (DIRECTORIES).
        step, ranks, microbatches: as they were asked for; where not, as they were found.
    """
    found = said["sides"][0]
    parts = {part.rpartition(".")[2] for side in said["sides"] for part in side["parts"]}
    found_counts = {
        "ranks": max(len(side["ranks"]) for side in said["sides"]),
        "microbatches": len(parts),
    }
    remarks = [
        f"{counted(requested, *noun)} asked for, {found_counts[noun[1]]} found: all of them were compared"
        for noun, requested in ((_RANK, ranks), (_MICROBATCH, microbatches))
        if requested is not None and requested != found_counts[noun[1]]
    ]
    names = list(dumps)
    return {
        **said,
        "step": step if step is not None or not found["steps"] else found["steps"][0],
        **{name: dumps[name].name if name in dumps else None for name in DIRECTORIES},
        "num_ranks": found_counts["ranks"],
        "num_micros": found_counts["microbatches"],
        "remarks": remarks,
        "sections": [
            _trajectories(said, names),
            *(_by_place(said, dumps, *each) for each in _BY_PLACE),
            _datums(dumps.get("remote_api_dir")),
        ],
    }


def _pair(said: _Json, names: Sequence[str], other: str) -> _Json | None:
    if other not in names:
        return None
    sides = [0, names.index(other)]
    return next((pair for pair in said["pairs"] if pair["sides"] == sides), None)


def _trajectories(said: _Json, names: Sequence[str]) -> dict[str, Any]:
    pair = _pair(said, names, "remote_api_dir")
    report: dict[str, Any] = {"section": "trajectories"}
    if pair is None or not pair["trajectories"]["count"]:
        return {**report, "status": _not_found(said, pair, "trajectories", "remote_api")}
    rows = pair["trajectories"]["rows"]
    alone = [
        sum(
            len(finding["items"])
            for finding in pair["findings"]
            if finding["kind"] == "only" and finding["section"] == "trajectories"
            and finding["side"] == side and finding["verdict"] == "different"
        )
        for side in range(2)
    ]  # fmt: skip
    count = pair["trajectories"]["count"]
    return {
        **report,
        "status": "compared" if alone[0] == alone[1] else "count_mismatch",
        "sh_num_trajectories": count + alone[0],
        "ra_num_trajectories": count + alone[1],
        "trajectory_comparisons": [_trajectory(at, row) for at, row in enumerate(rows)],
    }


def _trajectory(index: int, row: _Json) -> dict[str, Any]:
    lengths, reward = row.get("tokens_lengths", (None, None)), row.get("reward", (None, None))
    return {
        "index": index, "sample": row["sample"], "tokens_match": row.get("tokens_equal"),
        "sh_tokens_len": lengths[0], "ra_tokens_len": lengths[1],
        "loss_mask_match": row.get("mask_equal"), "sh_reward": reward[0], "ra_reward": reward[1],
    }  # fmt: skip


def _by_place(
    said: _Json,
    dumps: Mapping[str, Dump],
    title: str,
    one: str,
    section: str,
    tensors: Sequence[str],
) -> dict[str, Any]:
    names = list(dumps)
    pair = _pair(said, names, "weaver_dir") or _pair(said, names, "remote_api_dir")
    found = next(
        (each for each in (pair or {"sections": ()})["sections"] if each["section"] == section),
        None,
    )
    if pair is None or found is None:
        short = "weaver" if "weaver_dir" in names else "remote_api"
        return {"section": title, "status": _not_found(said, pair, section, short),
                "comparisons": []}  # fmt: skip
    places: dict[tuple[Any, Any], list[tuple[str, _Json]]] = {}
    for tensor in found["tensors"]:
        for each in tensor["places"]:
            place = each["a"] if each["a"]["rank"] is not None else each["b"]
            held = places.setdefault((place["rank"], place["microbatch"]), [])
            held.append((tensor["name"], each))
    sides = [_DumpSide(list(dumps.values())[at], section) for at in pair["sides"]]
    comparisons = []
    for rank, micro in sorted(places, key=lambda at: (at[0] is None, *at)):
        held = places[rank, micro]
        compared = [_compared(name, each, sides) for name, each in held]
        found_counts = {name for name, _ in held}
        compared += [
            {"name": n, "status": "not_compared"} for n in tensors if n not in found_counts
        ]
        comparisons.append(
            {"section": one, "status": "compared", "rank": rank, "micro": micro,
             "comparisons": compared}
        )  # fmt: skip
    return {"section": title, "comparisons": comparisons}


class _DumpSide:
    """The tensors of a dump by their places, as its files hold them; one file is held at a time."""

    def __init__(self, dump: Dump, section: str) -> None:
        self._dump = dump
        self._sections = (section, *COUNTERPART_SECTIONS.get(section, ()))
        self._entries = {
            (each.section, each.place): each
            for each in dump.entries
            if each.section in self._sections
        }
        self._records: dict[Entry, Record] = {}

    def tensor(self, name: str, said: _Json) -> WireTensor | None:
        """Return a tensor of a place of the report, None where it is not there."""
        numbers = (said[n] for n in ("occurrence", "epoch", "minibatch", "microbatch"))
        place = Place(said["step"], said["stage"], said["role"], said["rank"], Part(*numbers))
        for section in self._sections:
            entry = self._entries.get((section, place))
            record = None if entry is None else self._read(entry)
            if record is not None and name in record.tensors:
                return record.tensors[name]
        return None

    def _read(self, entry: Entry) -> Record:
        if entry not in self._records:
            if self._records and next(iter(self._records)).place != entry.place:
                self._records.clear()
            self._records[entry] = self._dump.read(entry)
        return self._records[entry]


def _compared(name: str, each: _Json, sides: Sequence[_DumpSide]) -> dict[str, Any]:
    found, shapes, verdict = each["statistics"], each["shapes"], each["verdict"]
    if shapes == [[], []]:
        return {"name": name, "status": "compared", "s1": found["a"]["mean"],
                "s2": found["b"]["mean"], "diff": found["max_abs"],
                "is_close": bool(found["max_abs"] < _ATOL), "verdict": verdict}  # fmt: skip
    report = {"name": name, "t1_shape": shapes[0], "t2_shape": shapes[1], "verdict": verdict}
    if shapes[0] != shapes[1]:
        return {**report, "status": "shape_mismatch"}
    one, other = (side.tensor(name, each[at]) for side, at in zip(sides, "ab", strict=True))
    if one is None or other is None or one[3] is not None or other[3] is not None:
        return {**report, "status": "not_compared"}
    return {**report, "status": "compared", **_of_all_values(one, other)}


def _of_all_values(one: WireTensor, other: WireTensor) -> dict[str, Any]:
    """Return NexRL's numbers of two tensors of one shape."""
    found, _ = compare_values(one[2], other[2], dtypes=(one[0], other[0]), tolerance=(_ATOL, _RTOL))
    if not found.pairs or found.finite < found.pairs:
        return _of_non_finite(one, other)
    is_close = found.max_abs <= _ATOL
    if not is_close and not found.over_count:
        # Ours allows for the larger of the two, NexRL's for the second.
        is_close = bool(np.allclose(widened(one), widened(other), rtol=_RTOL, atol=_ATOL))
    report: dict[str, Any] = {"max_diff": found.max_abs, "mean_diff": found.mean_abs}
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


def _of_non_finite(one: WireTensor, other: WireTensor) -> dict[str, Any]:
    """Return the same of tensors with NaN, infinities or no values: they go into every number."""
    x, y = (widened(each).astype(np.float64).reshape(-1) for each in (one, other))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # of no values nothing is known
        apart = np.abs(x - y)
        report = {"max_diff": _of(np.max, apart), "mean_diff": _of(np.mean, apart)}
        for prefix, values in (("t1", x), ("t2", y)):
            report |= {
                f"{prefix}_mean": _of(np.mean, values),
                f"{prefix}_std": _of(functools.partial(np.std, ddof=1), values),
                f"{prefix}_min": _of(np.min, values), f"{prefix}_max": _of(np.max, values),
            }  # fmt: skip
        return {**report, "is_close": bool(np.allclose(x, y, rtol=_RTOL, atol=_ATOL))}


def _of(reduction: Callable[[npt.NDArray[np.float64]], Any], values: Any) -> float:
    return float(reduction(values)) if values.size else math.nan


def _not_found(said: _Json, pair: _Json | None, section: str, other: str) -> str:
    if pair is None:
        return f"{other}_not_found"
    first = said["sides"][pair["sides"][0]]["sections"]
    return f"{other}_not_found" if section in first else "self_hosted_not_found"


def _datums(dump: Dump | None) -> dict[str, Any]:
    """Return how many datums were sent and what one holds."""
    report: dict[str, Any] = {"section": "datums_analysis"}
    entries = [] if dump is None else [e for e in dump.entries if e.section == "datums"]
    if dump is None or not entries:
        return {**report, "status": "not_found"}
    count, first = 0, dict[str, int]()
    try:
        for entry in entries:
            rows = RecordRows(dump.read(entry))
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
