"""Reports a rank's weights: a checksum, dtype, shape and shard for each name.

Nothing here waits for a device or communicates with another rank. For a DTensor, the checksum
covers the local shard, and its location in the full tensor is reported too.

torch is never imported here: see `checksum`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from stagescope_wire.errors import InvalidInput, StagescopeError
from stagescope_wire.schema import WEIGHT_KINDS, WEIGHT_SIDES, WEIGHTS, Work
from stagescope_workers.capture.shards import shard_offset
from stagescope_workers.checksum import checksum, unsigned
from stagescope_workers.device import HostCopy, copy_tensor
from stagescope_workers.payload import WireTensor, describe, is_torch
from stagescope_workers.probe import identity
from stagescope_workers.probe.options import index, step_index
from stagescope_workers.probe.reporter import Reporter

if TYPE_CHECKING:
    import torch

NamedTensors = Mapping[str, object] | Iterable[tuple[str, object]]
Names = Mapping[str, str] | Callable[[str], str] | None
Shard: TypeAlias = "str | tuple[object, ...] | None"
"""The shard of a tensor in a WEIGHTS event: see there."""

_MAX_NAME: Final = 1000


class WeightsInfo(NamedTuple):
    """The version and origin of some weights; see `Probe.record_weights`."""

    version: int
    side: str
    step: int | None
    kind: str


def record_weights(
    probe: Reporter,
    named_tensors: NamedTensors,
    info: WeightsInfo,
    *,
    names: Names,
    replicated: Sequence[str] | bool,
) -> None:
    """Queue one WEIGHTS event; see `Probe.record_weights`.

    Raises:
        InvalidInput: an invalid version, side, kind, rule or collection of weights.
    """
    work = Work(step_index(info.step), _version(info.version), None)
    _check_choice("side", info.side, WEIGHT_SIDES)
    _check_choice("kind", info.kind, WEIGHT_KINDS)
    rename, is_copy = _renaming(names), _replication(replicated)
    weights, errors = _Checksums(), []
    for original, value in _pairs(named_tensors):
        try:
            name = _checked(rename(original))
            weights.add(name, value, "copy" if is_copy(name) else _shard(value))
        except StagescopeError as error:  # noqa: PERF203 - the others are still added
            errors.append(error)
    awaits = weights.fetch(probe)
    fields = work.fields() | {"side": info.side, "kind": info.kind, "tensors": weights.tensors}

    def finalise(fields: dict[str, object]) -> None:
        weights.settle()
        fields["device"] = identity.device_in_use()

    probe.outbox.put(WEIGHTS, fields, awaits=awaits, finalise=finalise)
    if errors:
        probe.refuse("record_weights", _merge_errors(errors), work)


class _Checksums:
    def __init__(self) -> None:
        self.tensors: list[tuple[object, ...]] = []
        self._names: set[str] = set()
        self._on_device: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
        self._fetched: list[tuple[list[int], HostCopy | WireTensor]] = []

    def add(self, name: str, value: Any, shard: Shard) -> None:
        """Add a weight's checksum; an error leaves the weight in the list without one."""
        if name in self._names:
            raise InvalidInput(
                f"two weights are called {name}",
                expected="each name once in a call",
                advice="let `names` map them to different ones",
            )
        self._names.add(name)
        local = value.to_local() if _is_dtensor(value) else value
        shape = tuple(int(size) for size in getattr(local, "shape", ()))
        dtype = str(getattr(local, "dtype", "")).removeprefix("torch.")
        position = len(self.tensors)
        self.tensors.append((name, None, dtype, shape, shard))
        try:
            found = checksum(local)
        except StagescopeError as error:
            raise InvalidInput(f"{name}: {error}", expected="weights with data") from error
        if isinstance(found, int):
            self._set(position, found)
        else:
            positions, checksums = self._on_device.setdefault(found.device, ([], []))
            positions.append(position)
            checksums.append(found)

    def fetch(self, probe: Reporter) -> list[HostCopy]:
        """Queue copies of the devices' results; return those to wait for."""
        for positions, checksums in self._on_device.values():
            stacked = sys.modules["torch"].stack(checksums)
            self._fetched.append((positions, copy_tensor("checksums", stacked, probe.pool)))
        self._on_device.clear()
        return [copy for _, copy in self._fetched if isinstance(copy, HostCopy)]

    def settle(self) -> None:
        """Enter the devices' checksums into `tensors`; not for the training thread."""
        fetched, self._fetched = self._fetched, []
        for positions, copy in fetched:
            wire = copy.finish() if isinstance(copy, HostCopy) else copy
            for position, bits in zip(positions, wire[2].tolist(), strict=True):
                self._set(position, unsigned(bits))

    def _set(self, position: int, checksum: int) -> None:
        name, _, *rest = self.tensors[position]
        self.tensors[position] = (name, checksum, *rest)


