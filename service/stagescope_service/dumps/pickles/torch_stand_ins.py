"""Stand-ins for classes of numpy, tensordict and torch while a file of torch.save is loaded.

torch's loader finds them by the names in the pickle (`STAND_INS`). Each parses the pickled state
itself, so neither numpy's nor tensordict's own unpickling sees untrusted bytes. Files of any
version of these libraries open, whether they are installed or not. Jagged tensors also open,
although torch accepts their class only in some versions, and since 2.15 no longer.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np

from stagescope_service.store.tensorfile import WireTensor
from stagescope_wire.tensorfile import Array

_NESTED: Final = "torch.nested._internal.nested_tensor"
SCALARS: Final = frozenset({int, float, bool, str, bytes, type(None)})
"""Types that are plain by themselves."""


@dataclasses.dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor of a file.

    Attributes:
        wire: (dtype tag, shape, read-only numpy buffer of that shape, offsets or None).
        was: the dtype's name in the file, if it has no tag and was widened without loss.
    """

    wire: WireTensor
    was: str | None = None


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """A value of a file that has no plain form; the rest of the file is read."""

    reason: str


FileLeaf: TypeAlias = "bool | int | float | str | bytes | FileTensor | Unreadable | None"
FileValue: TypeAlias = "FileLeaf | list[FileValue] | dict[str, FileValue]"
"""A plain value of a file."""


class PickledDtype:
    """`numpy.dtype('f4')` with the byte order of its state; objects are 'O'."""

    def __init__(self, code: str = "", *_: object) -> None:
        self.code = str(code).lstrip("<>=|")
        self.order = "<"

    def __setstate__(self, state: object) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else "<"
        self.order = order if order in ("<", ">") else "<"

    def to_numpy(self) -> np.dtype[np.generic]:
        """Return numpy's dtype.

        Raises:
            ValueError: objects, dates, records.
        """
        is_number = self.code[:1] in ("f", "i", "u", "b") and len(self.code) == 2
        is_text = self.code[:1] == "U" and self.code[1:].isdigit() and len(self.code) < 8
        if not (is_number or is_text):
            raise ValueError(f"dtype {self.code!r}")
        return np.dtype(self.order + self.code)


class PickledArray:
    """`numpy.ndarray`, from its pickled state."""

    def __init__(self, *_: object) -> None:
        self._state: Any = None  # whatever the pickle holds; `content` parses it

    def __setstate__(self, state: object) -> None:
        self._state = state

    def content(self) -> Array | list[FileValue]:
        """Return the array, or the list of an array of texts.

        Raises:
            ValueError, TypeError, IndexError: not the state of an array.
        """
        _, shape, dtype, is_fortran, data = self._state
        if isinstance(data, list):  # an array of objects, pickled one by one
            if not set(map(type, data)) <= SCALARS:
                raise ValueError("an array of objects")
            return data
        values = np.frombuffer(_bytes(data), dtype.to_numpy())
        if values.dtype.kind == "U":
            return [str(text) for text in values.tolist()]
        found: Array = values.reshape(shape, order="F" if is_fortran else "C")
        return np.ascontiguousarray(found, found.dtype.newbyteorder("="))


class PickledTensorDict:
    """`tensordict.TensorDict`, from its pickled state."""

    def __init__(self, *_: object) -> None:
        self._state: object = {}

    def __setstate__(self, state: object) -> None:
        self._state = state

    def content(self) -> object:
        """Return its items by name."""
        return self._state.get("_tensordict", {}) if isinstance(self._state, dict) else {}


class PickledJagged:
    """`torch.nested`'s tensor of the layout `jagged`, from its constructor's arguments."""

    def __init__(self, arguments: object = None) -> None:
        self._arguments = arguments

    def __setstate__(self, state: object) -> None:
        """Its sizes and strides, which follow from its values."""

    def content(self) -> tuple[object, object]:
        """Return its values and the offsets of its rows.

        Raises:
            ValueError: the values are not its rows in sequence, or it is damaged.
        """
        found = self._arguments if isinstance(self._arguments, dict) else {}
        if found.get("lengths") is not None or found.get("_ragged_idx") != 1:
            raise ValueError("its rows are not contiguous")
        return found.get("values"), found.get("offsets")


def _bytes(data: str | bytes) -> bytes:
    return data.encode("latin1") if isinstance(data, str) else bytes(data)


def _scalar(dtype: PickledDtype, data: str | bytes = b"") -> object:
    value: object = np.frombuffer(_bytes(data), dtype.to_numpy(), 1)[0].item()
    return value


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in {encoding}")
    return text.encode(encoding)


def _no_bytes(*arguments: object) -> bytes:
    """`bytes()`, as protocol 2 pickles the data of an empty array."""
    if arguments:
        raise pickle.UnpicklingError("bytes of something")
    return b""


def _make_td(_: object, state: object) -> PickledTensorDict:
    found = PickledTensorDict()
    found.__setstate__(state)
    return found


def _named(full_name: str, target: Callable[..., object]) -> Callable[..., object]:
    """Return a stand-in that torch finds by name; older torch reads it from the object itself."""
    module, _, name = full_name.rpartition(".")
    if isinstance(target, type):
        return type(name, (target,), {"__module__": module, "__qualname__": name})

    def stand_in(*args: object) -> object:
        return target(*args)

    stand_in.__module__, stand_in.__name__, stand_in.__qualname__ = module, name, name
    return stand_in


def _stand_ins() -> dict[str, Callable[..., object]]:
    array = _named("numpy.ndarray", PickledArray)
    jagged = _named(f"{_NESTED}.NestedTensor", PickledJagged)
    targets: dict[str, Callable[..., object]] = {
        "numpy.dtype": PickledDtype,
        "_codecs.encode": _encode,
        "builtins.bytes": _no_bytes,
        "__builtin__.bytes": _no_bytes,
        "tensordict._td.TensorDict": PickledTensorDict,
        "tensordict._reductions._make_td": _make_td,
    }
    for core in ("numpy.core", "numpy._core"):  # numpy 1 and 2
        targets[f"{core}.multiarray._reconstruct"] = lambda *_: array()
        targets[f"{core}.multiarray.scalar"] = _scalar
    targets[f"{_NESTED}._rebuild_njt"] = lambda arguments: jagged(arguments)
    classes = {"numpy.ndarray": array, f"{_NESTED}.NestedTensor": jagged}
    return classes | {name: _named(name, each) for name, each in targets.items()}


STAND_INS: Final = _stand_ins()
"""Full name in a pickle -> its stand-in."""
