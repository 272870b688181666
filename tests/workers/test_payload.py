"""Tensors of every kind arrive as the same flat host buffers."""

from __future__ import annotations

import pickle
import threading
import warnings

import hypothesis.extra.numpy as numpy_strategies
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagescope_wire.errors import InvalidTensor
from stagescope_wire.policy_versions import encode_versions, is_numbered, names_of, text_versions
from stagescope_workers.payload import (
    MIN_BYTES,
    BufferPool,
    host_tensor,
    owned_tensor,
    strings_from,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_view_of_any_shape_keeps_its_bits(dtype: torch.dtype) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(dtype)
    views = (base.T, base[:, ::2], base[1:, 3:], base.expand(2, 4, 6), base[0, 0], base[:0])
    for view in (base, *views):
        tag, shape, buffer, _ = owned_tensor("p", view)
        assert buffer.flags.c_contiguous
        assert shape == tuple(view.shape)
        reference = view.contiguous()
        bits = reference.view(torch.int16).numpy().view(np.uint16) if tag == "bfloat16" else None
        np.testing.assert_array_equal(buffer, reference.numpy() if bits is None else bits)


ORDERED = {"41": "step-41", "42": "step-42"}


@pytest.mark.parametrize(
    ("value", "shape", "codes", "names"),
    [
        (["41", "42", "41"], (3,), [41, 42, 41], {}),
        (["-1", 41, "+2"], (3,), [-1, 41, 2], {}),
        (["step-41", "step-42", "step-41"], (3,), [41, 42, 41], ORDERED),
        (["global_step_7"], (1,), [7], {"7": "global_step_7"}),
        (["V3", "V3"], (2,), [3, 3], {"3": "V3"}),
        (["weights/ckpt-12/"], (1,), [12], {"12": "weights/ckpt-12/"}),
        (["policy-8", "policy-9"], (2,), [8, 9], {"8": "policy-8", "9": "policy-9"}),
        (np.array(["step-42", "step-41"]), (2,), [42, 41], {"42": "step-42", "41": "step-41"}),
        (np.array(["step-41", "step-42"], object), (2,), [41, 42], ORDERED),
        (np.array([["step-41"] * 2, ["step-42"] * 2]), (2, 2), [41, 41, 42, 42], ORDERED),
        ((["step-41", "step-42"], ["step-42"], []), (3,), [41, 42, 42], ORDERED),
        ([np.array(["step-41"]), np.array(["step-42"])], (2,), [41, 42], ORDERED),
    ],
    ids=str,
)
def test_versions_that_are_texts_are_the_numbers_in_them(
    value: object, shape: tuple[int, ...], codes: list[int], names: dict[str, str]
) -> None:
    found = text_versions(value)
    assert found is not None
    (tag, found_shape, buffer, offsets), found_names = found
    assert (tag, found_shape, buffer.reshape(-1).tolist()) == ("int64", shape, codes)
    assert [*found_names.items()] == [*names.items()]
    if isinstance(value, list | tuple) and not isinstance(value[0], str | int):
        assert offsets is not None
        assert np.diff(offsets).tolist() == [len(row) for row in value]
    else:
        assert offsets is None


@pytest.mark.parametrize(
    "texts",
    [
        ["default"],
        ["Qwen3"],  # another text would show that the number is one of a version
        ["a-3"],
        ["default", "step-1"],
        ["a3f9", "b7c2"],  # a hash has no number
        ["lora-a-1", "lora-b-2"],
        ["2026-11-27", "2026-11-28"],
        ["1.0", "2.0"],
        ["9" * 30, "8"],
        ["", "v1"],
        ["\ud800", "\0", "é" * 500],
    ],
    ids=str,
)
def test_other_texts_are_the_same_in_every_process_and_have_no_number(texts: list[str]) -> None:
    codes, names = encode_versions(texts)
    assert len(set(codes)) == len(texts)
    assert not any(map(is_numbered, codes))
    assert [*names] == [str(code) for code in codes]  # in the order of their appearance
    assert all(len(name) <= 100 and name.isprintable() for name in names.values())
    again, _ = encode_versions([*reversed(texts), *texts])
    assert again == [*reversed(codes), *codes]


def test_names_of_numbers_that_are_too_long_are_left_out() -> None:
    named = {"9" * 5000: "x", "9" * 19: "a", "-3": "b", "q": "c", "7": "step-7"}
    assert names_of({"version_names": named}) == {int("9" * 19): "a", -3: "b", 7: "step-7"}


def test_what_is_no_version_among_texts_is_refused() -> None:
    for wrong in ([None, "a"], ["a", 1.5], ["a", ["b"]], [["a"], None]):
        with pytest.raises(InvalidTensor, match="versions has"):
            text_versions(wrong)
    with pytest.raises(InvalidTensor, match="at most 1000"):
        text_versions([f"{row}.{row}" for row in range(1001)])
    for numbers in ([1, 2], np.array([1]), [[1], [2]], [], None, torch.tensor([3]), 5, "step-3"):
        assert text_versions(numbers) is None


def test_requires_grad_and_inference_tensors_are_read() -> None:
    weight = torch.randn(3, requires_grad=True)
    np.testing.assert_array_equal(host_tensor("w", weight * 2)[2], (weight * 2).detach().numpy())
    with torch.inference_mode():
        value = torch.ones(3) * 2
    assert owned_tensor("v", value)[2].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_jagged_tensor_becomes_packed_values_with_offsets(dtype: torch.dtype) -> None:
    rows = [torch.randn(n).to(dtype) for n in (3, 0, 5)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    tag, shape, buffer, offsets = owned_tensor("p", jagged)
    assert (tag, shape) == (str(dtype).removeprefix("torch."), (8,))
    assert offsets is not None
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [0, 3, 3, 8]
    np.testing.assert_array_equal(buffer, owned_tensor("p", torch.cat(rows))[2])


def test_jagged_rows_with_gaps_are_closed_up() -> None:
    base = torch.arange(18.0).reshape(3, 6)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([2, 3, 2])
    gappy = torch.nested.narrow(base, 1, starts, lengths, layout=torch.jagged)
    _, _, buffer, offsets = host_tensor("p", gappy)
    assert buffer.tolist() == [0, 1, 7, 8, 9, 14, 15]
    assert offsets is not None
    assert offsets.tolist() == [0, 2, 5, 7]


def test_strided_nested_tensor_is_packed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(1)])
    _, _, buffer, offsets = host_tensor("p", nested)
    assert buffer.tolist() == [1, 1, 0]
    assert offsets is not None
    assert offsets.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    "rows",
    [
        [torch.tensor([1.0, 2.0]), torch.tensor([]), torch.tensor([3.0])],
        (np.array([1.0, 2.0]), np.array([]), np.array([3.0])),
        [[1.0, 2.0], [], [3.0]],
        [[1.0, 2.0], (), np.array([3.0])],
    ],
    ids=["tensors", "arrays", "lists", "mixed"],
)
def test_list_of_rows_is_packed(rows: object) -> None:
    _, shape, buffer, offsets = owned_tensor("p", rows)
    assert shape == (3,)
    assert buffer.tolist() == [1.0, 2.0, 3.0]
    assert offsets is not None
    assert offsets.tolist() == [0, 2, 2, 3]


