"""Whatever a process sends: one event is refused, or every row can be written."""

from __future__ import annotations

import json
import math
from typing import Any

import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trainings import check_memory

from stagescope_service.core.arrival import Arrival
from stagescope_service.core.catalogue_rows import plain
from stagescope_service.core.instructions import Delete, Put
from stagescope_service.core.spans import RAW_SEQ
from stagescope_service.core.state import State
from stagescope_service.store.statements import check
from stagescope_service.store.tables import TABLES
from stagescope_service.store.tables.declare import Flag, StrictJson
from stagescope_wire.errors import InvalidEvent
from stagescope_wire.schema import KINDS, WORK_FIELDS, Event, Sender

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(st.characters())
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
FIELDS = [
    "world_size", "data_rank", "layout", "fingerprint", "settings", "resumed_from_step", "pid",
    "device_time", "begin_seq", "begin_wall", "begin_mono", "status", "error_type",
    "error_message", "scalars", "payload", "payload_dropped", "device_seconds", "what", "count",
    "bytes", "reason", "message", "capture_id", "path", "state", "files", "seconds", "error",
    "task", "level", "overrides", "estimate", "unheard_of", "side", "kind", "tensors",
    "device",
]  # fmt: skip
plausible = {
    "step": st.integers(0, 3) | anything,
    "stage": st.sampled_from(["a", "b"]) | anything,
    "layout": st.dictionaries(st.sampled_from(["tp_rank", "host", "x"]), anything),
    "scalars": st.dictionaries(st.text(max_size=2), anything, max_size=3),
    "payload": st.dictionaries(st.sampled_from(["tensors", "bytes", "meta"]), anything),
    "payload_dropped": st.dictionaries(st.sampled_from(["reason", "bytes"]), anything),
    "begin_seq": st.integers(0, 9) | anything,
    "count": st.integers(-3, 9) | anything,
    "policy_version": st.integers(0, 3) | anything,
    "side": st.sampled_from(["trainer", "rollout"]) | anything,
    "kind": st.sampled_from(["exchanged", "held"]) | anything,
    "tensors": st.lists(
        st.tuples(
            st.sampled_from("ab") | anything,
            st.integers(0, 9) | anything,
            st.just("int8") | anything,
            st.lists(st.integers(0, 3), max_size=2) | anything,
            st.none() | anything,
        )
        | anything,
        max_size=2,
    )
    | anything,
    "device": st.dictionaries(st.sampled_from(["device_index", "device_serial"]), anything),
    "state": st.sampled_from(["armed", "complete", "failed"]) | anything,
}
fields = st.fixed_dictionaries(
    {"step": plausible["step"], "stage": plausible["stage"]},
    optional={
        name: plausible.get(name, anything)
        for name in (*WORK_FIELDS, *FIELDS)
        if name not in ("step", "stage")
    },
)
senders = st.builds(
    lambda name, role, rank, key: Sender(name + role + str(rank), "r", key, role, rank, "n", 0.1),
    st.sampled_from("ab"),
    st.sampled_from(["actor", "rollout"]),
    st.integers(0, 1),
    st.sampled_from(["k", "l", None]),
)
events = st.builds(
    Event,
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 12) | st.integers(RAW_SEQ, RAW_SEQ + 3),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
    fields,
)


def fits(column: sa.Column[object], value: Any) -> bool:
    if value is None:
        return not column.primary_key
    kind = column.type
    if isinstance(kind, Flag):
        return isinstance(value, bool)
    if isinstance(kind, StrictJson):
        json.dumps(value).encode()
        return True
    if kind.python_type is bytes:
        return isinstance(value, bytes)
    if kind.python_type is int:
        return type(value) is int and -(1 << 63) <= value < 1 << 63
    if kind.python_type is float:
        finite = column.name == "value" or math.isfinite(value)
        return type(value) in (int, float) and finite
    return isinstance(value, str) and bool(value.encode() or True) and "\0" not in value


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(senders, events, st.booleans(), st.booleans()), max_size=8))
def test_whatever_comes_can_be_written_or_is_refused(
    said: list[tuple[Sender, Event, bool, bool]],
) -> None:
    state = State()
    for at, (sender, event, has_payload, raw) in enumerate(said):
        known = set(state.registry.processes), set(state.registry.attempts)
        try:
            out = state.handle(sender, event, float(at), Arrival(has_payload, raw))
        except InvalidEvent:
            assert (set(state.registry.processes), set(state.registry.attempts)) == known
            continue
        for order in out:
            if isinstance(order, Put | Delete):
                check(order)
                cells = order.row if isinstance(order, Put) else order.where
                columns = TABLES[order.table].columns
                wrong = {name: v for name, v in cells.items() if not fits(columns[name], v)}
                assert not wrong, order
        check_memory(state)
    state.expire(1e9, 1.0)
    check_memory(state)


def test_an_int_of_no_column_is_kept_as_its_digits() -> None:
    """No answer could hold the number."""
    assert plain({"seed": 10**30, "lr": 2**63 - 1}) == {"seed": str(10**30), "lr": 2**63 - 1}
