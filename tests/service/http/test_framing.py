from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from stagescope_service.http import framing
from stagescope_wire import schema
from stagescope_wire.errors import InvalidEvent, InvalidInput, TooLarge
from stagescope_wire.tensors import DTYPE_BYTES

SENDER = list(schema.Sender("inc", "r", "a", "actor", 0).wire())
END = [1, "end", 7, 1.0, 1.0, {"step": 5, "stage": "actor_update"}]


def header(**changes: object) -> dict[str, object]:
    tensors = {"old_log_probs": {"dtype": "float32", "shape": [2, 3], "offsets": False}}
    payloads = {"7": {"tensors": tensors, "strings": {"sample_ids": ["a", "b"]}, "meta": {"k": 1}}}
    return {"sender": SENDER, "events": [END], "payloads": payloads, **changes}


def stored() -> dict[str, npt.NDArray[np.generic]]:
    return {"7/old_log_probs": np.arange(6, dtype=np.float32).reshape(2, 3)}


def frame(
    fields: object = None,
    tensors: bytes | Mapping[str, npt.NDArray[np.generic]] | None = None,
    *,
    length: int | None = None,
) -> bytes:
    text = (
        fields if isinstance(fields, bytes) else json.dumps(header() if fields is None else fields)
    )
    raw = text if isinstance(text, bytes) else text.encode()
    entries = stored() if tensors is None else tensors
    rest = entries if isinstance(entries, bytes) else save(dict(entries)) if entries else b""
    return struct.pack("<Q", len(raw) if length is None else length) + raw + rest


def parse(body: bytes, *, framed: bool = True, max_json: int = 1 << 20) -> framing.EventBatch:
    return framing.parse(body, framed=framed, max_json=max_json, max_events=100)


def described(**tensor: object) -> dict[str, object]:
    about = {"dtype": "float32", "shape": [2, 3], "offsets": False, **tensor}
    return header(payloads={"7": {"tensors": {"old_log_probs": about}}})


def test_a_batch_with_tensors() -> None:
    batch = parse(frame())
    assert batch.sender == tuple(SENDER)
    assert batch.events == [tuple(END)]
    payload = batch.payloads[7]
    dtype, shape, buffer, offsets = payload["tensors"]["old_log_probs"]
    assert (dtype, shape, offsets) == ("float32", (2, 3), None)
    np.testing.assert_array_equal(buffer, stored()["7/old_log_probs"])
    assert payload["schema"] == schema.SCHEMA
    assert payload["strings"] == {"sample_ids": ["a", "b"]}
    assert payload["meta"] == {"k": 1}


def test_offsets_and_every_dtype() -> None:
    for dtype in DTYPE_BYTES:
        kind = {"bfloat16": "uint16"}.get(dtype, dtype)
        values = np.array([0, 1, 1, 0, 1], kind)
        about = {"dtype": dtype, "shape": [5], "offsets": True}
        fields = header(payloads={"7": {"tensors": {"t": about}}})
        offsets = np.array([0, 2, 5], np.int64)
        body = frame(fields, {"7/t": values, "7/t/offsets": offsets})
        found = parse(body).payloads[7]["tensors"]["t"]
        assert found[0] == dtype
        assert found[2].dtype == values.dtype
        np.testing.assert_array_equal(found[2], values)
        np.testing.assert_array_equal(found[3], offsets)


def test_real_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save as save_torch

    values = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    fields = header(
        payloads={"7": {"tensors": {"t": {"dtype": "bfloat16", "shape": [2], "offsets": False}}}}
    )
    _, _, buffer, _ = parse(frame(fields, save_torch({"7/t": values}))).payloads[7]["tensors"]["t"]
    np.testing.assert_array_equal(buffer, values.view(torch.uint16).numpy())


def test_json_alone() -> None:
    fields = header(payloads={})
    assert parse(json.dumps(fields).encode(), framed=False).payloads == {}


def test_scalars_become_numbers_again() -> None:
    log = [1, "log", 8, 1.0, 1.0, {"step": 1, "scalars": {"loss": "nan", "reward": "-inf", "x": 2}}]
    batch = parse(json.dumps(header(events=[log], payloads={})).encode(), framed=False)
    fields: Any = batch.events[0][5]
    scalars = fields["scalars"]
    assert math.isnan(scalars["loss"])
    assert scalars["reward"] == -math.inf
    assert scalars["x"] == 2


def test_an_event_of_an_unknown_schema_is_left_to_the_coordinator() -> None:
    strange = [99, "end", 7, 1.0, 1.0, {}]
    assert parse(frame(header(events=[strange]))).events == [tuple(strange)]
    assert parse(frame(header(events=["odd", END]))).events[0] == ("odd",)


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('"\\ud800x"', "\\ud800x"),
        ("NaN", "nan"),
        ("1e999", "inf"),
        ("1" + "0" * 400, "1" + "0" * 400),
        ("1" + "0" * 6000, "1" + "0" * 6000),
    ],
    ids=lambda text: text[:8],
)
def test_what_strict_json_cannot_hold_costs_no_other_event(value: str, expected: str) -> None:
    odd = f'[1, "end", 8, 1.0, 1.0, {{"step": 5, "x": {value}}}]'
    body = f'{{"sender": {json.dumps(SENDER)}, "events": [{json.dumps(END)}, {odd}]}}'
    first, second = parse(body.encode(), framed=False).events
    assert first == tuple(END)
    assert second[5] == {"step": 5, "x": expected}


