"""Which values that a call's record holds say something about the computation.

msprobe records every argument, also memory whose values the call does not read. `torch.empty` is
not recorded, so such memory has no origin in a dump: it is known by what is done to it. Whatever
somebody's earlier tensor left there differs between two healthy runs, and may be NaN. Values are

* `EVIDENCE`: read or computed by the call. What is not known to be anything else is evidence.
* `MEMORY`: not read by the call: the destination of a write before it, the source of a view, the
  tensor whose form alone is taken (`zeros_like`), what `empty` returned. Whoever reads it next
  has it among its own evidence.
* `CARRIED`: a result that may hold such memory: a view, or a buffer that was written in part. It is
  evidence, unless `MEMORY` of the same call is wrong in the same way.

Calls that FSDP makes to gather and free its shards (their innermost frame lies in
torch/distributed/fsdp) are no evidence at all: parameters and gradients are recorded where the
model reads and makes them. Nor are calls of the probe, which copies what is handed to it.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["Use", "infrastructure_stacks", "use_of"]


class Use(enum.IntEnum):
    """What a call does with a value."""

    EVIDENCE = 0
    MEMORY = 1
    CARRIED = 2


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EMPTY: Final = _words(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted empty_with_format"
    " empty_with_swapped_memory"
)
_FORM_ALONE: Final = _words(
    "empty_like new_empty new_empty_strided zeros_like ones_like full_like rand_like randn_like"
    " randint_like new_zeros new_ones new_full new_tensor"
)
_VIEWS: Final = _words(
    "narrow view view_as reshape reshape_as flatten unflatten ravel expand expand_as broadcast_to"
    " squeeze unsqueeze transpose t permute movedim moveaxis swapaxes swapdims select split"
    " split_with_sizes unsafe_split unsafe_split_with_sizes tensor_split hsplit vsplit dsplit chunk"
    " unsafe_chunk unbind as_strided diagonal unfold detach alias view_as_real view_as_complex"
    " atleast_1d atleast_2d atleast_3d resize_ squeeze_ unsqueeze_ transpose_ t_ detach_"
    " as_strided_ swapaxes_ swapdims_"
)
_SELECTIONS: Final = _words(
    "gather index_select take take_along_dim masked_select masked_fill masked_scatter"
    " index_fill index_copy index_put scatter slice_scatter select_scatter diagonal_scatter"
)
"""Copy some values of the first argument: what they leave out does not matter."""
_OVERWRITES: Final = _words(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_"
    " cauchy_ _foreach_copy_ _foreach_zero_ copy_memory_"
)
_OVERWRITES_PARTS: Final = _words(
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
    # The sender's own values come out as the result.
    "broadcast": ("0", "tensor"),
}
"""Collective -> position and name of what it fills."""

_SUBJECT: Final = ("0", "self", "input")
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
    """Return what a call does with one of its values.

    Args:
        kind, operator, direction: of the call (`Tensor`, `__setitem__`, `forward`).
        section, index: of the value (`input_args`, `0`).
        by_tensor: `__getitem__` with a tensor as index, which copies what it selects.
    """
    if direction != "forward" or operator is None or kind in ("Module", "Cell"):
        return Use.EVIDENCE
    if section == "output":
        return _use_of_result(kind, operator, by_tensor=by_tensor)
    place = (index or "").partition(".")[0]
    if section not in _INPUTS:
        return Use.EVIDENCE
    if section == "input_kwargs" and place == "out":
        return Use.MEMORY
    if kind == "Distributed":
        filled = place in _DESTINATIONS.get(operator, ())
        return Use.MEMORY if filled else Use.EVIDENCE
    if operator == "where":
        return Use.MEMORY if place in ("1", "2", "input", "other") else Use.EVIDENCE
    unread = (
        operator in _FORM_ALONE
        or operator in _VIEWS
        or operator in _SELECTIONS
        or operator in _OVERWRITES
        or operator in _OVERWRITES_PARTS
        or operator == "__getitem__"
    )
    return Use.MEMORY if unread and place in _SUBJECT else Use.EVIDENCE


def _use_of_result(kind: str | None, operator: str, *, by_tensor: bool) -> Use:
    if kind == "Distributed":
        return Use.EVIDENCE
    if operator in _EMPTY:
        return Use.MEMORY
    if operator in _VIEWS or operator in _OVERWRITES_PARTS:
        return Use.CARRIED
    return Use.CARRIED if operator == "__getitem__" and not by_tensor else Use.EVIDENCE


def infrastructure_stacks(stacks: Mapping[str, Iterable[str]]) -> frozenset[str]:
    """Return the ids of the stacks whose call FSDP made, or the probe (it copies what is recorded).

    Args:
        stacks: id -> frames, the innermost first, as msprobe wrote them.
    """
    return frozenset(stack_id for stack_id, frames in stacks.items() if _is_infrastructure(frames))


def _is_infrastructure(frames: Iterable[str]) -> bool:
    for frame in frames:
        found = _FILE.match(frame)
        if found is not None and not _DISPATCH.search(found["file"]):
            return _INFRASTRUCTURE.search(found["file"]) is not None
    return False
