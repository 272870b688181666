"""Memory that is used again is never used by two."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

from stagescope_workers.payload import MIN_BYTES, BufferPool


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
