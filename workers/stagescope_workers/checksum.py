"""A bit-exact checksum of a tensor, the same number on the host and on every device.

The bytes, in row-major order and with zeros behind the last, are little-endian signed 32-bit words
x[b, j] in blocks of 65 536. With two fixed streams w and v of odd 64-bit numbers,

    checksum = sum over b of v[b] * (sum over j of w[j] * x[b, j])    mod 2**64

which is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
A change inside one word always shows, because an odd weight has an inverse. Any other change, such
as two swapped elements or a transposed matrix, is missed once in about 2**32. Dtype and shape are
not included: they are reported and compared separately.

Integer arithmetic on a device is compared with the host's once; where it differs, that device's
tensors are summed on the host. No copy is larger than a chunk.

torch is never imported here: a value can only be a torch tensor where torch is loaded already.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from stagescope_wire.errors import InvalidTensor
from stagescope_workers.payload import Array, IntArray, describe, is_torch

if TYPE_CHECKING:
    import torch

Elements: TypeAlias = Any
"""A numpy array or a torch tensor, which slicing and shapes treat alike."""

BLOCK_WORDS: Final = 1 << 16
BLOCK_BYTES: Final = 4 * BLOCK_WORDS
CHUNK_BYTES: Final = 64 * BLOCK_BYTES
"""Bytes of a tensor that are processed at a time: 16 MiB."""

_WORD_SEED: Final = 0x243F6A8885A308D3  # digits of pi, as an arbitrary constant
_BLOCK_SEED: Final = 0x13198A2E03707344
_MIN_BLOCKS: Final = 1024
_STRIP: Final = 16
_EXPECTED: Final = "a dense torch tensor or numpy array with data"


def checksum(value: object) -> int | torch.Tensor:
    """Return the checksum of a tensor or an array: an int from 0 below 2**64.

    For a tensor on a device it is an int64 tensor without dimensions on that device, with the same
    bits. The work is queued on the device's current stream, and nothing waits for it.

    Args:
        value: a torch tensor (dense, of any dtype and strides) or a numpy array (without objects).

    Raises:
        InvalidTensor: something else.
    """
    if not is_torch(value):
        return _host_sum(_native(value))
    bits = _bits(value)
    if _is_on_device(bits) and _has_host_arithmetic(bits.device):
        return device_sum(bits)
    return _host_sum(bits)


def unsigned(bits: int) -> int:
    """Return the checksum whose bits are those of an int64."""
    return bits & (1 << 64) - 1


# --- the elements that are summed -------------------------------------------------------------


def _native(value: object) -> Array:
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.hasobject:
        raise InvalidTensor(f"the weight is {describe(value)}", expected=_EXPECTED)
    array = np.asarray(value)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as integers of the same width, with the same strides."""
    if tensor.is_nested or tensor.is_sparse or tensor.is_quantized or tensor.device.type == "meta":
        raise InvalidTensor(f"the weight is {describe(tensor)}", expected=_EXPECTED)
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.resolve_neg().view(kinds[tensor.element_size()])


def _chunks(array: Elements, itemsize: int) -> Iterator[Elements]:
    """Yield the elements in row-major order as flat contiguous pieces of CHUNK_BYTES.

    A piece that had to be copied is overwritten by the next.
    """
    size, chunk_size = math.prod(array.shape), CHUNK_BYTES // itemsize
    copied: Elements = None
    for begin in range(0, size, chunk_size):
        views = [*_views(array, begin, min(begin + chunk_size, size))]
        if len(views) == 1 and _is_contiguous(views[0]):
            yield views[0].reshape(-1)
            continue
        if copied is None:
            copied = _empty_like(array, min(size, chunk_size))
        offset = 0
        for view in views:
            _copy(view, copied[offset : offset + math.prod(view.shape)].reshape(view.shape))
            offset += math.prod(view.shape)
        yield copied[:offset]


def _copy(view: Elements, target: Elements) -> None:
    strides = view.stride() if is_torch(view) else view.strides
    if len(strides) < 2 or strides[-1] <= strides[-2] or _is_on_device(view):
        target[...] = view
        return
    # For a transposed matrix, strips of few columns stay in the cache: 6 times as fast.
    for begin in range(0, view.shape[-1], _STRIP):
        target[..., begin : begin + _STRIP] = view[..., begin : begin + _STRIP]


def _is_on_device(value: object) -> bool:
    return is_torch(value) and bool(value.device.type != "cpu")


def _is_contiguous(view: Elements) -> bool:
    if not is_torch(view):
        return bool(view.flags.c_contiguous)
    # torch allows any stride for a dimension of one element, and then cannot view it.
    return bool(view.is_contiguous() and view.reshape(-1).stride(0) == 1)


def _empty_like(array: Elements, count: int) -> Elements:
    return array.new_empty(count) if is_torch(array) else np.empty(count, array.dtype)


