"""Which recorded values of a call are evidence of the computation.

msprobe records every argument, including memory whose values the call does not read. It does not
record `torch.empty`, so such memory has no origin in a dump, and only its use shows what it is. Old
contents of this memory differ between two healthy runs, and may be NaN. Values are

* `EVIDENCE`: read or computed by the call. This is the default.
* `MEMORY`: not read by the call. Examples: the destination of a write, the source of a view, a
  tensor whose shape alone is used (`zeros_like`), the result of `empty`. For a later call that
  reads it, it is evidence.
* `CARRIED`: a result that may contain such memory: a view, or a partly written buffer. It is
  evidence, unless `MEMORY` of the same call differs in the same way.

FSDP's calls that gather and free its shards (innermost frame in torch/distributed/fsdp) are no
evidence: parameters and gradients are recorded where the model reads and computes them. Calls of
the probe, which copies the values that it records, are no evidence either.

Some values measure nothing and only identify (`identifies`): process groups, peers and tags of
collectives, generators, streams, addresses of objects. So does whether a call was recomputed or is
awaited. Two healthy ranks differ in them.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final


class Use(enum.IntEnum):
    """How a call uses a value."""

    EVIDENCE = 0
    MEMORY = 1
    CARRIED = 2


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EMPTY: Final = _names(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted empty_with_format"
    " empty_with_swapped_memory"
)
_SHAPE_ONLY: Final = _names(
    "empty_like new_empty new_empty_strided zeros_like ones_like full_like rand_like randn_like"
    " randint_like new_zeros new_ones new_full new_tensor"
)
_VIEWS: Final = _names(
    "narrow view view_as reshape reshape_as flatten unflatten ravel expand expand_as broadcast_to"
    " squeeze unsqueeze transpose t permute movedim moveaxis swapaxes swapdims select split"
    " split_with_sizes unsafe_split unsafe_split_with_sizes tensor_split hsplit vsplit dsplit chunk"
    " unsafe_chunk unbind as_strided diagonal unfold detach alias view_as_real view_as_complex"
    " atleast_1d atleast_2d atleast_3d resize_ squeeze_ unsqueeze_ transpose_ t_ detach_"
    " as_strided_ swapaxes_ swapdims_"
)
_SELECTIONS: Final = _names(
    "gather index_select take take_along_dim masked_select masked_fill masked_scatter"
    " index_fill index_copy index_put scatter slice_scatter select_scatter diagonal_scatter"
)
"""Operators that copy some values of the first argument; the others do not matter."""
_OVERWRITES: Final = _names(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_"
    " cauchy_ _foreach_copy_ _foreach_zero_ copy_memory_"
)
_OVERWRITES_PARTS: Final = _names(
    "__setitem__ index_copy_ index_fill_ index_put_ masked_fill_ masked_scatter_ scatter_ put_"
    " fill_diagonal_"
)
_DESTINATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "all_gather_into_tensor": ("0", "output_tensor"),
    "_all_gather_base": ("0", "output_tensor"),
    "all_gather": ("0", "tensor_list"),
    "gather": ("1", "gather_list"),
    "reduce_scatter_tensor": ("0", "output"),
    "_reduce_scatter_base": ("0", "output"),
    "reduce_scatter": ("0", "output"),
    "all_to_all_single": ("0", "output"),
    "all_to_all": ("0", "output_tensor_list"),
    "scatter": ("0", "tensor"),
    "recv": ("0", "tensor"),
    "irecv": ("0", "tensor"),
    # The sender's own values are the result.
    "broadcast": ("0", "tensor"),
}
"""Collective -> position and name of the argument that it fills."""

_RECOMPUTED: Final = "is_recompute"
"""A field that msprobe writes next to a call's arguments."""
_OF_GROUPS: Final = _names(
    "group group_name group_id group_ranks group_tag ranks process_group pg hcom comm_group"
    " group_ep group_tp ep_rank_id tp_rank_id rank_id"
)
_OF_PEERS: Final = _names("peer tag op src dst root group_src group_dst group_peer")
"""Names of arguments of collectives, also inside of a `P2POp`; `src` of a scatter is data."""
_COLLECTIVE: Final = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|moe_distribute|broadcast"
)
"""Operators that communicate, some fused with a matrix product (`npu_mm_all_reduce_base`)."""
_REDUCTIONS: Final = _names("sum avg mean max min product prod band bor bxor premul_sum")
_SCALARS: Final = ("int", "str", "bool", "NoneType", None)
"""Types of values that name a rank, a tag or a group, or whether a call waits (`async_op`); sizes
are in lists."""
_MAKES_GROUPS: Final = re.compile(r"group|mesh|store|rank")
"""Functions of torch.distributed whose arguments are ranks, also in lists, and no data."""
_HANDLES: Final = (
    ".ProcessGroup", ".DeviceMesh", ".Generator", ".Stream", ".Event", ".Work", "Store",
)  # fmt: skip
"""Endings of the types of objects that belong to something outside of the computation."""
_ADDRESS: Final = re.compile(r"\bat 0x[0-9a-f]+|(?<==)0x[0-9a-f]{6,}", re.IGNORECASE)
"""Where an object is, in the text that Python prints for it."""

