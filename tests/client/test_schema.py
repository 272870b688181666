"""What travels, and what is refused before it can spoil anything."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagescope_wire.errors import InvalidEvent, InvalidInput, StagescopeError
from stagescope_wire.nonfinite import Json
from stagescope_wire.schema import (
    BEGIN,
    PART_FIELDS,
    SCHEMA,
    WORK_FIELDS,
    Event,
    Part,
    Sender,
    Work,
    check_run_name,
)

SENDER = Sender("i-1", "run", "key", "actor", 3, "node", 0.5, 0.01, 1e9)

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def test_a_sender_travels() -> None:
    assert Sender.parse(SENDER.wire()) == SENDER
    assert Sender.parse([*SENDER.wire(), "of a later version"]) == SENDER
    assert Sender.parse((SCHEMA, "i", "run", None, "ref", 0)) == Sender("i", "run", None, "ref", 0)


@pytest.mark.parametrize(
    "change",
    [
        {"run": "no/slash"}, {"run": ".."}, {"run": None}, {"role": ""}, {"role": 3},
        {"rank": -1}, {"rank": True}, {"rank": 1.0}, {"rank": "0"}, {"rank": 1 << 40},
        {"incarnation": ""}, {"incarnation": None}, {"incarnation": 7}, {"attempt_key": []},
        {"attempt_key": ""}, {"attempt_key": "\ud800"}, {"attempt_key": "x" * 600},
        {"node_id": 1}, {"clock_offset": "1"}, {"clock_error": math.nan},
        {"started": math.inf}, {"started": True}, {"display_name": 7}, {"display_name": "x" * 501},
    ],
    ids=str,
)  # fmt: skip
def test_a_sender_with_a_wrong_field(change: dict[str, Json]) -> None:
    known = dataclasses.replace(SENDER, rank=1, started=1.0)
    Sender.parse(known.wire())  # what equals a known one must not pass for it
    # replace() does not check: the wire may hold anything.
    with pytest.raises(InvalidInput):
        Sender.parse(dataclasses.replace(known, **change).wire())


@pytest.mark.parametrize("wire", [None, 7, "x", (), (SCHEMA,), (2, *SENDER.wire()[1:])], ids=str)
def test_what_is_no_sender(wire: object) -> None:
    with pytest.raises(InvalidEvent):
        Sender.parse(wire)


def test_an_event_keeps_unknown_fields() -> None:
    event = Event(BEGIN, 7, 1.5, 2.5, {"step": 1, "later": [1, 2]})
    assert Event.parse(event.wire()) == event
    assert Event.parse([*event.wire(), "more"]) == event
    assert Event.parse((SCHEMA, BEGIN, 1, 2, 3, {})) == Event(BEGIN, 1, 2.0, 3.0, {})


@pytest.mark.parametrize(
    "wire",
    [
        None, (), (SCHEMA, BEGIN, 1, 1.0, 1.0), (2, BEGIN, 1, 1.0, 1.0, {}),
        (SCHEMA, "gossip", 1, 1.0, 1.0, {}), (SCHEMA, [], 1, 1.0, 1.0, {}),
        (SCHEMA, BEGIN, "1", 1.0, 1.0, {}), (SCHEMA, BEGIN, True, 1.0, 1.0, {}),
        (SCHEMA, BEGIN, -1, 1.0, 1.0, {}), (SCHEMA, BEGIN, 1 << 63, 1.0, 1.0, {}),
        (SCHEMA, BEGIN, 1, math.nan, 1.0, {}), (SCHEMA, BEGIN, 1, 1.0, math.inf, {}),
        (SCHEMA, BEGIN, 1, 10**400, 1.0, {}), (SCHEMA, BEGIN, 1, 1.0, None, {}),
        (SCHEMA, BEGIN, 1, 1.0, 1.0, []),
    ],
    ids=lambda wire: f"{wire!r:.40}",
)  # fmt: skip
def test_what_is_no_event(wire: object) -> None:
    with pytest.raises(InvalidEvent) as caught:
        Event.parse(wire)
    assert len(str(caught.value)) < 1000
    assert caught.value.expected


@given(anything)
def test_whatever_comes_is_read_or_refused(wire: object) -> None:
    for parse in (Sender.parse, Event.parse):
        with pytest.raises(StagescopeError):
            parse(wire)


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("st\udcff", "st\\udcff"), ("update\n", "update\\n"), ("a\0b", "a\\x00b"),
        ("actor\xa0update", "actor\\xa0update"), ("\u200bupdate", "\\u200bupdate"),
        ("\u751f\u6210 1", "\u751f\u6210 1"),
    ],
)  # fmt: skip
def test_a_stage_whose_name_cannot_be_printed_is_known_by_its_escapes(
    name: str, known_as: str
) -> None:
    assert Work.parse({"step": 1, "stage": name}).stage == known_as


@given(st.dictionaries(st.sampled_from(WORK_FIELDS), anything))
def test_any_work_fields_are_parsed_or_refused(fields: dict[str, Json]) -> None:
    try:
        work = Work.parse(fields)
    except InvalidEvent:
        return
    assert Work.parse(work.fields()) == work
    assert all(value >= 0 for value in work.part)


@pytest.mark.parametrize("name", ["step", "policy_version", *PART_FIELDS])
@pytest.mark.parametrize("value", ["1", 1.0, True, [1], 1 << 63])
def test_numbers_of_work_are_ints(name: str, value: object) -> None:
    Work.parse({name: 1})  # what equals a known one must not pass for it
    with pytest.raises(InvalidEvent, match=name if not isinstance(value, list) else "work fields"):
        Work.parse({name: value})


@pytest.mark.parametrize("name", PART_FIELDS)
def test_parts_count_from_0(name: str) -> None:
    assert Work.parse({name: None}).part == Work.parse({name: 0}).part == Part()
    with pytest.raises(InvalidEvent):
        Work.parse({name: -1})


works = st.builds(
    Work,
    st.none() | st.integers(-5, 5),
    st.none() | st.integers(0, 5),
    st.none() | st.text("ab|.", min_size=1, max_size=6),
    st.builds(Part, *[st.integers(0, 11)] * 4),
)


@given(works, works)
def test_a_key_names_one_piece_of_work(one: Work, other: Work) -> None:
    def identity(work: Work) -> tuple[object, ...]:
        # Where there is a step the version is a property of the work, not its identity.
        version = work.policy_version if work.step is None else None
        return (work.step, version, work.stage, work.part)

    assert (one.key == other.key) == (identity(one) == identity(other))


def test_keys_are_as_they_are_stored() -> None:
    assert Work(5, 9, "s", Part(1, 2, 3, 4)).key == "5||s|1.2.3.4"
    assert Work(None, 9, "s").key == "|9|s|0.0.0.0"
    assert Work(5, None, None).key == "5|||0.0.0.0"


@pytest.mark.parametrize("run", ["a", "A-b_c.9", "x" * 100])
def test_good_names_of_runs(run: str) -> None:
    assert check_run_name(run) == run


@pytest.mark.parametrize("run", ["", ".", "..", "x" * 101, "a b", "a/b", "a\n", "ü", None, 7])
def test_bad_names_of_runs(run: object) -> None:
    with pytest.raises(InvalidInput):
        check_run_name(run)