def _views(array: Elements, begin: int, end: int) -> Iterator[Elements]:
    """Yield views that together are the elements `begin` to `end` of `array`, in order."""
    size = math.prod(array.shape)
    if (begin, end) == (0, size):
        yield array
        return
    row = size // array.shape[0]
    first, last = -(-begin // row), end // row
    if first > last:  # inside one row
        yield from _views(array[last], begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from _views(array[first - 1], begin - (first - 1) * row, row)
    if first < last:
        yield array[first:last]
    if last * row < end:
        yield from _views(array[last], 0, end - last * row)


# --- on the host ------------------------------------------------------------------------------


def _host_sum(array: Elements) -> int:
    total = block = 0
    itemsize = array.element_size() if is_torch(array) else array.itemsize
    products = np.empty(BLOCK_WORDS, np.int64)
    weights, block_weights = _streams(_blocks(array, itemsize))
    for chunk in _chunks(array, itemsize):
        piece = chunk.cpu().numpy() if is_torch(chunk) else chunk
        data = piece.view(np.uint8)
        for begin in range(0, len(data), BLOCK_BYTES):
            words = _host_words(data[begin : begin + BLOCK_BYTES])
            count = len(words)
            np.multiply(words, weights[:count], out=products[:count])
            total += int(np.add.reduce(products[:count])) * int(block_weights[block])
            block += 1
    return unsigned(total)


def _host_words(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    missing = -len(data) % 4
    if missing:
        data = np.concatenate([data, np.zeros(missing, np.uint8)])
    return data.view(np.dtype("<i4"))


# --- on a device ------------------------------------------------------------------------------


def device_sum(bits: torch.Tensor) -> torch.Tensor:
    """Return the checksum of an integer tensor as an int64 on its device, computed by torch."""
    torch: ModuleType = sys.modules["torch"]
    weights, block_weights = _device_streams(bits.device, _blocks(bits, bits.element_size()))
    total = bits.new_zeros((), dtype=torch.int64)
    block = 0
    for chunk in _chunks(bits, bits.element_size()):
        words = _device_words(chunk)
        rows, rest = divmod(len(words), BLOCK_WORDS)
        if rows:
            full_blocks = words[: rows * BLOCK_WORDS].view(rows, BLOCK_WORDS)
            sums = torch.mul(full_blocks, weights).sum(dim=1)
            total += (sums * block_weights[block : block + rows]).sum()
            block += rows
        if rest:
            total += torch.mul(words[-rest:], weights[:rest]).sum() * block_weights[block]
            block += 1
    return total


def _device_words(chunk: torch.Tensor) -> torch.Tensor:
    torch = sys.modules["torch"]
    missing = -chunk.numel() * chunk.element_size() % 4
    if missing:
        zeros = torch.zeros(missing, dtype=torch.uint8, device=chunk.device)
        chunk = torch.cat([chunk.view(torch.uint8), zeros])
    elif (chunk.storage_offset() * chunk.element_size() | chunk.data_ptr()) % 4:
        chunk = chunk.clone()  # it is not aligned to words of four bytes
    return chunk.view(torch.int32)


@functools.lru_cache(maxsize=64)
def _has_host_arithmetic(device: torch.device) -> bool:
    """Return whether a device's integers wrap like the host's; computed once, synchronously."""
    trial = (np.arange(3 * BLOCK_WORDS + 5, dtype=np.uint32) * np.uint32(2654435761)).view(np.int32)
    torch = sys.modules["torch"]
    try:
        found = int(device_sum(torch.from_numpy(trial).to(device)))
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return unsigned(found) == _host_sum(trial)


# --- the weights ------------------------------------------------------------------------------


def _blocks(array: Elements, itemsize: int) -> int:
    needed = -(-math.prod(array.shape) * itemsize // BLOCK_BYTES)
    return max(_MIN_BLOCKS, 1 << (needed - 1).bit_length() if needed else 0)


@functools.lru_cache(maxsize=32)
def _streams(blocks: int) -> tuple[IntArray, IntArray]:
    """Return w, and the first `blocks` of v."""
    return _odd_numbers(_WORD_SEED, BLOCK_WORDS), _odd_numbers(_BLOCK_SEED, blocks)


@functools.lru_cache(maxsize=64)
def _device_streams(device: torch.device, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch = sys.modules["torch"]
    word_weights, block_weights = _streams(blocks)
    return torch.from_numpy(word_weights).to(device), torch.from_numpy(block_weights).to(device)


def _odd_numbers(seed: int, count: int) -> IntArray:
    """Return odd 64-bit numbers as int64: SplitMix64 (Steele, Lea and Flood, 2014), each | 1."""
    index = np.arange(1, count + 1, dtype=np.uint64)
    mixed = index * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return numbers.view(np.int64)
