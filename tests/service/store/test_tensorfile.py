"""Tensor files: exact, whole or not at all, and hostile ones refused."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stores import fill

from stagescope_service.store.tensorfile import (
    WireTensor,
    check_file,
    map_tensors,
    read_tensors,
    size_of,
    write_tensors,
)
from stagescope_wire.errors import InvalidTensor, NotFound, StoreError
from stagescope_wire.tensors import DTYPE_BYTES

_deserialize: Callable[[bytes], Any] = safetensors.deserialize

_BUFFERS = {**{tag: tag for tag in DTYPE_BYTES}, "bfloat16": "uint16"}


def wire(tag: str, shape: tuple[int, ...], seed: int = 0, packed: bool = False) -> WireTensor:
    """A tensor of random bytes (bools of 0 and 1)."""
    count = int(np.prod(shape)) * DTYPE_BYTES[tag]
    raw = np.random.default_rng(seed).integers(0, 2 if tag == "bool" else 256, count)
    values = raw.astype(np.uint8).view(_BUFFERS[tag]).reshape(shape)
    offsets = np.array([0, shape[0] // 2, shape[0]], np.int64) if packed else None
    return tag, shape, values, offsets


def same(left: WireTensor, right: WireTensor) -> bool:
    """Equal tag, shape, bits and offsets."""
    both = left[3] is not None, right[3] is not None
    return (
        left[:2] == right[:2]
        and left[2].dtype == right[2].dtype
        and left[2].tobytes() == right[2].tobytes()
        and both[0] == both[1]
        and (left[3] is None or right[3] is None or bool((left[3] == right[3]).all()))
    )


_SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
_TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: not name.endswith(".row_offsets")),
    st.builds(wire, st.sampled_from([*DTYPE_BYTES]), _SHAPES, st.integers(0, 9))
    | st.builds(lambda rows: wire("float32", (rows,), packed=True), st.integers(0, 9)),
    max_size=5,
)
_INTS = st.integers(-(2**63), 2**63 - 1)  # A larger one is written as its digits: `spell` says so.
_METADATA = st.dictionaries(st.text(max_size=5), _INTS | st.text(max_size=5), max_size=3)


@settings(deadline=None, max_examples=60)
@given(_TENSORS, _METADATA)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, WireTensor], metadata: Any
) -> None:
    path = tmp_path_factory.mktemp("files") / "t.safetensors"
    written = write_tensors(path, tensors, metadata)
    assert written.bytes == path.stat().st_size == size_of(tensors, metadata) == check_file(path)
    assert written.checksum == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    found = read_tensors(path)
    assert found.metadata == metadata
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(found.tensors[name], tensor)
        assert not found.tensors[name][2].flags.writeable
        assert found.tensors[name][2].flags.aligned
    # The library of the format agrees with every byte.
    theirs = dict(_deserialize(path.read_bytes()))
    for name, (tag, shape, values, _) in tensors.items():
        assert tuple(theirs[name]["shape"]) == shape
        assert bytes(theirs[name]["data"]) == values.tobytes()
        assert (theirs[name]["dtype"] == "BF16") == (tag == "bfloat16")


def test_torch_reads_bfloat16_as_bfloat16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    values = torch.tensor([[1.5, float("nan")], [-2.0, float("inf")]], dtype=torch.bfloat16)
    path = tmp_path / "t.safetensors"
    buffer = values.view(torch.int16).numpy().view(np.uint16)
    write_tensors(path, {"p": ("bfloat16", (2, 2), buffer, None)})
    found = load_file(path)["p"]
    assert found.dtype is torch.bfloat16
    assert torch.equal(found.view(torch.int16), values.view(torch.int16))


def test_files_of_other_tools_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "a": np.arange(6, dtype=np.int64).reshape(2, 3),
        "b": np.ones(3, np.float16),
    }
    safetensors.numpy.save_file(arrays, path, metadata={"who": "they"})
    found = read_tensors(path)
    assert found.metadata == {"who": "they"}
    assert found.tensors["a"][:2] == ("int64", (2, 3))
    assert (found.tensors["a"][2] == arrays["a"]).all()


def test_tensors_that_are_views_are_written_as_they_look(tmp_path: Path) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_tensors(tmp_path / "t", {"t": ("float32", (4, 3), base.T, None)})
    assert (read_tensors(tmp_path / "t").tensors["t"][2] == base.T).all()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("complex64", (1,), np.ones(1, np.complex64), None), "dtype 'complex64'"),
        (("float32", (2,), np.ones(3, np.float32), None), "2 values"),
        (("float32", (2,), np.ones(2, np.float64), None), "float32"),
        (("bfloat16", (2,), np.ones(2, np.float16), None), "uint16"),
        (("object", (1,), np.array([{}]), None), "dtype 'object'"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, tensor: WireTensor, message: str) -> None:
    with pytest.raises(InvalidTensor, match=message):
        write_tensors(tmp_path / "t", {"t": tensor})
    assert not list(tmp_path.iterdir())


def _raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _one(
    dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)
) -> dict[str, object]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


_HOSTILE = {
    "empty": b"",
    "short": b"\x01\x02",
    "header of 4 GB": _raw({}, length=4 << 30),
    "header of 2^64 - 1": _raw({}, length=2**64 - 1),
    "header longer than the file": _raw({}, length=100),
    "no header": _raw(b"", length=0),
    "no JSON": _raw(b"{not json}"),
    "no UTF-8": _raw(b"\xff\xfe\xfd"),
    "a list": _raw([]),
    "deep": _raw(b"[" * 100_000),
    "pickle": b"\x80\x04\x95" + bytes(40),
    "entry is no object": _raw({"t": 4}),
    "unknown dtype": _raw(_one("F8_E4M3", offsets=(0, 1)), b"a"),
    "dtype is no string": _raw(_one({"a": 1}), bytes(4)),
    "shape is no list": _raw(_one(shape="1"), bytes(4)),
    "negative shape": _raw(_one(shape=(-1,)), bytes(4)),
    "shape of bools": _raw(_one(shape=(True,)), bytes(4)),
    "shape of floats": _raw(_one(shape=(1.0,)), bytes(4)),
    "shape too large": _raw(_one(shape=(2**61, 2**61)), bytes(4)),
    "empty shape too large": _raw(_one(shape=(0, 2**61, 2**61), offsets=(0, 0))),
    "too many dimensions": _raw(_one(shape=(1,) * 65), bytes(4)),
    "offsets beyond the file": _raw(_one(shape=(2,), offsets=(0, 8)), bytes(4)),
    "offsets backwards": _raw(_one(offsets=(4, 0)), bytes(4)),
    "negative offsets": _raw(_one(offsets=(-4, 0)), bytes(4)),
    "three offsets": _raw(_one(offsets=(0, 4, 8)), bytes(8)),
    "size is not the shape's": _raw(_one(shape=(2,)), bytes(4)),
    "data left over": _raw(_one(), bytes(8)),
    "hole": _raw(_one(offsets=(4, 8)), bytes(8)),
    "overlap": _raw({**_one(), "u": _one()["t"]}, bytes(4)),
    "truncated": _raw(_one(shape=(100,), offsets=(0, 400)), bytes(399)),
    "bools of 2": _raw(_one("BOOL", offsets=(0, 1)), b"\x02"),
    "metadata are not strings": _raw({"__metadata__": {"a": 1}}),
    "metadata are a list": _raw({"__metadata__": []}),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(_HOSTILE[name])
    with pytest.raises(InvalidTensor, match=re.escape(str(path))):
        read_tensors(path)


def test_a_sparse_file_of_a_terabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    count = 1 << 40
    path.write_bytes(_raw(_one("U8", shape=(count,), offsets=(0, count))))
    os.truncate(path, path.stat().st_size + count)
    with pytest.raises(InvalidTensor, match="at most"):
        read_tensors(path)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damaged_files_are_read_or_refused_but_never_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "t.safetensors"
    write_tensors(path, {"a": wire("float32", (3, 2)), "b": wire("bool", (5,), packed=True)})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    refusal = refused(path)
    assert refusal is None or str(path) in refusal


def refused(path: Path) -> str | None:
    """Return why a file is refused; None: it is read, and each tensor has its shape."""
    try:
        tensors = read_tensors(path).tensors
    except InvalidTensor as error:
        return str(error)
    assert all(values.shape == shape for _, shape, values, _ in tensors.values())
    return None


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_tensors(tmp_path / "nothing")


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": wire("int8", (3,))})
    before = path.read_bytes()
    with pytest.raises(InvalidTensor):
        write_tensors(path, {"a": ("float32", (9,), np.ones(1, np.float32), None)})
    assert path.read_bytes() == before
    write_tensors(path, {"b": wire("int8", (4,))}, durable=False)
    assert read_tensors(path).tensors.keys() == {"b"}
    assert os.listdir(tmp_path) == ["t.safetensors"]


def test_views_of_a_file_that_live_at_a_time_share_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    old, new = wire("float32", (300,), 1), wire("float32", (300,), 2)
    write_tensors(path, {"a": old})
    first, again = (map_tensors(path).tensors["a"][2] for _ in range(2))
    assert np.shares_memory(first, again)
    write_tensors(path, {"a": new})  # as large as before: renamed over the old one
    replaced = map_tensors(path).tensors["a"][2]
    assert replaced.tobytes() == new[2].tobytes()
    assert first.tobytes() == old[2].tobytes()


def test_a_full_disk_says_what_to_do_and_leaves_nothing(small_disk: Path) -> None:
    path = small_disk / "kept" / "t.safetensors"
    with pytest.raises(StoreError, match="free space"):
        write_tensors(path, {"a": wire("int8", (6_000_000,))})
    assert os.listdir(path.parent) == []
    fill(small_disk / "ballast")
    with pytest.raises(StoreError, match="free space"):
        write_tensors(path, {"a": wire("int8", (100_000,))})
    assert os.listdir(path.parent) == []