def test_list_of_numbers_is_one_dimensional() -> None:
    assert host_tensor("r", [1, 2, 3])[:2] == ("int64", (3,))
    assert host_tensor("r", [True, False])[0] == "bool"
    assert host_tensor("r", [torch.tensor(1.5), torch.tensor(2.5)])[2].tolist() == [1.5, 2.5]
    assert host_tensor("r", [])[1] == (0,)


@pytest.mark.parametrize(("name", "tag"), [("responses", "int64"), ("old_log_probs", "float64")])
@pytest.mark.parametrize("rows", [[], [[], []]], ids=str)
def test_empty_lists_of_rows_are_rows(name: str, tag: str, rows: list[object]) -> None:
    found, shape, _, offsets = host_tensor(name, rows)
    assert (found, shape) == (tag, (0,))
    assert offsets is not None
    assert offsets.tolist() == [0] * (len(rows) + 1)


def test_unsigned_and_foreign_byte_orders_keep_their_values() -> None:
    assert host_tensor("t", np.array([65535], dtype=np.uint16))[0] == "int32"
    assert host_tensor("t", np.array([65535], dtype=np.uint16))[2].tolist() == [65535]
    swapped = np.array([1.0, 2.0], dtype=">f4")
    tag, _, buffer, _ = host_tensor("t", swapped)
    assert tag == "float32"
    assert buffer.dtype.isnative
    assert buffer.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, dtype=torch.complex64), ["shape (2,)", "complex64", "float32"]),
        (torch.zeros(2, 3, device="meta"), ["shape (2, 3)", "with data"]),
        (torch.zeros(3).to_sparse(), ["shape (3,)", "dense"]),
        (np.array([1 + 2j]), ["complex128"]),
        (np.array([object()]), ["object"]),
        ([torch.zeros(2), torch.zeros(2, dtype=torch.float64)], ["float32[2]", "float64[2]"]),
        ([torch.zeros(2, 2), torch.zeros(3)], ["float32[2, 2]", "1-D rows"]),
        (object(), ["a object"]),
        ("text", ["a str"]),
        ([1, 2**70], ["list of 2"]),
    ],
)
def test_what_is_unsupported_by_the_wire_is_named(value: object, words: list[str]) -> None:
    with pytest.raises(InvalidTensor) as caught:
        host_tensor("old_log_probs", value)
    assert "old_log_probs" in str(caught.value)
    assert "expected" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@given(
    numpy_strategies.arrays(
        dtype=st.sampled_from(
            ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
        ),
        shape=numpy_strategies.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    )
)
def test_owned_tensor_shares_nothing(array: npt.NDArray[np.generic]) -> None:
    for source, expected in (
        (array, array.copy()),
        (array.T, array.T.copy()),
        (torch.from_numpy(array), array.copy()),
    ):
        tag, shape, buffer, offsets = owned_tensor("x", source)
        assert (tag, shape, offsets) == (expected.dtype.name, expected.shape, None)
        assert buffer.dtype == expected.dtype
        assert not np.shares_memory(buffer, array)
        np.testing.assert_array_equal(buffer, expected)