def _merge_errors(errors: Sequence[StagescopeError]) -> StagescopeError:
    # A thousand weights of an unsupported kind make one message.
    if len(errors) == 1:
        return errors[0]
    return InvalidInput(f"{errors[0]} ({len(errors) - 1} more weights have no checksum)")


# --- arguments of a call ----------------------------------------------------------------------


def _version(version: object) -> int:
    number = index("version", version)
    if number is None:
        raise InvalidInput("version is None", expected="the policy version of these weights")
    return number


def _check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise InvalidInput(f"{name} is {value!r:.100}", expected=f"one of {', '.join(allowed)}")


def _pairs(named_tensors: object) -> Iterator[tuple[object, object]]:
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    if not isinstance(pairs, Iterable) or is_torch(pairs):
        raise InvalidInput(
            f"the weights are {describe(pairs)}",
            expected="a mapping of names to tensors, or pairs of them",
        )
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidInput(f"among the weights is {describe(pair)}", expected="(name, tensor)")
        yield pair[0], pair[1]


def _checked(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise InvalidInput(
            f"a weight is called {name!r:.200}",
            expected=f"a printable name of 1 to {_MAX_NAME} characters",
        )
    return name


def _renaming(names: object) -> Callable[[object], object]:
    if names is None:
        return lambda name: name
    if callable(names):
        return names
    if not isinstance(names, Mapping):
        raise InvalidInput(
            f"names is {describe(names)}", expected="{pattern: replacement}, or a function"
        )
    rules = [(_pattern(pattern), replacement) for pattern, replacement in names.items()]

    def rename(name: object) -> object:
        name = _checked(name)
        for pattern, replacement in rules:
            name = pattern.sub(replacement, name)
        return name

    return rename


def _replication(replicated: Sequence[str] | bool) -> Callable[[str], bool]:
    if isinstance(replicated, bool):
        return lambda _: bool(replicated)
    if isinstance(replicated, str):
        replicated = [replicated]
    patterns = [_pattern(pattern) for pattern in replicated]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def _pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise InvalidInput(
            f"{pattern!r:.200} is not a regular expression ({error})", expected="one of Python's re"
        ) from error


# --- shards -----------------------------------------------------------------------------------


def _is_dtensor(value: object) -> bool:
    return is_torch(value) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def _shard(value: object) -> Shard:
    """Return the `shard` of a tensor, as the schema's WEIGHTS defines it."""
    if _is_dtensor(value):
        return _dtensor_shard(value)
    # Megatron-LM marks each parameter: sharded over the tensor-parallel ranks, or replicated.
    is_sharded = getattr(value, "tensor_model_parallel", None)
    return "tp copy" if is_sharded is False else None


def _dtensor_shard(value: Any) -> tuple[object, ...]:
    mesh = value.device_mesh
    dims = [str(name) for name in mesh.mesh_dim_names or ()]
    coordinate = mesh.get_coordinate() or ()
    placements = []
    for dim, placement in enumerate(value.placements):
        shard = "" if placement.is_replicate() else f" {coordinate[dim]} of {mesh.size(dim)}"
        placements.append(f"{dims[dim] if dims else dim}: {placement!r}{shard}")
    offset = shard_offset(value)
    offsets = None if offset is None else tuple(offset)
    return (tuple(map(int, value.shape)), offsets, ", ".join(placements), tuple(dims))
