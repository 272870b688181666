"""Reading files of `torch.save` without running any code in them.

Only this file imports torch, and only if necessary: `plain_torch_file` reads plain files. Others
are loaded with `torch.load(weights_only=True)`. Besides torch's own tensors, that accepts only the
names of `torch_stand_ins`: numpy's scalars, dtypes and arrays, TensorDict, and jagged tensors.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from stagescope_service.dumps.pickles.pickle_scan import check_zip, globals_of, size_of_file
from stagescope_service.dumps.pickles.plain_torch_file import NotPlain, read_plain
from stagescope_service.dumps.pickles.torch_stand_ins import (
    SCALARS,
    STAND_INS,
    FileTensor,
    FileValue,
    PickledArray,
    PickledJagged,
    PickledTensorDict,
    Unreadable,
)
from stagescope_service.store.tensorfile import MAX_BYTES
from stagescope_wire.errors import Forbidden, InvalidTensor, MissingExtra
from stagescope_wire.tensorfile import Array
from stagescope_wire.tensors import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

__all__ = [
    "FileTensor",
    "FileValue",
    "Unreadable",
    "check_torch",
    "read_torch_file",
    "save_torch_file",
]

MAX_COPIED_BYTES: Final = 4 << 30
"""Bytes that a file's tensors may need beyond the file's size: tensors that are not contiguous in
it (expanded, transposed) are copied."""
_DEPTH: Final = 64
_REFUSED_GLOBAL: Final = re.compile(r"GLOBAL ([A-Za-z_][\w.]*\w) ")
"""The name in torch's own refusal."""
_WIDER: Final = {"uint16": "int32", "uint32": "int64"}

_globals_lock = threading.Lock()


def read_torch_file(path: Path, *, most_bytes: int = MAX_BYTES) -> FileValue:
    """Read a file that `torch.save` wrote.

    Args:
        path: the file; its storages are mapped if it is a zip file (torch 1.6 and later).
        most_bytes: a larger file is refused.

    Returns:
        The saved value as dicts with texts as keys, lists, numbers, texts, bytes and None. Tensors
        and numpy arrays are `FileTensor` (views of the mapped file), anything else is
        `Unreadable`.

    Raises:
        NotFound: there is no such file.
        InvalidTensor: truncated, damaged, compressed, or too large.
        Forbidden: it holds more than tensors and plain values; the message names them.
        MissingExtra: it needs torch's own loader, and torch is not installed.
        StoreError: the disk reported an error.
    """
    size = size_of_file(path, most_bytes)
    is_zip = check_zip(path, size)
    if is_zip:  # nearly every file: without torch
        with contextlib.suppress(NotPlain):
            return _PlainValues(path, size)(read_plain(path))
    return _PlainValues(path, size)(_load(path, mapped=is_zip))