def test_host_tensor_views_where_it_can() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    assert np.shares_memory(host_tensor("x", tensor)[2], tensor.view(torch.int16).numpy())


def test_ids_become_strings() -> None:
    assert strings_from("sample_ids", [1, "b"]) == ["1", "b"]
    assert strings_from("sample_ids", torch.tensor([4, 5])) == ["4", "5"]
    assert strings_from("uid", np.array(["a", "b"], dtype=object)) == ["a", "b"]
    assert strings_from("rewards", [1.0, 2.0]) is None
    with pytest.raises(InvalidTensor, match="sample_ids"):
        strings_from("sample_ids", 7)


def values(seed: int, size: int = MIN_BYTES) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, size, dtype=np.int32)


def test_a_buffer_is_used_again_only_when_its_last_array_is_gone() -> None:
    pool = BufferPool()
    first = pool.copy(values(0))
    part = first.reshape(2, -1)[1, ::2]  # holds the buffer, too
    del first
    second = pool.copy(values(1))
    assert np.array_equal(part, values(0).reshape(2, -1)[1, ::2])
    assert not np.shares_memory(part, second)
    assert pool.idle == 0
    where = second.__array_interface__["data"][0]
    del second
    assert pool.idle > 0
    third = pool.copy(values(2))
    assert third.__array_interface__["data"][0] == where
    assert np.array_equal(third, values(2))
    del part


@pytest.mark.parametrize("dtype", ["float64", "float32", "uint16", "int64", "int8", "bool"])
def test_what_is_copied_is_the_same(dtype: str) -> None:
    pool = BufferPool()
    for source in (
        values(3).astype(dtype),
        values(3).astype(dtype).reshape(256, -1)[::2, 1:],  # not contiguous
        values(3).astype(dtype).reshape(-1, 64).T,
        np.zeros((0, 5), dtype),
        np.asarray(3).astype(dtype),
    ):
        copy = pool.copy(source)
        assert copy.dtype == source.dtype
        assert copy.shape == source.shape
        assert np.array_equal(copy, source)
        assert copy.flags.c_contiguous
        assert copy.flags.writeable
        assert not np.shares_memory(copy, source)


def test_it_travels_like_any_array() -> None:
    pool = BufferPool()
    copy = pool.copy(values(4))
    buffers: list[pickle.PickleBuffer] = []
    reported = pickle.dumps(copy, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1
    again = pickle.loads(reported, buffers=[bytes(buffers[0].raw())])
    assert np.array_equal(again, values(4))


def test_what_lies_unused_is_bounded() -> None:
    pool = BufferPool(idle_bytes=10 * MIN_BYTES)
    held = [pool.copy(values(seed, MIN_BYTES + 5000 * seed)) for seed in range(20)]
    held.clear()
    assert 0 < pool.idle <= 10 * MIN_BYTES
    large = pool.copy(values(0, 100 * MIN_BYTES))
    del large
    assert pool.idle <= 10 * MIN_BYTES


def test_sizes_that_are_about_the_same_share_a_buffer() -> None:
    pool = BufferPool()
    for size in range(MIN_BYTES, MIN_BYTES + 4000, 100):
        pool.copy(values(0, size))
    assert pool.idle < 2.5 * 4 * MIN_BYTES  # two sizes at most


def test_several_threads_never_see_each_others_values() -> None:
    pool = BufferPool()
    wrong: list[int] = []

    def work(number: int) -> None:
        source = np.full(MIN_BYTES, number, np.int32)
        for _ in range(200):
            copies = [pool.copy(source) for _ in range(3)]
            if not all((copy == number).all() for copy in copies):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
