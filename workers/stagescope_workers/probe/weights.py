"""What a rank says of its weights: a checksum, dtype, shape and shard for each name.

Nothing here waits for a device or talks to another rank: of a DTensor the local shard is summed,
and where it lies in the whole is told beside it.

torch is never imported here: see `checksum`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from stagescope.wire.errors import InvalidInput, StagescopeError
from stagescope.wire.schema import WEIGHT_KINDS, WEIGHT_SIDES, WEIGHTS, Work
from stagescope_workers.checksum import checksum, unsigned
from stagescope_workers.device import HostCopy, take_tensor
from stagescope_workers.payload import describe, is_torch
from stagescope_workers.probe import identity
from stagescope_workers.probe.options import index, step_index
from stagescope_workers.probe.reporter import Reporter

NamedTensors = Mapping[str, object] | Iterable[tuple[str, object]]
Names = Mapping[str, str] | Callable[[str], str] | None

_MOST_NAME: Final = 1000


def record_weights(
    probe: Reporter,
    named_tensors: NamedTensors,
    *,
    version: int,
    side: str,
    step: int | None,
    kind: str,
    names: Names,
    replicated: Sequence[str] | bool,
) -> None:
    """Queue one WEIGHTS event; see `Probe.record_weights`.

    Raises:
        InvalidInput: a version, side, kind, rule or collection of weights that cannot be right.
    """
    work = Work(step_index(step), _version(version), None)
    _check_word("side", side, WEIGHT_SIDES)
    _check_word("kind", kind, WEIGHT_KINDS)
    rename, is_copy = _renaming(names), _copies(replicated)
    weights, errors = _Weights(), []
    for given, value in _pairs(named_tensors):
        try:
            name = _checked(rename(given))
            weights.add(name, value, "copy" if is_copy(name) else _shard_of(value))
        except StagescopeError as error:  # noqa: PERF203 - the others are to be taken
            errors.append(error)
    awaits = weights.fetch(probe)
    fields = work.fields() | {"side": side, "kind": kind, "tensors": weights.tensors}

    def finalise(fields: dict[str, Any]) -> None:
        weights.settle()
        fields["device"] = identity.device_in_use()

    probe.outbox.put(WEIGHTS, fields, awaits=awaits, finalise=finalise)
    if errors:
        probe.refuse("record_weights", _together(errors), work)


class _Weights:
    """The tensors of one call, and the checksums that a device still computes."""

    def __init__(self) -> None:
        self.tensors: list[tuple[Any, ...]] = []
        self._seen: set[str] = set()
        self._on_device: dict[Any, tuple[list[int], list[Any]]] = {}
        self._fetched: list[tuple[list[int], Any]] = []

    def add(self, name: str, value: Any, shard: Any) -> None:
        """Take a weight's checksum; one that cannot be taken is unknown, and said."""
        if name in self._seen:
            raise InvalidInput(
                f"two weights are called {name}",
                expected="each name once in a call",
                advice="let `names` map them to different ones",
            )
        self._seen.add(name)
        local = value.to_local() if _is_dtensor(value) else value
        shape = tuple(int(size) for size in getattr(local, "shape", ()))
        dtype = str(getattr(local, "dtype", "")).removeprefix("torch.")
        place = len(self.tensors)
        self.tensors.append((name, None, dtype, shape, shard))
        try:
            found = checksum(local)
        except StagescopeError as error:
            raise InvalidInput(f"{name}: {error}", expected="weights with data") from error
        if is_torch(found):
            places, sums = self._on_device.setdefault(found.device, ([], []))
            places.append(place)
            sums.append(found)
        else:
            self._put(place, found)

    def fetch(self, probe: Reporter) -> list[HostCopy]:
        """Queue the copies of what devices compute; return what is to be waited for."""
        torch = sys.modules.get("torch")
        for places, sums in self._on_device.values():
            assert torch is not None
            taken = take_tensor("checksums", torch.stack(sums), probe.pool)
            self._fetched.append((places, taken))
        self._on_device.clear()
        return [taken for _, taken in self._fetched if isinstance(taken, HostCopy)]

    def settle(self) -> None:
        """Put the devices' checksums in their places. Not for the training thread."""
        fetched, self._fetched = self._fetched, []
        for places, taken in fetched:
            wire = taken.finish() if isinstance(taken, HostCopy) else taken
            for place, found in zip(places, wire[2].tolist(), strict=True):
                self._put(place, unsigned(found))

    def _put(self, place: int, found: int) -> None:
        name, _, *rest = self.tensors[place]
        self.tensors[place] = (name, found, *rest)


def _together(errors: Sequence[StagescopeError]) -> StagescopeError:
    # Of a thousand weights of a kind that cannot be read, one is enough to say.
    if len(errors) == 1:
        return errors[0]
    return InvalidInput(f"{errors[0]} ({len(errors) - 1} more weights have no checksum)")


# --- what a call was given --------------------------------------------------------------------


def _version(version: object) -> int:
    number = index("version", version)
    if number is None:
        raise InvalidInput("version is None", expected="the policy version of these weights")
    return number


def _check_word(name: str, value: object, words: Sequence[str]) -> None:
    if value not in words:
        raise InvalidInput(f"{name} is {value!r:.100}", expected=f"one of {', '.join(words)}")


def _pairs(named_tensors: object) -> Iterator[tuple[Any, object]]:
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
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME or not name.isprintable():
        raise InvalidInput(
            f"a weight is called {name!r:.200}",
            expected=f"a printable name of 1 to {_MOST_NAME} characters",
        )
    return name


def _renaming(names: object) -> Callable[[Any], object]:
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


def _copies(replicated: Sequence[str] | bool) -> Callable[[str], bool]:
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
            f"{pattern!r:.200} is no regular expression ({error})", expected="one of Python's re"
        ) from error


# --- shards -----------------------------------------------------------------------------------


def _is_dtensor(value: object) -> bool:
    return is_torch(value) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def _shard_of(value: Any) -> Any:
    """Return where a tensor lies in its whole, as the schema's WEIGHTS says."""
    if _is_dtensor(value):
        return _dtensor_shard(value)
    # Megatron-LM marks each parameter: cut up over the tensor-parallel ranks, or copied to them.
    is_cut = getattr(value, "tensor_model_parallel", None)
    return "tp copy" if is_cut is False else None


def _dtensor_shard(value: Any) -> tuple[Any, ...]:
    mesh = value.device_mesh
    dims = [str(name) for name in mesh.mesh_dim_names or ()]
    coordinate = mesh.get_coordinate() or ()
    words = []
    for at, placement in enumerate(value.placements):
        where = "" if placement.is_replicate() else f" {coordinate[at]} of {mesh.size(at)}"
        words.append(f"{dims[at] if dims else at}: {placement!r}{where}")
    return (tuple(map(int, value.shape)), _offsets(value), ", ".join(words), tuple(dims))


def _offsets(value: Any) -> tuple[int, ...] | None:
    """Return the first element's place in the whole; None where torch cannot say it.

    torch keeps the function, which knows of uneven and strided shards, in a private module.
    """
    if any(placement.is_partial() for placement in value.placements):
        return None
    for room in ("torch.distributed.tensor._utils", "torch.distributed._tensor._utils"):
        locate = getattr(sys.modules.get(room), "compute_local_shape_and_global_offset", None)
        if locate is not None:
            _, offsets = locate(value.shape, value.device_mesh, value.placements)
            return tuple(map(int, offsets))
    return None
