"""The checksum of a weight: any changed bit, by position, the same on the host and by torch."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from stagescope_wire.errors import InvalidTensor
from stagescope_workers import checksum as module
from stagescope_workers.checksum import CHUNK_BYTES, checksum, device_sum, unsigned

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def definition(data: bytes) -> int:
    """The formula, word by word, in Python's own integers."""
    block_words = module.BLOCK_WORDS
    words = np.frombuffer(data + bytes(-len(data) % 4), "<i4").tolist()
    blocks = -(-len(words) // block_words)
    w = _splitmix(0x243F6A8885A308D3, min(len(words), block_words))
    v = _splitmix(0x13198A2E03707344, blocks)
    total = 0
    for b in range(blocks):
        block = words[b * block_words : (b + 1) * block_words]
        total += v[b] * sum(weight * x for weight, x in zip(w, block, strict=False))
    return total % (1 << 64)


def _splitmix(seed: int, count: int) -> list[int]:
    found, most = [], (1 << 64) - 1
    for i in range(1, count + 1):
        z = (seed + i * 0x9E3779B97F4A7C15) & most
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & most
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & most
        found.append((z ^ (z >> 31)) | 1)
    return found


@st.composite
def tensors(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES) -> torch.Tensor:
    """Tensors of any dtype and bits, whole, transposed, with steps, expanded, or off an edge."""
    shape, dtype = draw(shapes), draw(st.sampled_from(dtypes))
    size = int(np.prod(shape, dtype=int)) + 3
    itemsize = torch.empty(0, dtype=dtype).element_size()
    if dtype is torch.bool:
        data = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size).map(bytes))
    else:
        data = draw(st.binary(min_size=size * itemsize, max_size=size * itemsize))
    flat = torch.frombuffer(bytearray(data), dtype=dtype)
    tensor = flat[draw(st.integers(0, 3)) :][: size - 3].reshape(shape)
    match draw(st.sampled_from(["whole", "permuted", "step", "expanded"])):
        case "permuted":
            return tensor.permute(draw(st.permutations(range(tensor.dim()))))
        case "step" if tensor.dim():
            return tensor[:: draw(st.integers(1, 3))]
        case "expanded":
            return tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """A flat copy whose stride is 1, of one element too."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).clone()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return whole_of(tensor).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module", params=[4, module.BLOCK_WORDS], autouse=True)
def block_words(request: pytest.FixtureRequest) -> Iterator[int]:
    """Blocks as they are, and so small that the smallest tensors go through every seam."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_WORDS", request.param)
        patch.setattr(module, "BLOCK_BYTES", 4 * request.param)
        patch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES if request.param > 4 else 32)
        _forget()
        yield request.param
    _forget()


def _forget() -> None:
    for cached in (module._streams, module._device_streams, module._has_host_arithmetic):
        cached.cache_clear()


@given(tensors())
def test_it_is_the_definition_on_the_host_and_by_torch(tensor: torch.Tensor) -> None:
    expected = definition(bytes_of(tensor))
    assert checksum(tensor) == expected
    assert unsigned(int(device_sum(module._bits(tensor)))) == expected


@given(
    tensors([dtype for dtype in DTYPES if "float8" not in str(dtype) and "bf" not in str(dtype)])
)
def test_an_array_is_as_its_tensor(tensor: torch.Tensor) -> None:
    assert checksum(tensor.numpy()) == checksum(tensor)
    other_order = tensor.numpy().astype(tensor.numpy().dtype.newbyteorder(">"))
    assert checksum(other_order) == checksum(tensor)


@given(tensors(), st.data())
def test_any_changed_bit_is_seen(tensor: torch.Tensor, data: st.DataObject) -> None:
    complete = whole_of(tensor)
    raw = complete.view(torch.uint8)
    assume(raw.numel())
    before = checksum(complete)
    assert checksum(tensor) == before
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(complete) != before


@given(tensors(DTYPES[-2:]))
def test_lazily_conjugated_and_negated_tensors_are_their_values(tensor: torch.Tensor) -> None:
    for view in (tensor.conj(), tensor.conj().imag):
        assert checksum(view) == definition(bytes_of(view.resolve_conj().resolve_neg()))


def test_of_what_needs_a_gradient_and_in_inference_mode() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0))
    with torch.inference_mode():
        inside = weight.clone()
        assert checksum(inside) == checksum(weight) == checksum(torch.arange(6.0))


@pytest.mark.parametrize(
    "value",
    [torch.zeros(2, device="meta"), torch.eye(2).to_sparse(), np.array([object()]), [1.0, 2.0]],
)
def test_what_has_no_bytes_is_refused(value: object) -> None:
    with pytest.raises(InvalidTensor, match="the weight is"):
        checksum(value)


@pytest.mark.parametrize("form", ["whole", "transposed", "step"])
def test_memory_is_bounded(block_words: int, form: str) -> None:
    if block_words == 4:
        pytest.skip("of real chunks alone")
    data = np.random.default_rng(0).integers(0, 256, (6 << 10, 8 << 10), np.uint8)
    view = {"whole": data, "transposed": data.T, "step": data[:, ::2]}[form]
    checksum(view)  # the weights are made once
    tracemalloc.start()
    found = checksum(view)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == checksum(np.ascontiguousarray(view))
    assert peak < (0 if form == "whole" else CHUNK_BYTES) + (1 << 20)


def test_a_device_whose_integers_saturate_is_summed_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cpu")
    assert module._has_host_arithmetic(device)
    module._has_host_arithmetic.cache_clear()
    monkeypatch.setattr(module, "device_sum", lambda bits: torch.tensor((1 << 63) - 1))
    assert not module._has_host_arithmetic(device)
    module._has_host_arithmetic.cache_clear()


@pytest.mark.gpu
@given(tensors())
def test_a_cuda_device_gives_the_same(tensor: torch.Tensor) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    found = checksum(tensor.to("cuda"))
    assert not isinstance(found, int)
    assert found.device.type == "cuda"
    assert unsigned(int(found)) == checksum(tensor)