_SUBJECT: Final = ("0", "self", "input")
_SUBJECT_UNREAD: Final = (
    _SHAPE_ONLY | _VIEWS | _SELECTIONS | _OVERWRITES | _OVERWRITES_PARTS | {"__getitem__"}
)
"""Operators that do not read the values of their first argument."""
_INPUTS: Final = frozenset({"input_args", "input_kwargs"})

_FILE: Final = re.compile(r"File (?P<file>.+?), line \d+")
_DISPATCH: Final = re.compile(
    r"/torch/(?:_ops|_tensor|functional|_library/\w+|_dynamo/\w+|utils/_\w+|autograd/\w+)\.py\Z"
)
_INFRASTRUCTURE: Final = re.compile(
    r"/torch/distributed/(?:_composable/)?fsdp/|/stagescope_workers/"
)


@functools.lru_cache(maxsize=65_536)
def use_of(
    kind: str | None,
    operator: str | None,
    direction: str | None,
    section: str | None,
    index: str | None,
    *,
    by_tensor: bool = False,
) -> Use:
    """Return how a call uses one of its values.

    Args:
        kind, operator, direction: the call's (`Tensor`, `__setitem__`, `forward`).
        section, index: the value's (`input_args`, `0`).
        by_tensor: it is a `__getitem__` with a tensor as index, which copies its selection.
    """
    argument = (index or "").partition(".")[0]
    is_view = operator in _VIEWS or (operator == "__getitem__" and not by_tensor)
    if direction != "forward" or operator is None or kind in ("Module", "Cell"):
        return Use.EVIDENCE
    if section == "output":
        if kind == "Distributed":
            return Use.EVIDENCE
        if operator in _EMPTY:
            return Use.MEMORY
        return Use.CARRIED if is_view or operator in _OVERWRITES_PARTS else Use.EVIDENCE
    if section not in _INPUTS:
        return Use.EVIDENCE
    if section == "input_kwargs" and argument == "out":
        return Use.MEMORY
    unread: Collection[str] = _SUBJECT if operator in _SUBJECT_UNREAD else ()
    if kind == "Distributed":
        unread = _DESTINATIONS.get(operator, ())
    elif operator == "where":
        unread = ("1", "2", "input", "other")
    return Use.MEMORY if argument in unread else Use.EVIDENCE


def identifies(
    kind: str | None,
    operator: str | None,
    section: str | None,
    index: str | None,
    *,
    value_type: str | None,
    value: str | None,
) -> bool:
    """Return whether a value that is no tensor identifies a process or a call.

    Args:
        kind, operator: the call's (`Distributed`, `all_reduce`).
        section, index: the value's (`input_kwargs`, `group`).
        value_type, value: msprobe's record (`torch.ProcessGroup`).
    """
    if section == _RECOMPUTED or (value_type or "").endswith(_HANDLES):
        return True
    if section not in _INPUTS:
        return False
    if (value or "").lower().rpartition(".")[2] in _REDUCTIONS:  # RedOpType.SUM
        return False
    path = (index or "").split(".")
    if not _OF_GROUPS.isdisjoint(path):
        return True
    if kind == "Distributed":
        if _MAKES_GROUPS.search(operator or "") or not _OF_PEERS.isdisjoint(path):
            return True
        return len(path) == 1 and value_type in _SCALARS
    return value_type == "str" and _COLLECTIVE.search(operator or "") is not None


def differ_by_address(one: str | None, other: str | None) -> bool:
    """Return whether two texts of objects differ in no more than where the objects are."""
    if one is None or other is None or not _ADDRESS.search(one):
        return False
    return _ADDRESS.sub("", one) == _ADDRESS.sub("", other)


def infrastructure_stacks(stacks: Mapping[str, Iterable[str]]) -> frozenset[str]:
    """Return the ids of the stacks whose call was made by FSDP or the probe.

    Args:
        stacks: id -> frames, the innermost first, as msprobe wrote them.
    """
    found = set()
    for stack_id, frames in stacks.items():
        files = (frame["file"] for frame in map(_FILE.match, frames) if frame is not None)
        innermost = next((file for file in files if not _DISPATCH.search(file)), "")
        if _INFRASTRUCTURE.search(innermost):
            found.add(stack_id)
    return frozenset(found)
