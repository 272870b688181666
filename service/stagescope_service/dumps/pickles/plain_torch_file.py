"""Reads plain files of torch.save without torch, whose import takes longer than reading a file.

A zip file of torch.save holds a pickle of protocol 2 and a stored member for each storage. The
pickle is not unpickled: its opcodes are interpreted one by one, and only those of dicts, lists,
numbers, texts and tensors are supported. No name of the pickle is ever imported; the few supported
ones are in `_supported_names`. Anything else raises `NotPlain`, and torch's own restricted loader
(`torch_file`) reads or refuses the file.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from stagescope_service.dumps.pickles.torch_stand_ins import (
    STAND_INS,
    FileTensor,
    PickledArray,
    PickledDtype,
    PickledTensorDict,
)
from stagescope_wire.tensorfile import Array
from stagescope_wire.tensors import DTYPE_BYTES

_STORAGES: Final[Mapping[str, str]] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
"""The lengths of the name and of the extra field of a zip file's member, at byte 26."""
_STATEFUL: Final = (PickledArray, PickledDtype, PickledTensorDict)
_MARK: Final = object()


class NotPlain(Exception):
    """The file holds more than this reader supports."""


class _Storage(NamedTuple):
    tag: str
    values: Array


class _StorageType(NamedTuple):
    tag: str


