"""Converts the tensors of a training process to the flat host buffers of the wire.

`host_tensor` reads the types that trainers use (torch dense, nested or jagged on any device, numpy,
lists). It returns a `WireTensor`: `(dtype tag, shape, numpy buffer, offsets or None)`. bfloat16,
which numpy lacks, is a uint16 view of the same bits. A list of 1-D tensors and a jagged tensor
become one packed buffer with offsets int64 [rows + 1].

torch is never imported here: a value can only be a torch tensor where torch is loaded already.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from stagescope_wire.errors import InvalidTensor
from stagescope_wire.tensorfile import WireTensor as WireTensor
from stagescope_wire.tensors import DTYPE_BYTES, INTEGER_TENSORS, PAYLOAD_STRINGS, PER_TOKEN

if TYPE_CHECKING:
    import torch

Array: TypeAlias = npt.NDArray[Any]
"""An array of any shape and dtype."""

MIN_BYTES: Final = 64 << 10
"""Smaller arrays are not pooled: the allocator is fast for them."""
IDLE_BYTES: Final = 128 << 20
"""The limit on unused bytes in a process."""


class _Lease:
    """Owns a buffer for one array and its views; numpy references it as their base."""

    def __init__(self, pool: BufferPool, buffer: npt.NDArray[np.uint8]) -> None:
        self._pool = pool
        self._buffer = buffer
        self.__array_interface__ = buffer.__array_interface__

    def __del__(self) -> None:
        self._pool.release(self._buffer)


class BufferPool:
    """Buffers by size; the ones used last are reused first. Thread-safe.

    Args:
        idle_bytes: the limit on unused bytes; beyond it the oldest buffers are freed.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self.idle_bytes = idle_bytes
        self.idle = 0
        """Unused bytes."""
        # size -> buffers, the sizes that were used longest ago first
        self._free: OrderedDict[int, list[npt.NDArray[np.uint8]]] = OrderedDict()
        # Reentrant: the garbage collector may release a buffer at any moment, even in here.
        self._lock = threading.RLock()

    def copy(self, array: Array) -> Array:
        """Return a C-contiguous copy of `array` in memory of its own."""
        if array.nbytes < MIN_BYTES:
            return np.array(array, order="C", copy=True)
        lease = _Lease(self, self._acquire(_size_class(array.nbytes)))
        raw: npt.NDArray[np.uint8] = np.asarray(lease)
        copy = raw[: array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return copy

    def _acquire(self, size: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            buffers = self._free.get(size)
            if buffers:
                self.idle -= size
                return buffers.pop()
        return np.empty(size, np.uint8)

    def release(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Return an unused buffer to the pool."""
        with self._lock:
            size = buffer.nbytes
            self._free.setdefault(size, []).append(buffer)
            self._free.move_to_end(size)
            self.idle += size
            while self.idle > self.idle_bytes:
                oldest, buffers = next(iter(self._free.items()))
                if buffers:
                    buffers.pop()
                    self.idle -= oldest
                else:
                    del self._free[oldest]


def _size_class(nbytes: int) -> int:
    """Round up to one of four sizes per power of two, so that similar batches share buffers."""
    step = 1 << max(nbytes.bit_length() - 3, 0)
    return -(-nbytes // step) * step


POOL: Final = BufferPool()
"""The pool of this process."""


IntArray: TypeAlias = npt.NDArray[np.int64]

_EXPECTED: Final = f"one of {', '.join(DTYPE_BYTES)}"
# numpy has unsigned types that the wire lacks; the next wider signed one holds the same values.
_WIDER: Final = {"uint16": "int32", "uint32": "int64"}
_ACCEPTED: Final = frozenset({*DTYPE_BYTES, *_WIDER})


class Spec(NamedTuple):
    """The description of a tensor, without its data."""

    tag: str
    shape: tuple[int, ...]
    rows: int | None
    """Rows of a packed tensor, else None."""

    @property
    def nbytes(self) -> int:
        """Bytes of the data (offsets not counted)."""
        return math.prod(self.shape) * DTYPE_BYTES[self.tag]


def host_tensor(name: str, value: object) -> WireTensor:
    """Return `value` as a host buffer, sharing its memory where that is possible.

    A tensor on a device is copied to the host, and the call waits for it.

    Args:
        name: the tensor's name in the payload, for messages.
        value: a torch tensor (dense, nested or jagged), a numpy array, a list or tuple of numbers
            or of 1-D tensors, arrays or lists.

    Raises:
        InvalidTensor: a dtype, layout or nesting that the wire does not support.
    """
    if is_torch(value):
        return _from_torch(name, value)
    if isinstance(value, list | tuple):
        return _from_sequence(name, value)
    return _from_array(name, value)


def owned_tensor(name: str, value: object) -> WireTensor:
    """Return `host_tensor(name, value)` in memory of its own, with at most one copy."""
    tag, shape, buffer, offsets = host_tensor(name, value)
    if not _is_fresh(value):
        buffer = POOL.copy(buffer)
        offsets = None if offsets is None else offsets.copy()
    return tag, shape, np.ascontiguousarray(buffer).reshape(shape), offsets


def wire_spec(tensor: WireTensor) -> Spec:
    """Return the description of a tensor on the host."""
    tag, shape, _, offsets = tensor
    return Spec(tag, shape, None if offsets is None else len(offsets) - 1)


def is_torch(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether `value` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    kind = getattr(torch, "Tensor", None)
    return kind is not None and isinstance(value, kind)


@functools.lru_cache(maxsize=64)
def dtype_tag(dtype: object) -> str:
    """Return the wire's name of a torch dtype, even where the wire does not support it."""
    return str(dtype).removeprefix("torch.")


def is_tensor_like(value: object) -> bool:
    """Return whether `record` treats `value` as a tensor (otherwise it is metadata)."""
    if is_torch(value) or isinstance(value, np.ndarray):
        return True
    if not isinstance(value, list | tuple):
        return False
    return all(
        is_tensor_like(item) or isinstance(item, bool | int | float | np.number | np.bool_)
        for item in value
    )


def strings_from(name: str, value: object) -> list[str] | None:
    """Return `value` as a list of strings if it is one (numpy object arrays too), else None.

    Raises:
        InvalidTensor: `name` is a list of ids by the schema, and `value` is not a 1-D sequence.
    """
    is_ids = name in PAYLOAD_STRINGS
    if isinstance(value, np.ndarray) and (is_ids or value.dtype.kind in "OUS") and value.ndim == 1:
        value = value.tolist()
    elif is_ids and is_torch(value):
        value = host_tensor(name, value)[2].tolist()
    if isinstance(value, list | tuple):
        if is_ids:
            return [str(item) for item in value]
        if value and all(isinstance(item, str) for item in value):
            return list(value)
    if is_ids:
        raise InvalidTensor(
            f"{name} is {describe(value)}", expected="a list with one id for each row"
        )
    return None


def describe(value: object) -> str:
    """Describe `value` by type, shape and dtype."""
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    kind = type(value).__name__
    if shape is None:
        length = f" of {len(value)}" if isinstance(value, Sequence) else ""
        return f"a {kind}{length}"
    return f"a {kind} of shape {tuple(shape)} and dtype {str(dtype).removeprefix('torch.')}"


def _invalid(name: str, value: object, expected: str, advice: str = "") -> InvalidTensor:
    return InvalidTensor(f"{name} is {describe(value)}", expected=expected, advice=advice)


def _is_fresh(value: object) -> bool:
    """Return whether `host_tensor` allocates new memory for `value`."""
    if is_torch(value):
        return bool(value.device.type != "cpu")
    return isinstance(value, list | tuple)


def _from_torch(name: str, value: torch.Tensor) -> WireTensor:
    # A nested tensor is split first: before torch 2.5 a detached one loses its gaps.
    tensor = value if value.is_nested else value.detach()
    check_torch(name, tensor)
    if not tensor.is_nested:
        return _from_dense(name, tensor)
    packed = jagged_parts(tensor)
    if packed is None:
        return _from_sequence(name, [row.detach() for row in tensor.unbind()])
    values, offsets = packed
    tag, shape, buffer, _ = _from_dense(name, values)
    return tag, shape, buffer, _from_dense(name, offsets)[2].astype(np.int64, copy=False)


def check_torch(name: str, tensor: torch.Tensor) -> None:
    """Refuse torch tensors whose data cannot be copied.

    Raises:
        InvalidTensor: a DTensor, a sparse, quantised or meta tensor, or a dtype without a tag.
    """
    if hasattr(tensor, "device_mesh"):
        raise _invalid(
            name, tensor, "a local tensor", "record tensor.to_local() with its own rows and tokens"
        )
    if tensor.device.type == "meta" or tensor.is_sparse or tensor.is_quantized:
        raise _invalid(name, tensor, "a dense or jagged tensor with data")
    if dtype_tag(tensor.dtype) not in _ACCEPTED:
        raise _invalid(name, tensor, _EXPECTED, "cast it, for example with .float()")


def jagged_parts(tensor: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (values, offsets) of a jagged tensor whose rows have no gaps, else None."""
    if not str(tensor.layout).endswith("jagged"):
        return None
    # With separate lengths, rows have gaps between them; a transposed one is ragged elsewhere.
    if tensor.lengths() is not None or getattr(tensor, "_ragged_idx", 1) != 1:
        return None
    return tensor.values().detach(), tensor.offsets()


def _from_dense(name: str, tensor: torch.Tensor) -> WireTensor:
    tag = dtype_tag(tensor.dtype)
    shape = tuple(int(size) for size in tensor.shape)
    try:
        host = tensor if tensor.device.type == "cpu" else tensor.cpu()
        if tag == "bfloat16":
            host = host.view(sys.modules["torch"].int16)
            return tag, shape, host.numpy().view(np.uint16), None
        return _from_array(name, host.resolve_neg().numpy())
    except (RuntimeError, TypeError) as error:
        raise _invalid(name, tensor, "a tensor whose data can be read", str(error)) from error


def _from_array(name: str, value: object) -> WireTensor:
    if not isinstance(value, np.ndarray | np.generic | bool | int | float):
        raise _invalid(name, value, "a tensor, an array, or a list of numbers or of 1-D tensors")
    array = np.asarray(value)
    tag = array.dtype.name
    if tag == "bfloat16":  # ml_dtypes, as JAX and safetensors readers give it
        return tag, array.shape, array.view(np.uint16), None
    if tag in _WIDER:
        tag = _WIDER[tag]
        array = array.astype(tag)
    if tag not in DTYPE_BYTES:
        raise _invalid(name, value, _EXPECTED, "cast it, for example with .astype('float32')")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return tag, array.shape, array, None


def _from_sequence(name: str, items: Sequence[object]) -> WireTensor:
    """Pack rows into one buffer; a flat list of numbers is an ordinary 1-D tensor.

    An empty list of a tensor with one value per token has no rows; its dtype follows its name.
    """
    if not items:
        tag = "int64" if name.partition("[")[0] in INTEGER_TENSORS else "float64"
        offsets = np.zeros(1, np.int64) if name in PER_TOKEN else None
        return tag, (0,), np.empty(0, tag), offsets
    if all(isinstance(item, bool | int | float | np.generic) for item in items):
        return _from_numbers(name, items)
    rows = [host_tensor(f"{name}[{i}]", item) for i, item in enumerate(items)]
    if all(shape == () for _, shape, _, _ in rows):
        rows = [(tag, (1,), buffer.reshape(1), None) for tag, _, buffer, _ in rows]
        tag, shape, buffer, _ = _packed(name, items, rows)
        return tag, shape, buffer, None
    return _packed(name, items, rows)


def _from_numbers(name: str, items: Sequence[object]) -> WireTensor:
    array = np.array(items)
    if array.dtype == object:  # an int beyond 64 bits
        raise _invalid(name, items, "numbers that fit in int64 or float64")
    return _from_array(name, array)


def _packed(name: str, items: Sequence[object], rows: list[WireTensor]) -> WireTensor:
    # An empty Python list has no dtype: the other rows determine it.
    typed = [row for row, item in zip(rows, items, strict=True) if not _is_empty_list(item)] or rows
    tags = {row[0] for row in typed}
    tails = {row[1][1:] for row in typed if len(row[1]) > 0}
    flat = all(len(row[1]) == 1 and row[3] is None for row in rows)
    uniform = all(len(row[1]) >= 1 and row[3] is None for row in typed) and len(tails) == 1
    if len(tags) != 1 or not (flat or uniform):
        kinds = sorted({f"{tag}{list(shape)}" for tag, shape, _, _ in rows})
        raise InvalidTensor(
            f"{name} is a list of {len(rows)} with {', '.join(kinds[:4])}",
            expected="1-D rows of one dtype",
        )
    tag = typed[0][0]
    lengths = [row[1][0] for row in rows]
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    buffer = np.concatenate([row[2] for row in typed])
    return tag, buffer.shape, buffer, offsets


def _is_empty_list(item: object) -> bool:
    return isinstance(item, list | tuple) and not item


PREFIX: Final = "datums/"
_DEPTH: Final = 4


def datum_columns(datums: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return name -> column of the input of a remote trainer, with one row per datum.

    A list of numbers (a 1-D tensor or array) becomes a row of a packed tensor. A number becomes an
    element of `[rows]`, a string an element of a list. The column `datums` holds their count and,
    for a key that some lack, which do. Their row is empty (a number NaN, a string '').

    Raises:
        InvalidTensor: not a list of dicts, or values of different kinds under one key.
    """
    if isinstance(datums, Mapping | str) or not isinstance(datums, Sequence):
        raise InvalidTensor(f"datums are {describe(datums)}", expected="a list of dicts")
    rows = [dict(_flat(datum)) for datum in datums]
    keys = dict.fromkeys(key for row in rows for key in row)
    columns: dict[str, object] = {}
    absent: dict[str, list[int]] = {}
    for key in keys:
        without = [number for number, row in enumerate(rows) if key not in row]
        if without:
            absent[key] = without
        columns[PREFIX + key] = _column(key, [row.get(key) for row in rows])
    return {**columns, "datums": {"count": len(rows), "absent": absent}}


def _flat(datum: object, prefix: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, object]]:
    if not isinstance(datum, Mapping):
        raise InvalidTensor(f"a datum is {describe(datum)}", expected="a dict of lists")
    for key, value in datum.items():
        if isinstance(value, Mapping) and depth > 0:
            yield from _flat(value, f"{prefix}{key}.", depth - 1)
        elif value is not None:
            yield f"{prefix}{key}", value


def _with_one_dtype(values: list[object]) -> list[object]:
    """Return rows of one dtype: where Python lists hold ints and floats, all become floats."""
    kinds = {np.asarray(value).dtype.kind for value in values if isinstance(value, list) and value}
    if kinds != {"i", "f"}:
        return values
    return [np.asarray(value, np.float64) if isinstance(value, list) else value for value in values]


def _column(key: str, values: list[object]) -> object:
    present = [value for value in values if value is not None]
    if all(isinstance(value, str) for value in present):
        return ["" if value is None else value for value in values]
    if all(isinstance(value, bool | int | float | np.number) for value in present):
        if len(present) == len(values):
            return np.array(present)
        return np.array([np.nan if value is None else value for value in values])
    if all(is_tensor_like(value) for value in present):
        return _with_one_dtype([[] if value is None else value for value in values])
    raise InvalidTensor(
        f"datums have {describe(present[0])} and others under {key!r}",
        expected="lists of numbers, or numbers, or texts, of one kind in all datums",
    )