def test_an_event_that_is_nested_too_deep_is_refused_alone() -> None:
    deep, deeper = (f'[1, "end", 8, 1.0, 1.0, {{"x": {nested(n)}}}]' for n in (98, 99))
    body = f'{{"sender": {json.dumps(SENDER)}, "events": [{json.dumps(END)}, {deep}, {deeper}]}}'
    events = [*map(schema.Event.parse, parse(body.encode(), framed=False).events[:2])]
    assert [event.kind for event in events] == ["end", "end"]
    with pytest.raises(InvalidEvent, match="nested more than 100 deep"):
        schema.Event.parse(parse(body.encode(), framed=False).events[2])


BROKEN: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "half a length": lambda: b"\x01\x00",
    "a header longer than the body": lambda: frame(length=200_000),
    "a header shorter than its JSON": lambda: frame(length=10),
    "not JSON": lambda: frame(b"\x80\x04pickle"),
    "NaN in JSON": lambda: frame(b'{"events": [], "sender": [NaN]}'),
    "deep JSON": lambda: frame(b"[" * 50_000),
    "a list": lambda: frame([]),
    "no events": lambda: frame({"sender": SENDER}),
    "no sender": lambda: frame({"events": []}),
    "a sender of another schema": lambda: frame(header(sender=[9, *SENDER[1:]])),
    "a run that leaves its directory": lambda: frame(
        header(sender=[1, "i", "../../etc", "a", "actor", 0])
    ),
    "payloads as a list": lambda: frame(header(payloads=[1])),
    "a payload of no event": lambda: frame(header(payloads={"8": {}})),
    "a seq that is no number": lambda: frame(header(payloads={"7x": {}})),
    "a negative seq": lambda: frame(header(payloads={"-7": {}})),
    "a payload that is no object": lambda: frame(header(payloads={"7": 3})),
    "tensors as a list": lambda: frame(header(payloads={"7": {"tensors": [1]}})),
    "strings of numbers": lambda: frame(header(payloads={"7": {"strings": {"sample_ids": [1]}}})),
    "no tensors": lambda: frame(tensors=b""),
    "a tensor too few": lambda: frame(tensors={"7/other": np.zeros(6, np.float32)}),
    "a tensor too many": lambda: frame(tensors={**stored(), "9/x": np.zeros(1)}),
    "a tensor of another dtype": lambda: frame(tensors={"7/old_log_probs": np.zeros(6)}),
    "a tensor of another size": lambda: frame(tensors={"7/old_log_probs": np.zeros(5, np.float32)}),
    "an unknown dtype": lambda: frame(described(dtype="complex64")),
    "a dtype that is no text": lambda: frame(described(dtype=["float32"])),
    "no shape": lambda: frame(described(shape=None)),
    "a negative shape": lambda: frame(described(shape=[-2, -3])),
    "a shape of floats": lambda: frame(described(shape=[2.0, 3.0])),
    "a shape of bools": lambda: frame(described(shape=[True] * 6)),
    "a huge shape": lambda: frame(described(shape=[2**62, 3])),
    "a deep shape": lambda: frame(described(shape=[1] * 40)),
    "offsets that are not there": lambda: frame(described(offsets=True)),
    "cut tensors": lambda: frame()[:-3],
    "bytes after the tensors": lambda: frame() + b"x",
    "a huge safetensors header": lambda: frame(tensors=struct.pack("<Q", 2**63) + b"{}"),
    "pickle in place of tensors": lambda: frame(tensors=b"\x80\x04\x95cposix\nsystem\n"),
    "a bool of 2": lambda: frame(
        described(dtype="bool", shape=[2]), {"7/old_log_probs": np.array([1, 2], np.uint8)}
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_hostile_bodies(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(BROKEN[name]())
    assert caught.value.expected, str(caught.value)


def test_limits() -> None:
    with pytest.raises(TooLarge, match=r"header of 18446744073709551615 bytes"):
        parse(frame(length=2**64 - 1))
    with pytest.raises(TooLarge, match="JSON of"):
        parse(json.dumps(header(payloads={})).encode(), framed=False, max_json=20)
    with pytest.raises(TooLarge, match="101 events"):
        parse(frame(header(events=[END] * 101)))


@given(st.binary(max_size=400), st.booleans())
def test_no_bytes_do_more_than_be_refused(body: bytes, framed: bool) -> None:
    with contextlib.suppress(InvalidInput):
        parse(body, framed=framed)


@given(st.data())
def test_no_damage_does_more_than_be_refused(data: st.DataObject) -> None:
    body = bytearray(frame())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InvalidInput):
        parse(bytes(body))
