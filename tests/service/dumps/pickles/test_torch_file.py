"""What torch.save writes, and what pretends to be written by it."""

from __future__ import annotations

import builtins
import os
import pickle
import threading
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.support.batches import from_bfloat16
from tests.support.dump_files import Runs, areal_file, hostile_torch_file, make_batch, zip_bomb

from stagescope_service.dumps.pickles.pickle_scan import globals_of, peek
from stagescope_service.dumps.pickles.plain_torch_file import NotPlain, read_plain
from stagescope_service.dumps.pickles.torch_file import (
    FileTensor,
    Unreadable,
    _load,
    _PlainValues,
    read_torch_file,
)
from stagescope_wire.errors import Forbidden, InvalidTensor, MissingExtra, NotFound

since_2_6 = pytest.mark.skipif(
    torch.__version__ < "2.6", reason="this torch writes no such tensors, or does not load them"
)


def content_of(path: Path) -> Any:
    """The content of a file, for tests that know its structure."""
    return read_torch_file(path)


def saved(path: Path, value: object, **options: Any) -> Path:
    torch.save(value, path / "a.pt", **options)
    return path / "a.pt"


def rewritten(
    path: Path, other: Path, change: Callable[[str, bytes], bytes],
    compression: int = zipfile.ZIP_STORED,
) -> None:  # fmt: skip
    """Write a file of torch.save with other members; `change(last name, data)` returns them."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w", compression) as target:
        for member in source.namelist():
            name = member.rpartition("/")[2]
            target.writestr(member, change(name, source.read(member)))


def array_of(value: Any) -> npt.NDArray[np.generic]:
    assert isinstance(value, FileTensor)
    return value.wire[2]


@pytest.mark.parametrize("is_zip", [True, False])
def test_plain_values_are_read(tmp_path: Path, is_zip: bool) -> None:
    value = {
        "number": 1, "real": float("inf"), "text": "ü", "nothing": None, "yes": True,
        "list": [1, [2.5, "a"], {"deep": ()}], 3: "three", "big": 1 << 80,
    }  # fmt: skip
    path = saved(tmp_path, value, _use_new_zipfile_serialization=is_zip)
    expected = {**value, "3": "three", "list": [1, [2.5, "a"], {"deep": []}]}
    del expected[3]
    assert read_torch_file(path) == expected


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16,
     torch.int8, torch.uint8, torch.bool],
    ids=str,
)  # fmt: skip
def test_tensors_keep_their_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    found = content_of(saved(tmp_path, {"t": tensor, "view": tensor[:, 1:], "one": tensor[0, 1]}))
    tag, shape, values, offsets = found["t"].wire
    assert (tag, shape, offsets) == (str(dtype).removeprefix("torch."), (2, 3), None)
    np.testing.assert_array_equal(values, tensor.numpy())
    np.testing.assert_array_equal(array_of(found["view"]), tensor[:, 1:].numpy())
    assert found["one"].wire[1] == ()
    assert not values.flags.writeable


@since_2_6
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # of torch 2.15
def test_other_dtypes_are_widened_or_named(tmp_path: Path) -> None:
    value = {
        "bf16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "f8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
        "complex": torch.zeros(2, dtype=torch.complex64),
        "sparse": torch.eye(2).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "unsigned": torch.tensor([2**32 - 1], dtype=torch.uint32),
    }
    found = content_of(saved(tmp_path, value))
    assert found["bf16"].wire[0] == "bfloat16"
    np.testing.assert_array_equal(from_bfloat16(array_of(found["bf16"])), [1.5, np.nan])
    assert (found["f8"].wire[0], found["f8"].was) == ("float32", "float8_e4m3fn")
    assert array_of(found["f8"]).tolist() == [0.5, 2.0]
    assert {name for name in found if isinstance(found[name], Unreadable)} == {"complex", "sparse"}
    assert array_of(found["parameter"]).tolist() == [1.0, 1.0]
    assert (found["unsigned"].wire[0], found["unsigned"].was) == ("int64", "uint32")
    assert array_of(found["unsigned"]).tolist() == [2**32 - 1]


def test_numpy(tmp_path: Path) -> None:
    value = {
        "array": np.arange(6.0).reshape(2, 3).T,
        "big_endian": np.arange(3, dtype=">i4"),
        "scalar": np.float32(0.1),
        "whole": np.int64(7),
        "yes": np.bool_(True),
        "ids": np.array(["a", "bc"], dtype=object),
        "texts": np.array(["a", "bc"]),
        "objects": np.array([{}, None], dtype=object),
        "dates": np.array(["2026-01-01"], dtype="datetime64[D]"),
        "empty": np.zeros((0, 3), np.float32),
    }
    found = content_of(saved(tmp_path, value))
    np.testing.assert_array_equal(array_of(found["array"]), value["array"])
    assert array_of(found["big_endian"]).tolist() == [0, 1, 2]
    assert found["scalar"] == float(np.float32(0.1))
    assert (found["whole"], found["yes"]) == (7, True)
    assert found["ids"] == found["texts"] == ["a", "bc"]
    assert {name for name in found if isinstance(found[name], Unreadable)} == {"objects", "dates"}
    assert found["empty"].wire[1] == (0, 3)


def test_numpy_of_another_version(tmp_path: Path) -> None:
    path = saved(tmp_path, {"array": np.arange(3), "scalar": np.float64(2.5)})
    cores = (b"numpy._core.multiarray", b"numpy.core.multiarray")
    ours = cores[np.lib.NumpyVersion(np.__version__) < "2.0.0"]
    others = cores[ours == cores[0]]
    other = tmp_path / "other.pt"
    rewritten(path, other, lambda _, data: data.replace(ours, others))
    found = content_of(other)
    assert array_of(found["array"]).tolist() == [0, 1, 2]
    assert found["scalar"] == 2.5


@since_2_6
def test_nested_tensors_are_ragged_rows_if_they_are_contiguous(tmp_path: Path) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    starts, ends = torch.tensor([0, 2]), torch.tensor([1, 4])
    holes = torch.nested.narrow(torch.ones(2, 4), 1, starts, ends - starts, layout=torch.jagged)
    found = content_of(saved(tmp_path, {"t": rows, "holes": holes, "after": torch.ones(1)}))
    tag, shape, values, offsets = found["t"].wire
    assert (tag, shape, values.tolist()) == ("float32", (5,), [1, 1, 0, 0, 0])
    assert offsets.tolist() == [0, 2, 5]
    assert "rows are not contiguous" in found["holes"].reason
    assert array_of(found["after"]).tolist() == [1.0]


def test_a_tensordict_opens_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = areal_file(tmp_path / "a.pt", make_batch(2, 8), form="tensordict")
    _no_import_of("tensordict", monkeypatch)
    found = content_of(path)
    assert found["logprobs"].wire[0] == "float32"


def _no_import_of(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> ModuleType:
        if name.partition(".")[0] == library:
            raise ImportError(f"no {name}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_the_error_without_torch_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, {"path": tmp_path})
    _no_import_of("torch", monkeypatch)
    with pytest.raises(MissingExtra, match="pip install torch"):
        read_torch_file(path)


def test_plain_files_are_read_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    value = {
        "whole": whole, "rows": whole[1:3], "half": whole.bfloat16(), "mask": whole > 7,
        "none": torch.zeros(0, 3), "one": torch.tensor(2.5), "array": np.arange(3.0),
        "scalar": np.float32(0.5), "ordered": OrderedDict(a=1), "size": whole.shape,
        "parameter_free": [{"text": "ü", "big": -(1 << 70), "nan": float("inf"), "no": False}],
        "ids": list(range(300)), "long": "x" * 300, "empty": [{}, [], ()],
    }  # fmt: skip
    path = saved(tmp_path, value)
    expected: Any = _PlainValues(path, path.stat().st_size)(_load(path, mapped=True))
    (tmp_path / "other").mkdir()
    columns = saved(tmp_path / "other", {"columns": whole[:, 1:]})
    _no_import_of("torch", monkeypatch)
    found = content_of(path)
    assert found.keys() == value.keys()
    for name, item in found.items():
        if not isinstance(item, FileTensor):
            assert item == expected[name], name
            continue
        assert item.wire[:2] == expected[name].wire[:2]
        assert np.array_equal(item.wire[2], expected[name].wire[2])
        assert not item.wire[2].flags.writeable
    # A view of its storage's columns is no plain stretch: torch reads it.
    with pytest.raises(MissingExtra):
        read_torch_file(columns)


@pytest.mark.parametrize(
    "harm",
    [
        b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.",
        b"\x80\x02ccollections\nOrderedDict\n)R}b.",  # a state for a dict
        b"\x80\x02ccollections\nOrderedDict\n]\x85R.",
        b"\x80\x02ctorch\nFloatStorage\n)R.",
        b"\x80\x02]q\x00h\x01.",
        b"\x80\x02(K\x01K\x02s.",
        b"\x80\x02X\xff\xff\xff\x7fa.",
        b"\x80\x02K\x01",
        b"\x80\x04N.",
    ],
)
def test_other_files_are_left_to_torchs_own_loader(tmp_path: Path, harm: bytes) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", harm)
    with pytest.raises(NotPlain):
        read_plain(path)


def test_a_storage_is_not_read_beyond_its_member(tmp_path: Path) -> None:
    path = saved(tmp_path, {"t": torch.zeros(8), "u": torch.ones(8)})
    changed = tmp_path / "b.pt"
    rewritten(
        path, changed,
        lambda name, data: data.replace(b"K\x08", b"K\x18") if name == "data.pkl" else data,
    )  # fmt: skip
    with pytest.raises(NotPlain, match="storage"):
        read_plain(changed)


def test_the_allowed_globals_of_the_process_are_restored(tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([Runs])
    before = torch.serialization.get_safe_globals()
    try:
        hostile_torch_file(tmp_path / "a.pt", tmp_path / "made")
        with pytest.raises(Forbidden):
            read_torch_file(tmp_path / "a.pt")
        assert set(torch.serialization.get_safe_globals()) == set(before)
        torch.save(Runs("true"), tmp_path / "b.pt")
        with pytest.raises(Forbidden):
            read_torch_file(tmp_path / "b.pt")
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([each for each in before if each is not Runs])


def test_several_threads_read_at_once(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": np.arange(4), "t": torch.ones(3)})
    found: list[object] = []

    def read() -> None:
        found.extend(array_of(content_of(path)["a"]).tolist() for _ in range(20))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[0, 1, 2, 3]] * 80


# --- hostile and damaged files --------------------------------------------------------------


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickled_call_is_refused_by_its_name_and_never_made(tmp_path: Path, is_zip: bool) -> None:
    marker = tmp_path / "made"
    value = {"t": torch.zeros(2), "more": Runs(f"touch {marker}")}
    path = saved(tmp_path, value, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(Forbidden, match=rf"needs {os.name}\.system"):
        read_torch_file(path)
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:.*protocol 4:UserWarning")
@pytest.mark.parametrize("options", [{}, {"pickle_protocol": 4}])
def test_a_class_is_refused_by_its_name(tmp_path: Path, options: dict[str, int]) -> None:
    path = saved(tmp_path, {"path": tmp_path}, **options)
    with pytest.raises(Forbidden, match=r"pathlib\.PosixPath"):
        read_torch_file(path)


def test_a_plain_pickle_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(pickle.dumps(Runs(f"touch {tmp_path / 'made'}"), protocol=2))
    with pytest.raises(Forbidden, match="system"):
        read_torch_file(path)
    path.write_bytes(pickle.dumps({"a": 1}, protocol=2))
    with pytest.raises(InvalidTensor):
        read_torch_file(path)
    assert not (tmp_path / "made").exists()


def test_a_zip_bomb_is_refused_before_it_inflates(tmp_path: Path) -> None:
    path = zip_bomb(tmp_path / "a.pt")
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InvalidTensor, match="compressed"):
        read_torch_file(path)


def test_a_bomb_in_the_pickle_is_not_inflated(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": 1})
    bomb = tmp_path / "bomb.pt"
    inflated = b"X\x00\x00\x00\x08" + b" " * (128 << 20)
    rewritten(path, bomb, lambda name, data: inflated if name == "data.pkl" else data,
              zipfile.ZIP_DEFLATED)  # fmt: skip
    tracemalloc.start()
    try:
        assert peek(bomb) == []
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_globals_are_listed_from_the_beginning_of_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path, {"rollout_id": 7, "samples": [{"tokens": [1, 2]}], "t": torch.ones(1)})
    assert peek(path)[:6] == ["rollout_id", 7, "samples", "tokens", 1, 2]
    assert peek(path, 2) == ["rollout_id", 7]
    (tmp_path / "b.pt").write_bytes(b"no pickle")
    assert peek(tmp_path / "b.pt") == peek(tmp_path / "none.pt") == []
    assert "torch._utils._rebuild_tensor_v2" in globals_of(path)


def test_members_that_claim_more_than_the_file_has(tmp_path: Path) -> None:
    path = saved(tmp_path, {"t": torch.zeros(64)})
    data = bytearray(path.read_bytes())
    at = data.rfind(b"PK\x01\x02")
    data[at + 20 : at + 28] = (0xF0000000).to_bytes(4, "little") * 2  # sizes in the directory
    path.write_bytes(bytes(data))
    with pytest.raises(InvalidTensor, match="claims 40265"):
        read_torch_file(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = saved(tmp_path, {"t": torch.arange(64), "n": np.arange(3)}).read_bytes()
    path = tmp_path / "b.pt"
    for length in [*range(0, 64, 7), *range(64, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises((InvalidTensor, Forbidden)) as caught:
            read_torch_file(path)
        assert "weights_only=False" not in str(caught.value)


def test_changed_bytes_raise_nothing_else(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = saved(tmp_path, {"t": torch.arange(64), "n": np.arange(3), "s": np.float32(2)})
    whole = data.read_bytes()
    path = tmp_path / "b.pt"
    refused = 0
    for _ in range(300):
        changed = bytearray(whole)
        for at in rng.integers(0, len(whole), 3):
            changed[at] = rng.integers(0, 256)
        path.write_bytes(bytes(changed))
        try:
            read_torch_file(path)
        except (InvalidTensor, Forbidden):
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("depth", "copies", "words"),
    [(40, 10, "more values than bytes"), (100, 1, "nested deeper")],
)
def test_lists_that_explode_are_refused(
    tmp_path: Path, depth: int, copies: int, words: str
) -> None:
    value: list[object] = [1]
    for _ in range(depth):
        value = [value] * copies
    with pytest.raises(InvalidTensor, match=words):
        read_torch_file(saved(tmp_path, {"a": value}))


def test_a_tensor_that_repeats_one_value_is_bounded(tmp_path: Path) -> None:
    small = torch.zeros(1).expand(64, 8)
    assert array_of(content_of(saved(tmp_path, {"t": small}))["t"]).shape == (64, 8)
    huge = torch.zeros(1).expand(1 << 20, 1 << 20)
    with pytest.raises(InvalidTensor, match="far more values"):
        read_torch_file(saved(tmp_path, {"t": huge}))


def test_no_file_and_no_plain_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_torch_file(tmp_path / "a.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(InvalidTensor, match="no file"):
        read_torch_file(tmp_path / "pipe.pt")
    path = saved(tmp_path, {"t": torch.zeros(8)})
    with pytest.raises(InvalidTensor, match="at most 100"):
        read_torch_file(path, most_bytes=100)
