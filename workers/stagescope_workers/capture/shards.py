"""Parameters and gradients of a captured stage: this rank's shards, with their place in the whole.

Nothing here calls a collective: a rank that captures must not wait for one that does not. A
gradient is taken where an optimizer is about to use it, since training clears it soon after; in a
stage without an optimizer's step it is taken at the end.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from stagescope.wire.errors import InvalidPlan

MOST_TENSORS: Final = 1000
"""Tensors that one stage hands over this way."""

PARAMETER: Final = "parameter"
GRADIENT: Final = "gradient"

Taken = dict[str, Any]


class Shards:
    """What captures order of a model in one stage; `finish` returns it and lets go of hooks.

    Args:
        model: the module of the stage, or a list of them (several are numbered).
        parameters: patterns (`fnmatch`) of the names whose values to take, at the stage's end.
        gradients: patterns of the names whose gradients to take.

    Raises:
        InvalidPlan: there is no model, or nothing in it has such a name, or too much.
    """

    def __init__(
        self, model: object, *, parameters: Sequence[str], gradients: Sequence[str]
    ) -> None:
        named = dict(_named(model))
        self._parameters = _chosen(named, parameters)
        self._gradients = _chosen(named, gradients)
        self._taken: Taken = {}
        self._places: dict[str, Any] = {}
        self._steps = 0
        self._error: str | None = None
        self._hook = self._watch() if self._gradients else None

    def finish(self) -> tuple[Taken, dict[str, Any], str | None]:
        """Return tensors by name, where each lies in its whole, and what went wrong."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        try:
            if not self._steps:
                self._take_gradients(GRADIENT)
            for name, parameter in self._parameters.items():
                self._take(f"{PARAMETER}/{name}", parameter)
        except Exception as error:  # a kind of tensor that is not known here
            self._error = self._error or f"{type(error).__name__}: {error}"
        return self._taken, self._places, self._error

    def _watch(self) -> Any:
        optimizers: Any = sys.modules["torch.optim.optimizer"]
        return optimizers.register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # Inside the training's own call: whatever fails stays here.
        try:
            mine = {id(each) for each in self._gradients.values()}
            groups = optimizer.param_groups
            if any(id(each) in mine for group in groups for each in group["params"]):
                number = self._steps
                self._steps += 1
                self._take_gradients(GRADIENT if number == 0 else f"{GRADIENT}.{number}")
        except Exception as error:
            self._error = self._error or f"{type(error).__name__}: {error}"

    def _take_gradients(self, prefix: str) -> None:
        for name, parameter in self._gradients.items():
            if parameter.grad is not None:
                self._take(f"{prefix}/{name}", parameter.grad)

    def _take(self, name: str, tensor: Any) -> None:
        if len(self._taken) >= MOST_TENSORS:
            raise InvalidPlan(f"more than {MOST_TENSORS} tensors", expected="narrower patterns")
        local, place = local_shard(tensor.detach())
        # A copy: the optimizer is about to write there.
        self._taken[name] = local.clone()
        if place:
            self._places[name] = place


def size_of(model: object, patterns: Sequence[str]) -> int:
    """Return the bytes of this rank's shards of the parameters that have such names.

    Raises:
        InvalidPlan: as `Shards`.
    """
    shards = (local_shard(each)[0] for each in _chosen(dict(_named(model)), patterns).values())
    return sum(int(each.numel()) * int(each.element_size()) for each in shards)


def local_shard(tensor: Any) -> tuple[Any, dict[str, Any]]:
    """Return this rank's part of a tensor, and where it lies: {} for a tensor that is whole.

    The place is `{"shape": of the whole, "offset": of the part or None, "placements", "mesh"}`.
    """
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor, {}
    place: dict[str, Any] = {
        "shape": [int(size) for size in tensor.shape],
        "placements": [str(each) for each in tensor.placements],
        "mesh": [int(size) for size in mesh.mesh.shape],
        "offset": _offset(tensor),
    }
    return tensor._local_tensor, place


def _offset(tensor: Any) -> list[int] | None:
    for name in ("torch.distributed.tensor._utils", "torch.distributed._tensor._utils"):
        module: Any = sys.modules.get(name)
        compute = getattr(module, "compute_local_shape_and_global_offset", None)
        if compute is None:
            continue
        try:
            _, offset = compute(tensor.shape, tensor.device_mesh, tensor.placements)
        except Exception:  # a placement that it does not know: then the offset is not known
            return None
        return [int(each) for each in offset]
    return None


def _named(model: object) -> Iterator[tuple[str, Any]]:
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


def _chosen(named: Mapping[str, Any], patterns: Iterable[str]) -> dict[str, Any]:
    patterns = [*patterns]
    found = {
        name: parameter
        for name, parameter in named.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    if patterns and not found:
        raise InvalidPlan(
            f"no parameter is named like {', '.join(patterns)}",
            expected=f"such as {', '.join([*named][:3])}",
        )
    if len(found) > MOST_TENSORS:
        raise InvalidPlan(
            f"{len(found)} parameters are named like {', '.join(patterns)}",
            expected=f"at most {MOST_TENSORS}",
        )
    return found
