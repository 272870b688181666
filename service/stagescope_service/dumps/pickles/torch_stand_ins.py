"""What stands for the classes of others while a file of torch's is loaded.

torch's loader finds these by the names that pickles say (`STAND_INS`). Each takes the pickled state
apart itself, so that neither numpy's nor tensordict's own unpickling sees a stranger's bytes, and
files of any version of them open, whether they are installed or not.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from stagescope_service.store.tensorfile import WireTensor

SCALARS: Final = frozenset({int, float, bool, str, bytes, type(None)})
"""Types that are plain by themselves."""


@dataclasses.dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor of a file.

    Attributes:
        wire: (dtype tag, shape, read-only numpy buffer of that shape, offsets or None).
        was: the dtype's name in the file, where no tag says it and it was widened without loss.
    """

    wire: WireTensor
    was: str | None = None


class Dtype:
    """`numpy.dtype('f4')` and the byte order that its state tells; objects are 'O'."""

    def __init__(self, code: str = "", *_: object) -> None:
        self.code = str(code).lstrip("<>=|")
        self.order = "<"

    def __setstate__(self, state: Any) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else "<"
        self.order = order if order in ("<", ">") else "<"

    def known(self) -> np.dtype[Any]:
        """Return numpy's dtype.

        Raises:
            ValueError: objects, dates, records.
        """
        is_number = self.code[:1] in ("f", "i", "u", "b") and len(self.code) == 2
        is_text = self.code[:1] == "U" and self.code[1:].isdigit() and len(self.code) < 8
        if not (is_number or is_text):
            raise ValueError(f"dtype {self.code!r}")
        return np.dtype(self.order + self.code)


class Array:
    """`numpy.ndarray`, from the state that its pickle holds."""

    def __init__(self, *_: object) -> None:
        self._state: Any = None

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def content(self) -> np.ndarray[Any, Any] | list[Any]:
        """Return the array, or the list of an array of texts.

        Raises:
            ValueError, TypeError, IndexError: not the state of an array.
        """
        _, shape, dtype, is_fortran, data = self._state
        if isinstance(data, list):  # an array of objects: what they are was told one by one
            if not set(map(type, data)) <= SCALARS:
                raise ValueError("an array of objects")
            return data
        values = np.frombuffer(_bytes(data), dtype.known())
        if values.dtype.kind == "U":
            return list(map(str, values.tolist()))
        found = values.reshape(shape, order="F" if is_fortran else "C")
        return np.ascontiguousarray(found, found.dtype.newbyteorder("="))


class TensorDict:
    """`tensordict.TensorDict`, from its pickled state."""

    def __init__(self, *_: object) -> None:
        self._state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def content(self) -> Any:
        """Return what it holds, by name."""
        return self._state.get("_tensordict", {}) if isinstance(self._state, dict) else {}


def _bytes(data: Any) -> bytes:
    return data.encode("latin1") if isinstance(data, str) else bytes(data)


def _scalar(dtype: Any, data: Any = b"") -> Any:
    return np.frombuffer(_bytes(data), dtype.known(), 1)[0].item()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in {encoding}")
    return text.encode(encoding)


def _no_bytes(*given: object) -> bytes:
    """`bytes()`, as protocol 2 says the data of an empty array."""
    if given:
        raise pickle.UnpicklingError("bytes of something")
    return b""


def _make_td(_: object, state: Any) -> Any:
    found = TensorDict()
    found.__setstate__(state)
    return found


def _named(full_name: str, target: Callable[..., Any]) -> Any:
    """Return a stand-in that torch finds by the name; older torch asks the object itself."""
    module, _, name = full_name.rpartition(".")
    where = {"__module__": module, "__qualname__": name}
    if isinstance(target, type):
        return type(name, (target,), where)

    def stand_in(*args: Any) -> Any:
        return target(*args)

    stand_in.__module__, stand_in.__name__, stand_in.__qualname__ = module, name, name
    return stand_in


def _stand_ins() -> dict[str, Any]:
    array = _named("numpy.ndarray", Array)
    targets: dict[str, Callable[..., Any]] = {
        "numpy.dtype": Dtype,
        "_codecs.encode": _encode,
        "builtins.bytes": _no_bytes,
        "__builtin__.bytes": _no_bytes,
        "tensordict._td.TensorDict": TensorDict,
        "tensordict._reductions._make_td": _make_td,
    }
    for core in ("numpy.core", "numpy._core"):  # numpy 1 and 2
        targets[f"{core}.multiarray._reconstruct"] = lambda *_: array()
        targets[f"{core}.multiarray.scalar"] = _scalar
    return {"numpy.ndarray": array} | {name: _named(name, each) for name, each in targets.items()}


STAND_INS: Final = _stand_ins()
"""Name -> what stands for it."""