def read_plain(path: Path) -> object:
    """Return the content of a zip file of torch.save; tensors are `FileTensor`, views of the file.

    Args:
        path: a zip file that `pickle_scan.check_zip` accepted.

    Raises:
        NotPlain: it is damaged, or holds more than plain values and dense tensors.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as members:
            names = {each.filename: each for each in members.infolist()}
            root = next(name for name in names if name.endswith("data.pkl"))[: -len("data.pkl")]
            order = names.get(f"{root}byteorder")
            if order is not None and members.read(order) != b"little":
                raise NotPlain("bytes in another order")
            pickled = members.read(f"{root}data.pkl")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _Reader(pickled, names, root, mapped).read()
    except NotPlain:
        raise
    except Exception as error:  # damaged pickles raise nearly everything
        if isinstance(error, MemoryError):
            raise
        raise NotPlain(f"{type(error).__name__}: {error}") from error


class _Reader:
    def __init__(
        self, pickled: bytes, members: Mapping[str, zipfile.ZipInfo], root: str, mapped: mmap.mmap
    ) -> None:
        self._pickled = pickled
        self._members = members
        self._root = root
        self._file = mapped
        self._at = 0
        # Values of an untrusted pickle: each operation checks the types that it needs.
        self._stack: list[Any] = []
        self._memo: dict[int, object] = {}
        self._storages: dict[str, _Storage] = {}

    def read(self) -> object:
        """Return the pickled value."""
        data, steps = self._pickled, _STEPS
        while True:
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                found: object
                (found,) = self._stack
                return found
            step = steps.get(code)
            if step is None:
                raise NotPlain(f"opcode {code:#x}")
            step(self)

    def _unpack(self, layout: struct.Struct) -> Any:  # an int or a float, by the layout
        (value,) = layout.unpack_from(self._pickled, self._at)
        self._at += layout.size
        return value

    def _bytes(self, count: int) -> bytes:
        found = self._pickled[self._at : self._at + count]
        if len(found) != count:
            raise NotPlain("cut off")
        self._at += count
        return found

    def _line(self) -> str:
        end = self._pickled.index(b"\n", self._at)
        found = self._pickled[self._at : end].decode("ascii")
        self._at = end + 1
        return found

    def _since_mark(self) -> list[object]:
        stack = self._stack
        mark = len(stack) - 1
        while stack[mark] is not _MARK:
            mark -= 1
        found = stack[mark + 1 :]
        del stack[mark:]
        return found

    def _protocol(self) -> None:
        if self._bytes(1) != b"\x02":
            raise NotPlain("another protocol")

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _tuple(self, count: int) -> None:
        found = tuple(self._stack[-count:])
        if len(found) != count or _MARK in found:
            raise NotPlain("a short tuple")
        self._stack[-count:] = [found]

    def _append(self, values: list[object]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise NotPlain("appends to no list")
        target.extend(values)

    def _set(self, values: list[object]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise NotPlain("items of no dict")
        target.update(zip(values[::2], values[1::2], strict=True))

    def _global(self) -> None:
        name = f"{self._line()}.{self._line()}"
        if (target := _supported_names().get(name)) is None:
            raise NotPlain(name)
        self._stack.append(target)

    def _reduce(self) -> None:
        arguments, target = self._stack.pop(), self._stack.pop()
        if type(arguments) is not tuple:
            raise NotPlain("a call without arguments")
        if target is _REBUILD:
            self._stack.append(_tensor(*arguments[:4]))
        elif target in _supported_names().values() and callable(target):
            self._stack.append(target(*arguments))
        else:
            raise NotPlain("a call")

    def _build(self) -> None:
        state = self._stack.pop()
        if not isinstance(self._stack[-1], _STATEFUL):
            raise NotPlain("a state")
        self._stack[-1].__setstate__(state)

    def _persistent(self) -> None:
        kind, storage, key, _, count = self._stack.pop()
        if kind != "storage" or not isinstance(storage, _StorageType):
            raise NotPlain(f"a {kind}")
        if key not in self._storages:
            self._storages[key] = _Storage(storage.tag, self._mapped(storage.tag, key, count))
        found = self._storages[key]
        if found.tag != storage.tag:
            raise NotPlain("a storage of two dtypes")
        self._stack.append(found)

    def _mapped(self, tag: str, key: str, count: int) -> Array:
        member = self._members[f"{self._root}data/{key}"]
        lengths = _LOCAL_HEADER.unpack_from(self._file, member.header_offset)
        start = member.header_offset + _LOCAL_HEADER.size + sum(lengths)
        size = count * DTYPE_BYTES[tag]
        if type(count) is not int or not 0 <= size <= member.file_size:
            raise NotPlain("a storage that its member does not hold")
        if start + size > len(self._file):
            raise NotPlain("a storage beyond the end of the file")
        dtype = np.dtype("uint16" if tag == "bfloat16" else tag)
        found: Array = (
            np.frombuffer(self._file, dtype, count, start) if count else np.empty(0, dtype)
        )
        return found if found.flags.aligned else found.copy()


def _tensor(storage: object, offset: Any, shape: Any, strides: Any) -> FileTensor:
    """Return a tensor that is one contiguous range of its storage."""
    if not isinstance(storage, _Storage):
        raise NotPlain("a tensor without a storage")
    sizes = (*shape, *strides, offset)
    if len(shape) != len(strides) or not all(type(each) is int and each >= 0 for each in sizes):
        raise NotPlain("a tensor of no shape")
    count, expected = 1, []
    for size in reversed(shape):
        expected.append(count)
        count *= size
    is_contiguous = all(
        size == 1 or stride == contiguous
        for size, stride, contiguous in zip(shape, strides, reversed(expected), strict=True)
    )
    if not (is_contiguous or count == 0) or offset + count > len(storage.values):
        raise NotPlain("a tensor that is no contiguous range of its storage")
    values = storage.values[offset : offset + count].reshape(shape)
    values.flags.writeable = False
    return FileTensor((storage.tag, tuple(shape), values, None))


def _ordered(*arguments: object) -> dict[object, object]:
    """`OrderedDict()`, which is filled afterwards; copies of others could be made without limit."""
    if arguments:
        raise NotPlain("a dict of another")
    return {}


def _size(sizes: object) -> tuple[object, ...]:
    if type(sizes) is not tuple:
        raise NotPlain("sizes of another kind")
    return sizes


_REBUILD: Final = object()
_NAMES: dict[str, object] = {}


def _supported_names() -> Mapping[str, object]:
    if not _NAMES:
        storages = {f"torch.{name}": _StorageType(tag) for name, tag in _STORAGES.items()}
        plain: dict[str, object] = {"collections.OrderedDict": _ordered, "torch.Size": _size}
        _NAMES.update({
            **STAND_INS, **storages, **plain, "torch._utils._rebuild_tensor_v2": _REBUILD,
        })  # fmt: skip
    return _NAMES


def _number(layout: str) -> Callable[[_Reader], None]:
    packed = struct.Struct(layout)
    return lambda reader: reader._stack.append(reader._unpack(packed))


def _constant(make: Callable[[], object]) -> Callable[[_Reader], None]:
    return lambda reader: reader._stack.append(make())


def _memo(layout: str, *, get: bool) -> Callable[[_Reader], None]:
    packed = struct.Struct(layout)
    if get:
        return lambda reader: reader._stack.append(reader._memo[reader._unpack(packed)])
    return lambda reader: reader._put(reader._unpack(packed))


def _text(reader: _Reader) -> None:
    text = reader._bytes(reader._unpack(struct.Struct("<I")))
    reader._stack.append(text.decode("utf-8", "surrogatepass"))


def _long(reader: _Reader) -> None:
    count = reader._unpack(struct.Struct("<B"))
    reader._stack.append(int.from_bytes(reader._bytes(count), "little", signed=True))


_STOP: Final = ord(".")
_STEPS: Final[Mapping[int, Callable[[_Reader], None]]] = {
    0x80: _Reader._protocol,
    ord("("): _constant(lambda: _MARK),
    ord("}"): _constant(dict),
    ord("]"): _constant(list),
    ord(")"): _constant(tuple),
    ord("N"): _constant(lambda: None),
    0x88: _constant(lambda: True),
    0x89: _constant(lambda: False),
    ord("K"): _number("<B"),
    ord("M"): _number("<H"),
    ord("J"): _number("<i"),
    ord("G"): _number(">d"),
    0x8A: _long,
    ord("X"): _text,
    ord("q"): _memo("<B", get=False),
    ord("r"): _memo("<I", get=False),
    ord("h"): _memo("<B", get=True),
    ord("j"): _memo("<I", get=True),
    ord("t"): lambda reader: reader._stack.append(tuple(reader._since_mark())),
    0x85: lambda reader: reader._tuple(1),
    0x86: lambda reader: reader._tuple(2),
    0x87: lambda reader: reader._tuple(3),
    ord("a"): lambda reader: reader._append([reader._stack.pop()]),
    ord("e"): lambda reader: reader._append(reader._since_mark()),
    ord("s"): lambda reader: reader._set([*reversed((reader._stack.pop(), reader._stack.pop()))]),
    ord("u"): lambda reader: reader._set(reader._since_mark()),
    ord("c"): _Reader._global,
    ord("R"): _Reader._reduce,
    ord("b"): _Reader._build,
    ord("Q"): _Reader._persistent,
}
