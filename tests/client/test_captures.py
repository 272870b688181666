"""What a capture may request, and which stages it concerns."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagescope_wire.captures import CAPTURE_FIELDS, matches, validate_capture
from stagescope_wire.errors import Forbidden, InvalidPlan, StagescopeError
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.plan import CaptureSpec

SPEC: dict[str, Json] = {"stages": ["actor_update"], "steps": [5], "keep": ["old_log_probs"]}


def valid(roots: tuple[str, ...] = (), **changes: Json) -> CaptureSpec:
    return validate_capture({**SPEC, **changes}, allowed_roots=roots)


def test_every_field_is_filled_in() -> None:
    capture = valid()
    assert set(capture) == set(CAPTURE_FIELDS)
    assert capture == {
        "run": None, "stages": ["actor_update"], "roles": None, "ranks": "all", "steps": [5],
        "config": None, "config_path": None, "data_dir": None, "keep": ["old_log_probs"],
        "limits": {"bytes": None, "seconds": None}, "strict": False, "force": False,
        "timeout": 60.0, "late": "wait", "again": 0, "parameters": [], "gradients": [],
        "bench": None,
    }  # fmt: skip
    assert validate_capture(capture, allowed_roots=()) == capture


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"steps": None}, "steps"), ({"steps": []}, "steps"), ({"steps": "5-"}, "steps"),
        ({"steps": [2**63]}, "steps"), ({"steps": {"every": 1, "start": 2**63}}, "steps"),
        ({"ranks": [2**63]}, "ranks"), ({"ranks": {"worst": 2**63}}, "ranks"),
        ({"steps": [-1]}, "steps"), ({"steps": [True]}, "steps"), ({"steps": [1.0]}, "steps"),
        ({"steps": {"every": 0}}, "steps"), ({"steps": {"start": 1}}, "steps"),
        ({"steps": {"every": 2, "count": 0}}, "steps"), ({"steps": {"every": 2, "x": 0}}, "steps"),
        ({"stages": []}, "stages"), ({"stages": "actor_update"}, "stages"),
        ({"stages": [""]}, "stages"), ({"stages": None}, "stages"), ({"stages": [1]}, "stages"),
        ({"roles": "actor"}, "roles"), ({"ranks": []}, "ranks"), ({"ranks": [-1]}, "ranks"),
        ({"ranks": "worst"}, "ranks"), ({"keep": "x"}, "keep"),
        ({"keep": [], "config": None}, "keep"),
        ({"config": []}, "config"), ({"config": {"task": "x"}}, "config.task"),
        ({"config": {"level": "L9"}}, "config.level"),
        ({"config": {"dump_path": "relative"}}, "config.dump_path"),
        ({"config": {}, "config_path": "/"}, "config_path"),
        ({"limits": {"bytes": 0}}, "limits"), ({"limits": {"bytes": True}}, "limits"),
        ({"limits": {"seconds": float("nan")}}, "limits"), ({"limits": {"x": 1}}, "limits"),
        ({"limits": 5}, "limits"), ({"strict": "false"}, "strict"), ({"rank": [0]}, "rank"),
        ({"data_dir": "relative"}, "data_dir"), ({"data_dir": "/a\0"}, "data_dir"),
        ({"data_dir": 7}, "data_dir"), ({"run": 7}, "run"),
        ({"steps": b"xy"}, "steps"), ({"ranks": bytearray(b"x")}, "ranks"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_request_names_the_field(change: dict[str, Json], field: str) -> None:
    with pytest.raises(StagescopeError, match=field.replace(".", r"\.")) as caught:
        valid(("/",), **change)
    assert caught.value.expected


@pytest.mark.parametrize(
    ("given", "expected_spec"),
    [
        ({"steps": "next"}, {"steps": {"next": 1}}),
        ({"steps": "5,8-10"}, {"steps": [5, 8, 9, 10]}),
        ({"steps": {"next": 3}}, {"steps": {"next": 3}}),
        ({"ranks": "0,4-6"}, {"ranks": [0, 4, 5, 6]}),
        ({"ranks": "worst(2)"}, {"ranks": {"worst": 2}}), ({"ranks": None}, {"ranks": "all"}),
        ({"steps": {"every": 2}}, {"steps": {"every": 2, "start": None, "count": None}}),
        ({"task": "tensor", "list": "linear"},
         {"config": {"task": "tensor", "level": "L1", "tensor": {"list": ["linear"]}}}),
        ({"level": "L0"}, {"config": {"task": "statistics", "level": "L0"}}),
    ],
    ids=str,
)  # fmt: skip
def test_shorthands(given: dict[str, Json], expected_spec: dict[str, Json]) -> None:
    found: JsonObject = valid(**given)
    assert {name: found[name] for name in expected_spec} == expected_spec
    kept = {name: value for name, value in found.items() if name in CAPTURE_FIELDS}
    assert validate_capture(kept, allowed_roots=()) == found


@pytest.mark.parametrize(
    "change",
    [
        {"steps": "next:0"}, {"steps": {"next": 0}}, {"steps": {"next": 100_001}},
        {"steps": "3-1"}, {"steps": "0-99999999999"},
        {"ranks": "worst(0)"}, {"ranks": {"worst": True}}, {"ranks": {"best": 1}}, {"ranks": "1,"},
        {"late": "never"}, {"timeout": 0}, {"timeout": True}, {"again": -1}, {"again": 1.5},
        {"task": 5}, {"task": "statistics", "config": {}}, {"list": 5}, {"scope": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_contradictory_fields_are_refused(change: dict[str, Json]) -> None:
    with pytest.raises(InvalidPlan) as caught:
        valid(**change)
    assert caught.value.expected


def test_the_default_content_is_statistics() -> None:
    message = {"stages": ["actor_update"], "steps": "next"}
    assert validate_capture(message, allowed_roots=()) == validate_capture(
        {**message, "config": {"task": "statistics", "level": "L1"}}, allowed_roots=()
    )


def test_a_request_without_content_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="requests nothing"):
        valid(keep=[])


@given(
    st.dictionaries(
        st.sampled_from([*CAPTURE_FIELDS, "other"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=4,
        ),
    )
)
def test_any_request_is_accepted_or_refused(spec: dict[str, Json]) -> None:
    try:
        capture = validate_capture(spec, allowed_roots=["/tmp"])
    except StagescopeError:
        return
    assert validate_capture(capture, allowed_roots=["/tmp"]) == capture
    matches(capture, stage="s", role="actor", rank=0, step=3)


def test_paths_stay_inside_the_allowed_roots(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "out").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    roots = (str(root),)
    assert valid(roots, data_dir=f"{root}/a/../b")["data_dir"] == str(root / "b")
    for path in (outside, root / "out" / "x", f"{root}/../outside", f"{root}x"):
        for field in ("data_dir", "config_path"):
            with pytest.raises(Forbidden, match="allowed roots"):
                valid(roots, **{field: str(path)})
        with pytest.raises(Forbidden):
            valid(roots, config={"dump_path": str(path)})
    with pytest.raises(StagescopeError):
        valid(roots, data_dir=str(root / "loop" / "x" / ".." / ".." / ".." / "outside"))
    with pytest.raises(Forbidden):
        valid((), data_dir=str(root))


def chosen(steps: Json) -> list[int]:
    capture = valid(steps=steps)
    found = range(20)
    return [
        step
        for step in found
        if matches(capture, stage="actor_update", role="actor", rank=0, step=step)
    ]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("all", [*range(20)]), ([7, 3, 3], [3, 7]), ({"every": 5}, [0, 5, 10, 15]),
        ({"every": 5, "start": 2}, [2, 7, 12, 17]), ({"every": 5, "start": 2, "count": 2}, [2, 7]),
        ({"every": 1, "start": 18}, [18, 19]),
    ],
)  # fmt: skip
def test_matching_steps(steps: Json, expected: list[int]) -> None:
    assert chosen(steps) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True), ({"stages": "all"}, True), ({"stages": ["other"]}, False),
        ({"roles": ["actor"]}, True), ({"roles": ["ref"]}, False), ({"roles": []}, True),
        ({"ranks": [1, 2]}, True), ({"ranks": [0]}, False), ({"steps": [4]}, False),
    ],
    ids=str,
)  # fmt: skip
def test_matching_stages(change: dict[str, Json], expected: bool) -> None:
    capture = valid(**change)
    assert matches(capture, stage="actor_update", role="actor", rank=2, step=5) is expected


def test_work_without_a_step_matches_only_all_steps() -> None:
    where: dict[str, Json] = {"stage": "actor_update", "role": "actor", "rank": 0, "step": None}
    assert matches(valid(steps="all"), **where)
    assert not matches(valid(steps={"every": 1}), **where)
    assert not matches(valid(steps=[0]), **where)
