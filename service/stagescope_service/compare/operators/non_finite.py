"""The first operator whose result is NaN or infinite, per rank, and the earliest over the ranks.

Looked at are outputs, gradients of activations (`output` of a backward call) and of parameters, in
execution order. Not every infinity is wrong, so each call with a bad result gets a status:

* `culprit`: NaN, +inf or both infinities, anywhere; -inf from an operator that is not known to
  hand masks on (`log` of 0, a product with a weight, a sum).
* `mask`: infinities that were put there, by `masked_fill`, `where`, `full` and the like; and only
  -inf, in a forward pass, out of an operator that had -inf in its inputs and neither multiplies
  matrices nor sums up, or out of a module with a mask inside. A parameter holds no mask.
* `perhaps_mask`: a module's forward output with -inf alone from finite inputs, where nothing
  recorded inside it tells why (level L0 records no operators).
* `not_read`: memory that no call has read (see `evidence`): what `empty` returned, a view of it,
  and whatever FSDP itself called to gather its shards.

The first `culprit` is named. Only where there is none the first `perhaps_mask` is, with
`certain` false. Masks are counted and the first are listed; so is
memory that was not read. -FLT_MAX is finite and never met here.

Over ranks a call's place is its position in the order of names that most ranks share (of equally
many the longest; a rank whose dump was cut off earlier shares it too). The rank with the lowest
position is the earliest. Ranks in another order (pipeline stages, another path through the model)
are listed in `order_differs`, and count only where no rank of the shared order found anything:
then one whose own inputs were fine goes first.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from stagescope_service.compare.operators.evidence import Use, infrastructure_stacks, use_of
from stagescope_service.dumps.msprobe.operator_query import (
    OperatorFilter,
    iterate_rows,
    load_columns,
    read_stacks,
)

MOST_MASKS: Final = 20

_RESULTS: Final = ("output", "grad")
_FILLS: Final = frozenset(
    {"masked_fill", "where", "full", "full_like", "new_full", "fill", "index_fill", "scatter",
     "masked_scatter", "setitem", "tensor", "as_tensor", "scalar_tensor", "triu", "tril"}
)  # fmt: skip
_NO_MASK: Final = re.compile(
    r"linear|matmul|addmm|baddbmm|bmm|\bmm\b|einsum|conv|norm|embedding|attention"
    r"|\bsum\b|mean|cumsum|prod|\bvar\b|\bstd\b|\bdot\b|loss|entropy",
    re.IGNORECASE,
)
_COLUMNS: Final = (
    "order", "name", "kind", "operator", "module_class", "direction", "source", "stack_id",
    "parent", "section", "index", "dtype", "shape", "min", "max", "non_finite",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class RankNonFinite:
    """What one rank found; `first` is a row's columns, ready for JSON (but for NaN)."""

    first: dict[str, Any] | None
    certain: bool
    bad_inputs: list[dict[str, Any]]
    """Non-finite inputs and parameters of the same call, as {section, index, non_finite}."""
    culprits: int
    masks: int
    first_masks: list[str]
    """Names of the first calls that were taken for masks."""
    not_read: int
    """Calls whose results are memory that they did not read."""


@dataclasses.dataclass(frozen=True, slots=True)
class NonFinite:
    """The answer over all ranks."""

    ranks: dict[int, RankNonFinite]
    earliest: int | None
    """Rank of the earliest; of several at one place the lowest."""
    together: list[int]
    """Ranks that found it at that same place: after a collective all have it at once."""
    places: dict[int, int | None]
    """Position of each rank's first in the shared order; None where its own order differs."""
    order_differs: list[int]

    def fields(self) -> dict[str, Any]:
        """Return it as a dict."""
        return dataclasses.asdict(self)


def first_non_finite(tables: Mapping[int, Path]) -> NonFinite:
    """Find the first non-finite result of each rank, and the earliest.

    Args:
        tables: rank -> its operator table.

    Raises:
        NotFound: a table is not there.
        StoreError: it is no operator table.
    """
    ranks = {rank: non_finite_of_rank(path) for rank, path in sorted(tables.items())}
    found = {rank: one.first for rank, one in ranks.items() if one.first is not None}
    orders = {rank: _names(tables[rank]) for rank in ranks} if len(ranks) > 1 and found else {}
    shared = _shared_order(orders)
    differing = [rank for rank, names in orders.items() if not shared.startswith(names)]
    places = {
        rank: None if rank in differing else int(first["order"]) for rank, first in found.items()
    }
    earliest = _earliest(ranks, places)
    place = None if earliest is None else places[earliest]
    together = [
        rank for rank in found if rank == earliest or (place is not None and place == places[rank])
    ]
    return NonFinite(ranks, earliest, together, places, differing)