def check_torch() -> None:
    """Check that files can be written by torch.

    Raises:
        MissingExtra: torch is not installed.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            "a .pt file is written by torch, which is not installed here",
            advice="pip install torch, or choose another format",
        ) from error


def save_torch_file(path: Path, content: FileValue) -> None:
    """Write plain values and `FileTensor` as `torch.save` does, with real tensors.

    Raises:
        MissingExtra: torch is not installed.
        OSError: the disk reported an error.
    """
    check_torch()
    import torch

    def with_tensors(value: FileValue) -> object:
        if isinstance(value, dict):
            return {name: with_tensors(item) for name, item in value.items()}
        if not isinstance(value, FileTensor):
            return value
        tag, _, values, _ = value.wire
        values = np.array(values)  # torch wants a buffer that may be written
        if tag == "bfloat16":
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    torch.save(with_tensors(content), path)


def _load(path: Path, *, mapped: bool) -> object:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra(
            f"{path} was written by torch.save, and torch is not installed here",
            advice="pip install torch",
        ) from error
    try:
        with _only_stand_ins(torch.serialization):
            loaded: object = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            return loaded
    except Exception as error:  # damaged pickles raise nearly everything
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(f"{path} could not be loaded: {error}") from error
        raise _refusal(path, error) from error


@contextlib.contextmanager
def _only_stand_ins(serialization: ModuleType) -> Iterator[None]:
    """Let torch accept only the stand-ins and its own names while a file is loaded.

    torch has one list per process: afterwards the process's own list is restored.
    """
    with _globals_lock:
        before = serialization.get_safe_globals()
        of_torch = [each for each in before if _is_of_torch(each)]
        serialization.clear_safe_globals()
        try:
            serialization.add_safe_globals([*of_torch, *STAND_INS.values()])
            yield
        finally:
            serialization.clear_safe_globals()
            serialization.add_safe_globals(before)


def _is_of_torch(allowed: object) -> bool:
    """Return whether torch itself accepts it, and it has no stand-in."""
    target = allowed[0] if isinstance(allowed, tuple) else allowed
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    return str(module).startswith("torch.") and f"{module}.{name}" not in STAND_INS


def _refusal(path: Path, error: Exception) -> InvalidTensor | Forbidden:
    needed: list[str] = []
    if isinstance(error, pickle.UnpicklingError):
        refused = _REFUSED_GLOBAL.findall(str(error))
        needed = [name for name in (*globals_of(path), *refused) if not _is_accepted(name)]
    if needed:
        names = ", ".join([*dict.fromkeys(needed)][:10])
        return Forbidden(
            f"{path} needs {names} to be loaded, which may run code",
            expected="tensors, numpy arrays, TensorDicts, numbers and texts alone",
            advice="load it where those classes exist, and save plain values in their place",
        )
    # torch's own text advises to load it with weights_only=False.
    reason = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    reason = "" if "weights_only" in reason else f": {reason[:300].strip()}"
    return InvalidTensor(
        f"{path} cannot be loaded: {type(error).__name__}{reason}",
        expected="a whole file that torch.save wrote",
        advice="it is damaged, or of another format",
    )


def _is_accepted(name: str) -> bool:
    try:
        from torch._weights_only_unpickler import _get_allowed_globals
    except ImportError:
        return name.startswith(("torch.", "collections.", "_codecs."))
    return name in STAND_INS or name in _get_allowed_globals()


class _PlainValues:
    """Converts loaded values to plain ones; bounded by the size of the file."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        # An element takes at least a byte of a pickle, unless it is referenced many times.
        self._nodes = size
        self._copied = MAX_COPIED_BYTES

    def __call__(self, value: Any, depth: int = 0) -> FileValue:  # any object that torch loaded
        kind = type(value)
        if kind in SCALARS:
            scalar: FileValue = value
            return scalar
        if depth > _DEPTH:
            raise InvalidTensor(f"{self._path} is nested deeper than {_DEPTH}")
        if isinstance(value, FileTensor):
            return value
        if isinstance(value, PickledTensorDict):
            return self(value.content(), depth + 1)
        if isinstance(value, PickledArray):
            return self._array(value)
        if isinstance(value, PickledJagged):
            return self._pickled_jagged(value)
        if isinstance(value, dict):
            self._count(len(value))
            return {_key(name): self(item, depth + 1) for name, item in value.items()}
        if isinstance(value, list | tuple | set):
            self._count(len(value))
            if set(map(type, value)) <= SCALARS:  # long lists of token ids are not walked
                return value if type(value) is list else list(value)
            return [self(item, depth + 1) for item in value]
        if hasattr(value, "detach") and hasattr(value, "layout"):
            return self._tensor(value)
        return Unreadable(f"a {kind.__module__}.{kind.__qualname__}")

    def _count(self, elements: int) -> None:
        self._nodes -= elements
        if self._nodes < 0:
            raise InvalidTensor(
                f"{self._path} holds more values than bytes", expected="a file without tricks"
            )

    def _array(self, value: PickledArray) -> FileValue:
        try:
            found = value.content()
        except (ValueError, TypeError, KeyError, IndexError) as error:
            return Unreadable(f"a numpy array: {error}")
        return found if isinstance(found, list) else self._numpy(found, str(found.dtype))

    def _pickled_jagged(self, value: PickledJagged) -> FileTensor | Unreadable:
        try:
            return self._jagged(*value.content())
        except (ValueError, TypeError, AttributeError) as error:
            return Unreadable(f"a jagged tensor: {error}")

    def _jagged(self, values: Any, offsets: Any) -> FileTensor | Unreadable:
        starts = offsets.detach().numpy().astype(np.int64, casting="safe", copy=False)
        if starts.ndim != 1 or [*starts[:1], *starts[-1:]] != [0, len(values)]:
            raise ValueError("its offsets are not those of its values")
        if (np.diff(starts) < 0).any():
            raise ValueError("its offsets fall")
        return self._tensor(values, starts)

    def _tensor(
        self, tensor: torch.Tensor, offsets: Array | None = None
    ) -> FileTensor | Unreadable:
        tensor = tensor.detach()
        if tensor.is_nested and str(tensor.layout) == "torch.jagged":
            jagged: Any = tensor  # torch's type does not declare `offsets`
            arguments = {
                "values": jagged.values(), "offsets": jagged.offsets(),
                "lengths": jagged.lengths(), "_ragged_idx": jagged._ragged_idx,
            }  # fmt: skip
            return self._pickled_jagged(PickledJagged(arguments))
        name = str(tensor.dtype).removeprefix("torch.")
        plain = str(tensor.layout) == "torch.strided" and tensor.device.type == "cpu"
        if tensor.is_nested or tensor.is_quantized or not plain or name.startswith("complex"):
            return Unreadable(f"a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}")
        if not tensor.is_contiguous():
            self._copied -= tensor.numel() * tensor.element_size()
            if self._copied < 0:
                raise InvalidTensor(
                    f"{self._path} holds tensors of far more values than it has bytes",
                    expected=f"at most {MAX_COPIED_BYTES} bytes of expanded or strided tensors",
                )
            tensor = tensor.contiguous()
        if name.startswith("float8"):
            return self._numpy(tensor.float().numpy(), "float32", offsets, was=name)
        if name == "bfloat16":
            import torch

            return self._numpy(tensor.view(torch.int16).numpy().view(np.uint16), name, offsets)
        return self._numpy(tensor.numpy(), name, offsets)

    def _numpy(
        self,
        values: Array,
        name: str,
        offsets: Array | None = None,
        *,
        was: str | None = None,
    ) -> FileTensor | Unreadable:
        if name in _WIDER:
            values, was, name = values.astype(_WIDER[name]), name, _WIDER[name]
        if name not in DTYPE_BYTES:
            return Unreadable(f"an array of {name}")
        values = values.view()
        values.flags.writeable = False
        return FileTensor((name, values.shape, values, offsets), was)


def _key(name: object) -> str:
    if isinstance(name, str | int | float | bool | None):
        return str(name)
    raise InvalidTensor(f"a dict has a {type(name).__name__} as key", expected="texts")
