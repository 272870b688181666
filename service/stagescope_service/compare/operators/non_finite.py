"""The first operator whose result is NaN or infinite, per rank, and the earliest over the ranks.

The results are outputs, gradients of activations (`output` of a backward call) and of parameters,
in execution order. Not every infinity is wrong, so each call with a non-finite result gets a
status:

* `culprit`: NaN, +inf or both infinities, anywhere; -inf from an operator that is not known to
  pass masks on (`log` of 0, a product with a weight, a sum).
* `mask`: infinities that `masked_fill`, `where`, `full` and similar operators wrote. In a
  forward pass also -inf alone from a module with a mask inside. So is -inf alone from an operator
  with -inf in its inputs that neither multiplies matrices nor sums up. A parameter is no mask.
* `perhaps_mask`: a module's forward output with -inf alone from finite inputs, if no operator
  inside it was recorded (level L0 records none).
* `not_read`: memory that no call has read (see `evidence`): the result of `empty`, a view of it,
  and what FSDP itself called to gather its shards.

The answer is the first `culprit`, or without one the first `perhaps_mask`, with `certain` false.
Gradients of values that a script saved (level debug) are next to these in the dump, but are made
after all of them: they come last.
Masks and memory that was not read are counted, and the first masks are listed. -FLT_MAX is finite.

Ranks are compared by the position of a call in the order of names that most ranks share, or the
longest such order if several tie. A rank whose dump was cut off earlier shares it too. The rank
with the lowest position is the earliest. `order_differs` lists ranks in another order (pipeline
stages, another path through the model). They count only if no rank of the shared order found
anything. Then ranks whose own inputs were finite come first.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Final, Literal, TypedDict, cast

import numpy as np

from stagescope_service.compare.operators.evidence import Use, infrastructure_stacks, use_of
from stagescope_service.dumps.msprobe.operator_query import (
    OperatorFilter,
    iterate_rows,
    load_columns,
    read_stacks,
)

MAX_MASKS: Final = 20

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


class NonFiniteRow(TypedDict):
    """Columns of a row of an operator table that holds NaN or infinities; unknown is None."""

    order: int
    name: str
    kind: str | None
    operator: str | None
    module_class: str | None
    direction: str | None
    source: str | None
    stack_id: str | None
    parent: str | None
    section: str
    index: str | None
    dtype: str | None
    shape: list[int] | None
    min: float | None
    max: float | None
    non_finite: str


_COLUMNS: Final = tuple(NonFiniteRow.__annotations__)


class NonFiniteInput(TypedDict):
    """A non-finite input or parameter of a call."""

    section: str
    index: str | None
    non_finite: str


_Call = list[NonFiniteRow]
"""The non-finite rows of one call, at least one."""
_Status = Literal["culprit", "mask", "perhaps_mask", "not_read"]


@dataclasses.dataclass(frozen=True, slots=True)
class RankNonFinite:
    """Result of one rank.

    Attributes:
        first: the row of the first non-finite result, None without one.
        certain: it is a culprit, not perhaps a mask.
        bad_inputs: non-finite inputs and parameters of the same call.
        culprits, masks: numbers of calls.
        first_masks: names of the first calls that were classified as masks.
        not_read: number of calls whose results are memory that they did not read.
    """

    first: NonFiniteRow | None
    certain: bool
    bad_inputs: list[NonFiniteInput]
    culprits: int
    masks: int
    first_masks: list[str]
    not_read: int


class NonFinite(TypedDict):
    """The answer over all ranks."""

    earliest: int | None
    """The earliest rank, the lowest of several at one position; None without one."""
    together: list[int]
    """Ranks at the same position as the earliest: after a collective all have it."""
    order_differs: list[int]
    """Ranks in another order."""


def first_non_finite(tables: Mapping[int, Path]) -> NonFinite:
    """Find the rank with the earliest non-finite result.

    Args:
        tables: rank -> its operator table.

    Raises:
        NotFound: a table does not exist.
        StoreError: a file is no operator table.
    """
    ranks = {rank: non_finite_of_rank(path) for rank, path in sorted(tables.items())}
    found = {rank: one.first for rank, one in ranks.items() if one.first is not None}
    orders = {rank: _names(tables[rank]) for rank in ranks} if len(ranks) > 1 and found else {}
    shared = _shared_order(orders)
    differing = [rank for rank, names in orders.items() if not shared.startswith(names)]
    positions = {
        rank: None if rank in differing else first["order"] for rank, first in found.items()
    }

    def key(rank: int) -> tuple[bool, bool, bool, int, int]:
        position, one = positions[rank], ranks[rank]
        is_elsewhere = position is None
        return (
            not one.certain,
            is_elsewhere,
            is_elsewhere and bool(one.bad_inputs),
            position or 0,
            rank,
        )

    earliest = min(found, key=key, default=None)
    position = None if earliest is None else positions[earliest]
    together = [
        rank
        for rank in found
        if rank == earliest or (position is not None and position == positions[rank])
    ]
    return {"earliest": earliest, "together": together, "order_differs": differing}


def non_finite_of_rank(path: Path) -> RankNonFinite:
    """Find the first non-finite result of one operator table."""
    culprit = saved_gradient = perhaps = None
    culprits, masks, not_read = 0, list[str](), 0
    holding_masks: set[str] = set()
    of_infrastructure = infrastructure_stacks(read_stacks(path))
    for call in _calls(path):
        status = _status(call, holding_masks, of_infrastructure)
        if status == "culprit":
            culprits += 1
            if call[0]["direction"] == "debug" and call[0]["section"] == "grad":
                saved_gradient = saved_gradient or call
            else:
                culprit = culprit or call
        elif status == "not_read":
            not_read += 1
        elif status is not None:
            masks.append(call[0]["name"])
            holding_masks.add(call[0]["parent"] or "")
            if status == "perhaps_mask":
                perhaps = perhaps or call
    culprit = culprit or saved_gradient
    named = culprit or perhaps
    return RankNonFinite(
        first=None if named is None else _evident_results(named)[0],
        certain=culprit is not None,
        bad_inputs=[] if named is None else _bad_inputs(named),
        culprits=culprits,
        masks=len(masks),
        first_masks=masks[:MAX_MASKS],
        not_read=not_read,
    )


def _calls(path: Path) -> Iterator[_Call]:
    """Yield the non-finite rows of each call that has any."""
    rows = iterate_rows(path, OperatorFilter(non_finite=True), columns=_COLUMNS)
    for _, call in groupby(rows, key=lambda row: row["order"]):
        yield cast("_Call", list(call))


def _status(
    call: _Call, holding_masks: set[str], of_infrastructure: frozenset[str]
) -> _Status | None:
    """Return the status of a call, None if its results are finite."""
    results = _results(call)
    if not results:
        return None
    if results[0]["stack_id"] in of_infrastructure:
        return "not_read"
    kinds = {row["non_finite"] for row in results}
    operator = str(results[0]["operator"]).strip("_")
    module_class = results[0]["module_class"]
    # A view of a mask is classified as a mask below.
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


def _results(call: _Call) -> list[NonFiniteRow]:
    return [row for row in call if row["section"] in _RESULTS]


def _evident_results(call: _Call) -> list[NonFiniteRow]:
    """Return the results that are evidence; a view of non-finite memory is no evidence."""
    memory = any(_use(row) == Use.MEMORY for row in call)
    excluded = {Use.MEMORY, Use.CARRIED} if memory else {Use.MEMORY}
    return [row for row in _results(call) if _use(row) not in excluded]


def _bad_inputs(call: _Call) -> list[NonFiniteInput]:
    """Return the non-finite inputs that the call read."""
    return [
        {"section": row["section"], "index": row["index"], "non_finite": row["non_finite"]}
        for row in call
        if row["section"] not in _RESULTS and _use(row) == Use.EVIDENCE
    ]


def _use(row: NonFiniteRow) -> Use:
    return use_of(row["kind"], row["operator"], row["direction"], row["section"], row["index"])


def _names(path: Path) -> bytes:
    """Return hashes of the names of a rank's calls in execution order, 8 bytes each."""
    columns = load_columns(path, ["order", "name"])
    starts = np.flatnonzero(np.diff(columns["order"], prepend=-1))
    hashes = np.asarray([hash(name) for name in columns["name"].values], np.int64)
    names: bytes = hashes[columns["name"].codes[starts]].tobytes()
    return names


def _shared_order(orders: Mapping[int, bytes]) -> bytes:
    counts = Counter(orders.values())
    return max(counts, key=lambda names: (counts[names], len(names)), default=b"")