def non_finite_of_rank(path: Path) -> RankNonFinite:
    """Find the first non-finite result of one operator table."""
    culprit: list[dict[str, Any]] | None = None
    perhaps: list[dict[str, Any]] | None = None
    culprits, masks, not_read = 0, list[str](), 0
    holding_masks: set[str] = set()
    of_infrastructure = infrastructure_stacks(read_stacks(path))
    for call in _calls(path):
        status = _status(call, holding_masks, of_infrastructure)
        if status == "culprit":
            culprits += 1
            culprit = culprit or call
        elif status == "not_read":
            not_read += 1
        elif status is not None:
            masks.append(call[0]["name"])
            holding_masks.add(call[0]["parent"] or "")
            if status == "perhaps_mask":
                perhaps = perhaps or call
    named = culprit or perhaps
    return RankNonFinite(
        first=None if named is None else _evident_results(named)[0],
        certain=culprit is not None,
        bad_inputs=[] if named is None else _bad_inputs(named),
        culprits=culprits,
        masks=len(masks),
        first_masks=masks[:MOST_MASKS],
        not_read=not_read,
    )


def _calls(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the non-finite rows of each call that has any."""
    rows = iterate_rows(path, OperatorFilter(non_finite=True), columns=_COLUMNS)
    for _, call in groupby(rows, key=lambda row: row["order"]):
        yield list(call)


def _status(
    call: list[dict[str, Any]], holding_masks: set[str], of_infrastructure: frozenset[str]
) -> str | None:
    """Judge a call; None where its results are finite."""
    results = _results(call)
    if not results:
        return None
    if results[0]["stack_id"] in of_infrastructure:
        return "not_read"
    kinds = {row["non_finite"] for row in results}
    operator = str(results[0]["operator"]).strip("_")
    module_class = results[0]["module_class"]
    # A view of a mask is a mask, below.
    if not _evident_results(call) and kinds != {"-inf"}:
        return "not_read"
    if "nan" in kinds or results[0]["direction"] != "forward":
        return "culprit"
    if any(row["section"] == "parameters" for row in call):
        return "culprit"
    inputs = {row["non_finite"] for row in call if row["section"] not in _RESULTS}
    if module_class is None and operator in _FILLS and "nan" not in inputs:
        return "mask"
    if kinds != {"-inf"} or _NO_MASK.search(module_class or operator):
        return "culprit"
    if inputs == {"-inf"} or results[0]["name"] in holding_masks:
        return "mask"
    return "perhaps_mask" if module_class is not None and not inputs else "culprit"


def _results(call: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in call if row["section"] in _RESULTS]


def _evident_results(call: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results that are evidence; a view of bad memory is none."""
    memory = any(_use(row) == Use.MEMORY for row in call)
    none = {Use.MEMORY, Use.CARRIED} if memory else {Use.MEMORY}
    return [row for row in _results(call) if _use(row) not in none]


def _bad_inputs(call: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the bad inputs that the call read."""
    names = ("section", "index", "non_finite")
    return [
        {name: row[name] for name in names}
        for row in call
        if row["section"] not in _RESULTS and _use(row) == Use.EVIDENCE
    ]


def _use(row: Mapping[str, Any]) -> Use:
    places = ("kind", "operator", "direction", "section", "index")
    return use_of(*(row[name] for name in places))


def _names(path: Path) -> bytes:
    """Return the names of a rank's calls in execution order, as 8 bytes each: they may be many."""
    columns = load_columns(path, ["order", "name"])
    starts = np.flatnonzero(np.diff(columns["order"], prepend=-1))
    hashes = np.asarray([hash(name) for name in columns["name"].values], np.int64)
    names: bytes = hashes[columns["name"].codes[starts]].tobytes()
    return names


def _shared_order(orders: Mapping[int, bytes]) -> bytes:
    counts = Counter(orders.values())
    return max(counts, key=lambda names: (counts[names], len(names)), default=b"")


def _earliest(ranks: Mapping[int, RankNonFinite], places: Mapping[int, int | None]) -> int | None:
    def key(rank: int) -> tuple[bool, bool, bool, int, int]:
        place, one = places[rank], ranks[rank]
        elsewhere = place is None
        return not one.certain, elsewhere, elsewhere and bool(one.bad_inputs), place or 0, rank

    return min(places, key=key, default=None)
