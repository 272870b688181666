"""Parameters and gradients of a captured stage: this rank's shards and their locations.

Nothing here calls a collective: a rank that captures must not wait for one that does not. A
gradient is copied just before an optimizer uses it, since training clears it soon after. In a
stage without an optimizer's step it is copied at the end.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypedDict

from stagescope_wire.errors import InvalidPlan

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

MAX_TENSORS: Final = 1000
"""Tensors that one stage hands over this way."""

PARAMETER: Final = "parameter"
GRADIENT: Final = "gradient"


class ShardLocation(TypedDict, total=False):
    """Location of a shard in the full tensor; empty for a tensor that is not sharded."""

    shape: list[int]
    """Shape of the full tensor."""
    placements: list[str]
    mesh: list[int]
    offset: list[int] | None
    """Index of the shard's first element; None where torch does not know it."""


class Shards:
    """The parameters and gradients that captures request of a model in one stage.

    `finish` returns them and removes the hooks.

    Args:
        model: the module of the stage, or a list of them (several are numbered).
        parameters: patterns (`fnmatch`) of the names whose values to copy, at the stage's end.
        gradients: patterns of the names whose gradients to copy.

    Raises:
        InvalidPlan: there is no model, or nothing in it has such a name, or too much.
    """

    def __init__(
        self, model: object, *, parameters: Sequence[str], gradients: Sequence[str]
    ) -> None:
        named = dict(_named_parameters(model))
        self._parameters = _matching(named, parameters)
        self._gradients = _matching(named, gradients)
        self._tensors: dict[str, torch.Tensor] = {}
        self._locations: dict[str, ShardLocation] = {}
        self._steps = 0
        self._error: str | None = None
        self._hook = self._register_hook() if self._gradients else None

    def finish(self) -> tuple[dict[str, torch.Tensor], dict[str, ShardLocation], str | None]:
        """Return tensors by name, the location of each shard, and what went wrong."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        try:
            if not self._steps:
                self._copy_gradients(GRADIENT)
            for name, parameter in self._parameters.items():
                self._copy(f"{PARAMETER}/{name}", parameter)
        except Exception as error:  # a kind of tensor that is not supported here
            self._error = self._error or f"{type(error).__name__}: {error}"
        if not self._tensors and self._error is None:
            self._error = (
                f"none of the {len(self._gradients)} parameters had a gradient: no optimizer used "
                f"one in this stage, and none existed at its end; expected a stage that trains"
            )
        return self._tensors, self._locations, self._error

    def _register_hook(self) -> RemovableHandle:
        # torch is loaded already where there is a model, and not imported otherwise.
        optimizers: Any = sys.modules["torch.optim.optimizer"]
        hook: RemovableHandle = optimizers.register_optimizer_step_pre_hook(self._before_step)
        return hook

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        # Inside the training's own call: no exception may leave.
        try:
            requested = {id(each) for each in self._gradients.values()}
            groups = optimizer.param_groups
            if any(id(each) in requested for group in groups for each in group["params"]):
                number = self._steps
                self._steps += 1
                self._copy_gradients(GRADIENT if number == 0 else f"{GRADIENT}.{number}")
        except Exception as error:
            self._error = self._error or f"{type(error).__name__}: {error}"

    def _copy_gradients(self, prefix: str) -> None:
        for name, parameter in self._gradients.items():
            if parameter.grad is not None:
                self._copy(f"{prefix}/{name}", parameter.grad)

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        if len(self._tensors) >= MAX_TENSORS:
            raise InvalidPlan(f"more than {MAX_TENSORS} tensors", expected="narrower patterns")
        local, location = local_shard(tensor.detach())
        # A copy: the optimizer is about to write there.
        self._tensors[name] = local.clone()
        if location:
            self._locations[name] = location


def shard_bytes(model: object, patterns: Sequence[str]) -> int:
    """Return the bytes of this rank's shards of the parameters whose names match.

    Raises:
        InvalidPlan: as `Shards`.
    """
    parameters = _matching(dict(_named_parameters(model)), patterns).values()
    shards = (local_shard(each)[0] for each in parameters)
    return sum(int(each.numel()) * int(each.element_size()) for each in shards)


def local_shard(tensor: Any) -> tuple[torch.Tensor, ShardLocation]:
    """Return this rank's part of a tensor, a DTensor or not, and its location."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor, {}
    location: ShardLocation = {
        "shape": [int(size) for size in tensor.shape],
        "placements": [str(each) for each in tensor.placements],
        "mesh": [int(size) for size in mesh.mesh.shape],
        "offset": shard_offset(tensor),
    }
    return tensor._local_tensor, location


def shard_offset(tensor: Any) -> list[int] | None:
    """Return the indices of a DTensor's first local element; None where torch cannot tell.

    The function that covers uneven and strided shards is in a private module of torch.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        return None
    for name in ("torch.distributed.tensor._utils", "torch.distributed._tensor._utils"):
        compute = getattr(sys.modules.get(name), "compute_local_shape_and_global_offset", None)
        if compute is not None:
            try:
                _, offset = compute(tensor.shape, tensor.device_mesh, tensor.placements)
            except Exception:  # a placement that this version of torch does not support
                return None
            return [int(each) for each in offset]
    return None


def _named_parameters(model: object) -> Iterator[tuple[str, torch.Tensor]]:
    parts: Sequence[Any] = model if isinstance(model, list | tuple) else [model]
    for number, part in enumerate(parts):
        if not hasattr(part, "named_parameters"):
            raise InvalidPlan(
                "parameters and gradients need the stage's model",
                expected="probe.stage(..., model=model)",
            )
        prefix = f"{number}." if len(parts) > 1 else ""
        for name, parameter in part.named_parameters():
            yield prefix + name, parameter


def _matching(
    named: Mapping[str, torch.Tensor], patterns: Iterable[str]
) -> dict[str, torch.Tensor]:
    patterns = [*patterns]
    found = {
        name: parameter
        for name, parameter in named.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    if patterns and not found:
        raise InvalidPlan(
            f"no parameter name matches {', '.join(patterns)}",
            expected=f"such as {', '.join([*named][:3])}",
        )
    if len(found) > MAX_TENSORS:
        raise InvalidPlan(
            f"the names of {len(found)} parameters match {', '.join(patterns)}",
            expected=f"at most {MAX_TENSORS}",
        )
    return found
