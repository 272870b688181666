"""The keys of NexRL's comparison report beside ours, so that its readers go on working.

What its script leaves out is there too: every trajectory and not the first five, every rank and
microbatch that there is, and non-finite numbers in strict JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from stagescope.errors import StagescopeError
from stagescope.render import counted
from stagescope_service.compare.pairing.rows import Rows
from stagescope_service.dumps.records import Dump

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

_Said = Mapping[str, Any]


def as_nexrl(
    said: _Said,
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
    there = {
        "ranks": max(len(side["ranks"]) for side in said["sides"]),
        "microbatches": len(parts),
    }
    remarks = [
        f"{counted(asked, *noun)} asked for, {there[noun[1]]} found: all of them were compared"
        for noun, asked in ((_RANK, ranks), (_MICROBATCH, microbatches))
        if asked is not None and asked != there[noun[1]]
    ]
    names = list(dumps)
    return {
        **said,
        "step": step if step is not None or not found["steps"] else found["steps"][0],
        **{name: dumps[name].name if name in dumps else None for name in DIRECTORIES},
        "num_ranks": there["ranks"],
        "num_micros": there["microbatches"],
        "remarks": remarks,
        "sections": [
            _trajectories(said, names),
            *(_by_place(said, names, *each) for each in _BY_PLACE),
            _datums(dumps.get("remote_api_dir")),
        ],
    }


def _pair(said: _Said, names: Sequence[str], other: str) -> _Said | None:
    if other not in names:
        return None
    sides = [0, names.index(other)]
    return next((pair for pair in said["pairs"] if pair["sides"] == sides), None)


def _trajectories(said: _Said, names: Sequence[str]) -> dict[str, Any]:
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


def _trajectory(index: int, row: _Said) -> dict[str, Any]:
    lengths, reward = row.get("tokens_lengths", (None, None)), row.get("reward", (None, None))
    return {
        "index": index, "sample": row["sample"], "tokens_match": row.get("tokens_equal"),
        "sh_tokens_len": lengths[0], "ra_tokens_len": lengths[1],
        "loss_mask_match": row.get("mask_equal"), "sh_reward": reward[0], "ra_reward": reward[1],
    }  # fmt: skip


def _by_place(
    said: _Said, names: Sequence[str], title: str, one: str, section: str, tensors: Sequence[str]
) -> dict[str, Any]:
    pair = _pair(said, names, "weaver_dir") or _pair(said, names, "remote_api_dir")
    found = next(
        (each for each in (pair or {"sections": ()})["sections"] if each["section"] == section),
        None,
    )
    if found is None:
        short = "weaver" if "weaver_dir" in names else "remote_api"
        return {"section": title, "status": _not_found(said, pair, section, short),
                "comparisons": []}  # fmt: skip
    places: dict[tuple[Any, Any], dict[str, Any]] = {}
    for tensor in found["tensors"]:
        for each in tensor["places"]:
            place = each["a"] if each["a"]["rank"] is not None else each["b"]
            report = places.setdefault(
                (place["rank"], place["microbatch"]),
                {"section": one, "status": "compared", "rank": place["rank"],
                 "micro": place["microbatch"], "comparisons": []},
            )  # fmt: skip
            report["comparisons"].append(_compared(tensor["name"], each))
    for report in places.values():
        there = {each["name"] for each in report["comparisons"]}
        missing = [name for name in tensors if name not in there]
        report["comparisons"] += [{"name": name, "status": "not_compared"} for name in missing]
    return {"section": title, "comparisons": list(places.values())}


def _compared(name: str, each: _Said) -> dict[str, Any]:
    found, shapes = each["statistics"], each["shapes"]
    close = each["verdict"] in ("same", "within noise")
    if shapes == [[], []]:
        return {"name": name, "status": "compared", "s1": found["a"]["mean"],
                "s2": found["b"]["mean"], "diff": found["max_abs"], "is_close": close}  # fmt: skip
    status = "compared" if found["pairs"] else "shape_mismatch"
    report = {"name": name, "status": status, "t1_shape": shapes[0], "t2_shape": shapes[1]}
    if status == "compared":
        report |= {"max_diff": found["max_abs"], "mean_diff": found["mean_abs"]}
        for side, prefix in (("a", "t1"), ("b", "t2")):
            report |= {f"{prefix}_{key}": found[side][key] for key in ("mean", "std", "min", "max")}
        report |= {"is_close": close, "correlation": found["correlation"]}
    return report


def _not_found(said: _Said, pair: _Said | None, section: str, other: str) -> str:
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
    count, names = 0, dict[str, None]()
    try:
        for entry in entries:
            rows = Rows(dump.read(entry))
            count += rows.count or 0
            names |= dict.fromkeys(rows.record.tensors)
    except StagescopeError as error:
        return {**report, "status": "damaged", "message": str(error)}
    return {**report, "status": "analyzed", "num_datums": count, "first_datum_keys": [*names]}
