"""Calls as they come in, on a real catalogue; no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
from tests.support.local import coordinator_of
from tests.support.stores import eventually, rows_of, url_of

from stagescope_service.coordinator import draining
from stagescope_service.coordinator.answers import Drained
from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.coordinator.raw_fields import FIELDS, OWN_FIELDS, PAGE, call_name
from stagescope_service.coordinator.restore import restore
from stagescope_service.coordinator.runner import Clock
from stagescope_service.core.hangs.stack_requests import RankRequest
from stagescope_service.core.instructions import Aggregate, Ingest, PayloadKey
from stagescope_service.core.state import State
from stagescope_service.store.contract import Store, Submitted
from stagescope_service.store.sql import SqlStore
from stagescope_wire.captures import validate_capture
from stagescope_wire.errors import InvalidEvent, InvalidInput, NotFound, NotReady
from stagescope_wire.schema import Sender

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]


class Clocked:
    """A coordinator whose clock the test moves."""

    def __init__(self, store: SqlStore, folder: Path) -> None:
        self.now = 0.0
        self.mono: Callable[[], float] = lambda: self.now
        self.store = store
        self.coordinator = coordinator_of(
            store, folder, poll_seconds=0.001, lease_seconds=45.0, mono=lambda: self.mono()
        )

    def run(self, call: Coroutine[Any, object, T]) -> T:
        return asyncio.run(call)

    def raw(self, kind: str, delivery: str, **fields: object) -> dict[str, Any]:
        body = {"run": "r", "step": 1, "stage": "actor_update", **fields}
        return self.run(self.coordinator.raw_calls.record(kind, delivery, body))

    def begin(self) -> None:
        """Let a probe begin a stage."""
        sender = Sender("i", "r", "a", "actor", 0).wire()
        event = (1, "begin", 1, 1.0, 1.0, {"step": 1, "stage": "actor_update"})
        self.run(self.coordinator.parts.intake.record(sender, [event]))

    def pass_time(self, seconds: float, every: float = 1.0) -> None:
        """Let time pass as for a coordinator that looks after leases."""
        until = self.now + seconds
        while self.now < until:
            self.now += every
            self.run(self.coordinator.parts.leases.expire())

    def statuses(self) -> list[tuple[int, str]]:
        return sorted((row["occurrence"], row["status"]) for row in rows_of(self.store, "stages"))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Clocked]:
    store = SqlStore(url_of(tmp_path))
    store.open()
    yield Clocked(store, tmp_path)
    store.close()


def test_finish_of_a_raw_run_ends_its_newest_attempt_for_all_its_ranks(made: Clocked) -> None:
    with pytest.raises(NotFound):
        made.raw("finish", "nobody", run="unknown")
    for rank in (0, 1, 2):
        made.raw("begin", f"begin {rank}", rank=rank)
    for rank in (0, 1):
        made.raw("end", f"end {rank}", rank=rank, status="ok")
    one = made.raw("finish", "one", rank=1)
    assert (one["finished"], one["over"]) == ([{"role": "actor", "rank": 1}], False)
    reply = made.run(made.coordinator.raw_calls.record("finish", "all", {"run": "r"}))
    assert ([each["rank"] for each in reply["finished"]], reply["over"]) == ([0, 2], True)
    (attempt,) = rows_of(made.store, "attempts")
    assert (attempt["end_reason"], attempt["ended_wall"] is not None) == ("finished", True)
    again = made.run(made.coordinator.raw_calls.record("finish", "all", {"run": "r"}))
    assert (again["finished"], again["over"]) == ([], True)


@pytest.mark.parametrize("named", [{"rank": 55}, {"role": "actr"}, {"role": "critic", "rank": 0}])
def test_finish_of_somebody_who_is_not_there_is_refused(
    made: Clocked, named: Mapping[str, object]
) -> None:
    made.raw("begin", "begin", rank=0)
    with pytest.raises(InvalidEvent, match="expected one of actor 0"):
        made.run(made.coordinator.raw_calls.record("finish", "x", {"run": "r", **named}))
    [found] = rows_of(made.store, "findings")
    assert found["kind"] == "refused_call"
    assert all(str(value) in found["message"] for value in named.values())


def test_what_raw_callers_begin_after_their_finish_is_the_next_attempt(made: Clocked) -> None:
    for rank, step in ((0, 1), (1, 1), (0, 2)):
        made.raw("begin", f"begin {rank} {step}", rank=rank, step=step)
        made.raw("end", f"end {rank} {step}", rank=rank, step=step, status="ok")
    made.raw("finish", "first")
    assert made.raw("begin", "late", step=2, rank=1)["attempt"] == 1
    assert made.raw("begin", "again", step=1)["attempt"] == 2
    assert made.raw("end", "again's end", step=1, status="ok")["attempt"] == 2
    made.raw("finish", "second")
    assert made.raw("begin", "one step again", step=1)["attempt"] == 3
    assert [row["number"] for row in rows_of(made.store, "attempts")] == [1, 2, 3]
    assert made.statuses().count((0, "ok")) == 4


def test_a_raw_call_that_is_refused_is_a_finding(made: Clocked) -> None:
    made.raw("begin", "first", rank=0, world_size=2)
    for fields in ({"rank": -1}, {"step": -3}):
        with pytest.raises(InvalidEvent):
            made.raw("begin", "second", **fields)
    made.raw("begin", "third", rank=2, world_size=2)
    rows = {row["kind"]: row for row in rows_of(made.store, "findings")}
    assert rows.keys() == {"refused_call", "refused_world_size"}
    assert "step is -3" in rows["refused_call"]["message"]
    assert "actor rank 2 says world_size 2" in rows["refused_world_size"]["message"]


def test_raw_calls_that_are_refused_for_several_reasons_are_counted_apart(
    made: Clocked, tmp_path: Path
) -> None:
    made.raw("begin", "first", rank=0, world_size=1)
    refused = [{"step": -3}, {"step": -4}, {"rnak": 2}, {"occurrence": -1}]
    for fields in refused:
        with pytest.raises(InvalidEvent):
            made.raw("begin", "second", **fields)
    rows = rows_of(made.store, "findings")
    assert {row["kind"] for row in rows} == {"refused_call"}
    assert sorted((row["count"], row["message"].split(":")[1].split(";")[0]) for row in rows) == [
        (1, " begin_stage has no field 'rnak'"), (1, " occurrence is -1"), (2, " step is -4"),
    ]  # fmt: skip
    assert {(row["role"], row["rank"]) for row in rows} == {("actor", 0)}
    snapshot, state = made.store.snapshot(), State()
    restore(state, snapshot, 0.0)
    again = coordinator_of(made.store, tmp_path, state=state)
    again.parts.adopt(snapshot)
    body = {"run": "r", "step": -5, "stage": "actor_update"}
    with pytest.raises(InvalidEvent):
        made.run(again.raw_calls.record("begin", "later", body))
    rows = rows_of(made.store, "findings")
    assert [row["count"] for row in rows if "step is -5" in row["message"]] == [3]
    assert len(rows) == 3


def test_events_that_are_refused_for_several_reasons_are_counted_apart(made: Clocked) -> None:
    made.begin()
    sender = Sender("i", "r", "a", "actor", 0).wire()
    wrong = [{"step": -1, "stage": "s"}, {"step": -2, "stage": "s"}, {"step": 1}]
    events = [(1, "begin", seq, 1.0, 1.0, fields) for seq, fields in enumerate(wrong, 2)]
    assert len(made.run(made.coordinator.parts.intake.record(sender, events))["refused"]) == 3
    rows = rows_of(made.store, "findings")
    assert sorted((row["kind"], row["count"]) for row in rows) == [
        ("refused_event", 1), ("refused_event", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields", "meant"),
    [
        ("begin", {"run": "r", "stp": 5, "stage": "actor_update", "rank": 0}, "step"),
        ("begin", {"run": "r", "step": 5, "stage": "actor_update", "rnak": 3}, "rank"),
        ("end", {"run": "r", "step": 5, "stage": "s", "paylod": {}}, "payload"),
        ("end", {"run": "r", "step": 5, "stage": "s", "mini_batch": 1}, "minibatch"),
        ("log", {"run": "r", "stpe": 5, "scalars": {"loss": 0.5}}, "step"),
        ("end_step", {"run": "r", "step": 5, "attempt-key": "a"}, "attempt_key"),
        ("finish", {"run": "r", "ranks": 1}, "rank"),
    ],
)
def test_a_misspelt_field_of_a_raw_call_is_refused(
    made: Clocked, kind: str, fields: Mapping[str, object], meant: str
) -> None:
    with pytest.raises(InvalidEvent, match=f"has no field .*{meant}, which is the closest"):
        made.run(made.coordinator.raw_calls.record(kind, "d", fields))
    [row] = rows_of(made.store, "findings")
    assert (row["kind"], row["advice"]) == ("refused_call", "nothing of this call was taken")
    assert rows_of(made.store, "stages") == []


@pytest.mark.parametrize(
    ("kind", "fields", "meant"),
    [
        ("begin", {"run_name": "r", "step": 5, "stage": "s"}, "run"),
        ("begin", {"experiment-name": "r", "step": 5, "stage": "s"}, "run"),
        ("begin", {"run": "r", "global_step": 5, "stage": "s"}, "step"),
        ("log", {"run": "r", "rollout_id": 5, "scalars": {"loss": 0.5}}, "step"),
        ("begin", {"run": "r", "trainer_step": 5, "stage": "s"}, "step"),
        ("log", {"run": "r", "Training-Iteration": 5, "scalars": {"loss": 0.5}}, "step"),
        ("end", {"run": "r", "step": 5, "stage": "s", "weight_version": 3}, "policy_version"),
        ("begin", {"run": "r", "step": 5, "name": "s"}, "stage"),
        ("end", {"run": "r", "step": 5, "stage": "s", "global_rank": 1}, "rank"),
        ("log", {"run": "r", "step": 5, "metrics": {"loss": 0.5}}, "scalars"),
        ("end", {"run": "r", "step": 5, "stage": "s", "tensors": {}}, "payload"),
    ],
)
def test_another_name_of_a_field_of_a_raw_call_is_answered_with_ours(
    made: Clocked, kind: str, fields: Mapping[str, object], meant: str
) -> None:
    with pytest.raises(InvalidEvent) as raised:
        made.run(made.coordinator.raw_calls.record(kind, "d", fields))
    assert f"expected {meant}, which it is called here" in str(raised.value)
    assert f"{PAGE} says what each is" in str(raised.value)
    # Beside the right one it is another field: the call is taken.
    both = {"run": "r", "step": 5, "stage": "s", "global_step": 5, "rank": 0}
    assert "no field global_step: not taken" in made.raw("begin", "both", **both)["refused_in_part"]


def test_the_page_of_raw_calls_lists_each_field_with_its_type_and_its_calls() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`.*?) \| ([\w ]+) \| (.*?) \| .+ \|$", text, re.M)
    listed = {
        name: (kind, calls.partition(";")[0])
        for names, kind, calls in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    of_one: dict[str, list[str]] = {}
    types = dict(FIELDS)
    for kind, fields in OWN_FIELDS.items():
        types |= fields
        for name in fields:
            of_one.setdefault(name, []).append(f"`{call_name(kind)}`")
    calls = {name: ", ".join(of_one.get(name, ["all"])) for name in types}
    assert listed == {name: (kind, calls[name]) for name, kind in types.items()}
    named = set(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", text, re.M)) - {"over", "refused_in_part"}
    assert named == {call_name(kind) for kind in OWN_FIELDS}


def test_a_raw_call_may_name_its_run_by_any_text(made: Clocked) -> None:
    told = made.raw("begin", "begin", run="qwen3/grpo", rank=0)
    assert told["run"] == "qwen3-grpo-9bf7109e"
    assert made.raw("end", "end", run="qwen3/grpo", rank=0, status="ok")["attempt"] == 1
    assert made.raw("finish", "finish", run="qwen3/grpo")["run"] == told["run"]
    (row,) = rows_of(made.store, "runs")
    assert (row["run"], row["display_name"]) == (told["run"], "qwen3/grpo")


@pytest.mark.parametrize("name", [name for name, kind in FIELDS.items() if kind == "integer"])
@pytest.mark.parametrize("value", ["5", 5.5, np.float32(5), [5], {}], ids=str)
def test_a_raw_field_of_another_type_is_refused(made: Clocked, name: str, value: object) -> None:
    fields = {"run": "r", "step": 5, "stage": "s", "rank": 0, name: value}
    with pytest.raises(InvalidInput, match="rank" if name == "rank" else name.split("_")[0]):
        made.run(made.coordinator.raw_calls.record("begin", "d", fields))
    assert rows_of(made.store, "stages") == []


@pytest.mark.parametrize("of", [np.int64, np.array, torch.tensor, lambda n: torch.tensor([n])])
def test_scalars_of_numpy_and_torch_are_numbers_in_a_raw_call(
    made: Clocked, of: Callable[[int], object]
) -> None:
    work = {"step": of(7), "rank": of(1), "minibatch": of(2), "policy_version": of(6)}
    told = made.raw("begin", "begin", **work, world_size=of(2))
    assert "refused_in_part" not in told
    assert (told["step"], type(told["step"])) == (7, int)
    scalars = {"a": of(3), "b": np.float32(0.5), "c": torch.tensor(0.25, dtype=torch.bfloat16)}
    told = made.raw("end", "end", **work, status="ok", scalars=scalars)
    assert "refused_in_part" not in told
    assert {row["name"]: row["value"] for row in rows_of(made.store, "scalars")} == {
        "a": 3.0, "b": 0.5, "c": 0.25,
    }  # fmt: skip
    (row,) = rows_of(made.store, "stages")
    names = ("step", "rank", "minibatch", "policy_version", "status")
    assert [row[name] for name in names] == [7, 1, 2, 6, "ok"]
    with pytest.raises(InvalidEvent, match=r"step is 5\.0"):
        made.raw("begin", "float", step=torch.tensor(5.0))


def test_what_of_a_raw_payload_is_no_tensor_is_not_announced_as_one(made: Clocked) -> None:
    payload = {
        "old_log_probs": [[0.5]], "sample_ids": ["a"], "answers": ["x"], "policy_version": 3,
        "streams": {"old": {"producer": "a"}}, "nothing": None,
    }  # fmt: skip
    payload["versions"] = ["step-1"]

    async def end() -> None:
        fields = {"run": "r", "step": 1, "stage": "s"}
        call = asyncio.create_task(made.coordinator.raw_calls.record("end", "d", fields, payload))
        await asyncio.sleep(0)
        [key] = made.coordinator.parts.state.pending("r")
        await made.coordinator.parts.payloads.settle(key, "ingested", None)
        await call

    made.run(end())
    (row,) = rows_of(made.store, "payloads")
    assert set(row["tensors"]) == {"old_log_probs", "versions"}


def test_a_field_that_a_raw_call_does_not_have_is_said_and_the_rest_is_taken(made: Clocked) -> None:
    every = {"role": "actor", "rank": 0, "world_size": 1, "attempt_key": "a", "policy_version": 3}
    every |= {"occurrence": 0, "epoch": 0, "minibatch": 0, "microbatch": 0}
    # state is no misspelling of the stage beside it
    for step in (1, 2):
        told = made.raw("begin", f"{step}", **every, step=step, state="x", tp_rank=2)
        assert (
            "begin_stage of actor has no field state, tp_rank: not taken"
            in (told["refused_in_part"])
        )
    assert "refused_in_part" not in made.raw("end", "end", **every, status="ok", scalars={})
    assert "has no field scalars" in made.raw("end_step", "s", scalars={})["refused_in_part"]
    assert "has no field timeout" in made.raw("finish", "f", timeout=30)["refused_in_part"]
    kinds = [row["kind"] for row in rows_of(made.store, "findings")]
    assert kinds == ["unknown_fields"] * 3
    assert len(rows_of(made.store, "stages")) == 2


def test_a_raw_call_says_what_of_it_was_not_taken(made: Clocked) -> None:
    made.raw("begin", "begin", rank=0)
    told = made.raw("log", "log", rank=0, scalars={"loss": "x", "reward": 0.5, "kl": None})
    assert "kl (NoneType), loss (str)" in told["refused_in_part"]
    assert [row["name"] for row in rows_of(made.store, "scalars")] == ["reward"]
    assert "refused_in_part" not in made.raw("log", "good", rank=0, scalars={"loss": 0.1})
    told = made.raw("end", "end", rank=0, status="ok", scalars=[0.5])
    assert "scalars (list, not a dict of names" in told["refused_in_part"]
    told = made.raw("end", "nameless", rank=0, status="ok", scalars={"": 1.0, "x" * 201: 1.0})
    assert "'' (no name)" in told["refused_in_part"]
    assert {row["name"] for row in rows_of(made.store, "scalars")} == {"reward", "loss"}
    assert "world_size 1" in made.raw("begin", "two", rank=2, world_size=1)["refused_in_part"]
    many = made.raw("begin", "many", rank=3, world_size=1 << 40)
    assert "world_size 1099511627776, which is not taken" in many["refused_in_part"]
    nothings: list[dict[str, object]] = [{}, {"scalars": None}, {"scalars": [0.5]}, {"loss": 0.5}]
    for nothing in nothings:
        with pytest.raises(InvalidEvent, match="scalars: a dict of names"):
            made.raw("log", "nothing", rank=0, **nothing)


@pytest.mark.parametrize("size", ["8", 1 << 70, math.nan, [5], {}, b"x", True, 1.0])
def test_a_raw_call_with_a_world_size_of_another_type_is_refused(
    made: Clocked, size: object
) -> None:
    with pytest.raises(InvalidEvent, match="the world_size is"):
        made.raw("begin", "begin", rank=0, world_size=size)
    assert rows_of(made.store, "stages") == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("begin", "attempt_key"), ("begin", "device_time"), ("begin", "role"), ("end", "status"),
        ("end", "scalars"), ("log", "scalars"), ("finish", "attempt_key"), ("end_step", "rank"),
    ],
)  # fmt: skip
def test_an_array_as_a_field_of_a_raw_call_is_refused(made: Clocked, kind: str, name: str) -> None:
    made.raw("begin", "before")
    with pytest.raises(InvalidEvent, match=f"'{name}' of .* is a ndarray of shape"):
        made.raw(kind, "odd", **{name: np.arange(3.0)})
    assert [row["kind"] for row in rows_of(made.store, "findings")] == ["refused_call"]


@pytest.mark.parametrize(
    "who", [{"rank": {}}, {"rank": []}, {"rank": ""}, {"rank": False}, {"rank": 0.0}, {"role": ""}]
)
def test_a_raw_call_of_nobody_is_refused(made: Clocked, who: Mapping[str, object]) -> None:
    with pytest.raises(InvalidEvent, match="sender with role") as raised:
        made.raw("begin", "begin", **who)
    assert raised.value.__context__ is None
    assert rows_of(made.store, "stages") == []


def test_a_raw_call_may_have_an_attempt_key_of_each_length_that_is_documented(
    made: Clocked,
) -> None:
    run, longest = "r" * 100, "k" * 500
    for key in (longest, longest[:-1] + "l"):
        for rank in (0, 1):
            told = made.raw("begin", f"{key}{rank}", run=run, attempt_key=key, rank=rank)
            assert (told["run"], told["occurrence"]) == (run, 0)
    assert len({row["incarnation"] for row in rows_of(made.store, "stages")}) == 4
    for wrong in (longest + "k", "k\0", 7):
        with pytest.raises(InvalidEvent, match="sender with attempt_key"):
            made.raw("begin", "odd", run=run, attempt_key=wrong)


@pytest.mark.parametrize("fields", [{}, {"run": None}, {"run": " "}, {"project": "p"}])
def test_a_raw_call_without_a_run_is_told_so(made: Clocked, fields: Mapping[str, object]) -> None:
    with pytest.raises(InvalidInput, match="has no run") as raised:
        made.run(made.coordinator.raw_calls.record("end", "d", {"step": 5, "stage": "s", **fields}))
    assert PAGE in str(raised.value)


def test_an_answer_to_a_batch_says_what_of_an_event_was_not_taken(made: Clocked) -> None:
    sender = Sender("i", "r", "a", "actor", 0).wire()
    said: list[dict[str, object]] = [{"scalars": {"a": 1, "b": "x"}}, {"scalars": {"a": 2}}, {}]
    events = [(1, "log", seq, 1.0, 1.0, {"step": 1, **fields}) for seq, fields in enumerate(said)]
    answer = made.run(made.coordinator.parts.intake.record(sender, events))
    assert (answer["received"], [*answer["refused"]]) == (2, [2])
    in_part = answer.get("refused_in_part", {})
    assert [*in_part] == [0]
    assert "b (str)" in in_part[0]


@pytest.mark.parametrize("kind", ["end", "log", "end_step"])
def test_a_late_word_of_a_stranger_does_not_reopen_what_has_finished(
    made: Clocked, kind: str
) -> None:
    made.raw("begin", "begin", rank=0)
    assert made.raw("end", "end", rank=0, status="ok")["over"] is False
    made.raw("finish", "finish")
    told = made.raw(kind, "late", rank=1, step=2, world_size=2, scalars={"loss": 0.5})
    assert (told["attempt"], told["over"]) == (1, True)
    (attempt,) = rows_of(made.store, "attempts")
    assert (attempt["end_reason"], attempt["ended_wall"] is not None) == ("finished", True)
    assert not any(each.live for each in made.coordinator.parts.state.registry.processes.values())
    if kind != "end_step":
        assert [row["value"] for row in rows_of(made.store, "scalars")] == [0.5]
    # What begins is work: the next start, as ever.
    assert made.raw("begin", "again", rank=1, step=1)["attempt"] == 2


def test_a_raw_call_says_why_its_payload_was_not_taken(made: Clocked) -> None:
    async def end() -> dict[str, object]:
        fields = {"run": "r", "step": 1, "stage": "s"}
        call = asyncio.create_task(
            made.coordinator.raw_calls.record("end", "d", fields, {"old_log_probs": [[0.5]]})
        )
        await asyncio.sleep(0)  # it was taken, and waits for who reads it
        [key] = made.coordinator.parts.state.pending("r")
        await made.coordinator.parts.payloads.settle(key, "refused", "response_mask is missing")
        return await call

    answer = made.run(end())
    assert (answer["payload"], answer["payload_reason"]) == ("refused", "response_mask is missing")


def test_a_raw_payload_with_a_name_that_is_no_text_changes_nothing(made: Clocked) -> None:
    fields = {"run": "r", "step": 1, "stage": "s", "world_size": 2}
    with pytest.raises(InvalidEvent, match="has a int, 1, for a name"):
        made.run(made.coordinator.raw_calls.record("end", "d", fields, {1: [[0.5]]}))  # type: ignore[dict-item]
    assert made.coordinator.parts.state.registry.newest("r") is None
    made.begin()
    assert [row["run"] for row in rows_of(made.store, "runs")] == ["r"]


def test_an_event_that_cannot_be_handled_leaves_no_payload_unsettled(
    made: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = made.coordinator.parts.state

    def fails(*arguments: object, **more: object) -> None:
        raise RuntimeError("not expected")

    made.begin()
    monkeypatch.setattr(state, "_stand", fails)
    announced = {"step": 1, "stage": "actor_update", "payload": {"tensors": {"x": {}}}}
    sender = Sender("i", "r", "a", "actor", 0).wire()
    end = (1, "end", 2, 1.0, 1.0, announced)
    answer = made.run(made.coordinator.parts.intake.record(sender, [end], {2: {}}))
    assert answer["refused"] == {2: "RuntimeError: not expected"}
    assert state.pending("r") == []
    (row,) = rows_of(made.store, "payloads")
    assert (row["state"], row["reason"]) == ("refused", "RuntimeError: not expected")


def test_a_raw_callers_misspelt_tensor_is_a_finding(made: Clocked) -> None:
    async def end() -> None:
        taken = made.coordinator.raw_calls.record(
            "end",
            "d",
            {"run": "r", "step": 1, "stage": "s"},
            {"rollout_logprobs": [[0.5]], "sample_ids": ["a"], "sample_id": ["b"]},
        )
        with contextlib.suppress(asyncio.TimeoutError):  # nobody reads it here
            await asyncio.wait_for(taken, 0.2)

    made.run(end())
    [row] = [row for row in rows_of(made.store, "findings") if row["kind"] == "misspelt_tensor"]
    assert "rollout_logprobs (expected rollout_log_probs)" in row["message"]
    assert "sample_id (expected sample_ids)" in row["message"]


def test_raw_calls_that_ran_in_the_other_order_are_one_stage(made: Clocked) -> None:
    assert made.raw("end", "first end", status="ok")["occurrence"] == 0
    assert made.raw("begin", "first begin")["occurrence"] == 0
    assert made.statuses() == [(0, "ok")]
    assert made.raw("begin", "second begin")["occurrence"] == 1
    assert made.raw("begin", "third begin")["occurrence"] == 2
    assert made.raw("end", "second end", status="ok")["occurrence"] == 1
    assert made.raw("begin", "first begin")["occurrence"] == 0  # a retry
    assert made.statuses() == [(0, "ok"), (1, "ok"), (2, "open")]


def test_a_silent_process_loses_its_lease(made: Clocked) -> None:
    made.begin()
    made.pass_time(44.0)
    assert made.statuses() == [(0, "open")]
    made.pass_time(3.0)
    assert made.statuses() == [(0, "unfinished")]


def test_leases_begin_anew_where_the_coordinator_was_held_up(made: Clocked) -> None:
    made.begin()
    made.pass_time(200.0, every=200.0)
    made.pass_time(44.0)
    assert made.statuses() == [(0, "open")]
    made.pass_time(3.0)
    assert made.statuses() == [(0, "unfinished")]


def test_leases_begin_anew_where_the_catalogue_could_not_be_written(
    made: Clocked, tmp_path: Path
) -> None:
    made.begin()
    there = tmp_path / "catalogue.db"
    os.rename(there, tmp_path / "away.db")
    waiting = made.store.submit([])
    eventually(lambda: not made.store.health().healthy)
    with pytest.raises(NotReady, match="was removed"):
        made.begin()
    made.pass_time(200.0)
    os.rename(tmp_path / "away.db", there)
    waiting.result(30)
    eventually(lambda: made.store.health().healthy)
    made.pass_time(44.0)
    assert made.statuses() == [(0, "open")]
    made.pass_time(3.0)
    assert made.statuses() == [(0, "unfinished")]


def test_a_payload_that_is_no_dict_is_refused_and_ends_nothing(made: Clocked) -> None:
    with pytest.raises(InvalidEvent, match="the payload is a int"):
        made.run(
            made.coordinator.raw_calls.record("end", "d", {"run": "r", "step": 1, "stage": "s"}, 5)  # type: ignore[arg-type]
        )
    assert made.statuses() == []


@pytest.mark.parametrize("status", ["exploded", "error", 5, "OK"])
def test_a_status_that_none_knows_is_refused_and_not_called_ok(
    made: Clocked, status: object
) -> None:
    made.raw("begin", "first")
    with pytest.raises(InvalidEvent, match=r"the status of end_stage is .*'ok' or 'failed'"):
        made.raw("end", "second", status=status)
    assert made.statuses() == [(0, "open")]
    assert [row["kind"] for row in rows_of(made.store, "findings")] == ["refused_call"]
    made.raw("end", "third", status="failed")
    assert made.statuses() == [(0, "failed")]


class HeldStore:
    """A store whose disk can be slow: what is submitted meanwhile is not committed."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self.slow = False
        self._held: list[tuple[Any, Submitted]] = []

    def submit(self, writes: Any, *, isolate: bool = False) -> Submitted:
        if not self.slow:
            return self._store.submit(writes, isolate=isolate)
        future: Submitted = Future()
        self._held.append((writes, future))
        return future

    def release(self) -> None:
        """Let the disk catch up."""
        self.slow = False
        for puts, future in self._held:
            future.set_result(self._store.submit(puts).result(30))
        self._held.clear()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def test_a_receipt_is_given_after_its_commit_and_not_before(made: Clocked) -> None:
    store = HeldStore(made.store)
    made.coordinator.parts.commits.store = cast(Store, store)
    sender = Sender("i", "r", "a", "actor", 0).wire()
    announced = {"step": 1, "stage": "actor_update", "payload": {"tensors": {"x": {}}}}
    end = (1, "end", 2, 1.0, 1.0, announced)

    async def settle_slowly() -> None:
        await made.coordinator.parts.intake.record(sender, [end], {2: {}})
        await made.coordinator.parts.intake.poll(sender, 0, [], 0.0)  # its own row is written now
        store.slow = True
        settling = asyncio.create_task(
            made.coordinator.parts.payloads.settle(PayloadKey("i", 2), "ingested", None)
        )
        await asyncio.sleep(0)  # it has changed the state and waits for the disk
        early = await made.coordinator.parts.intake.poll(sender, 0, [2], 0.0)
        again = await made.coordinator.parts.intake.record(sender, [end], {2: {}})
        store.release()
        await settling
        assert early["receipts"] == again["receipts"] == {}
        late = await made.coordinator.parts.intake.poll(sender, 0, [2], 0.0)
        assert late["receipts"] == {2: "ingested"}

    made.run(settle_slowly())


def test_an_event_that_is_sent_again_is_acknowledged_after_its_first_commit(made: Clocked) -> None:
    store = HeldStore(made.store)
    made.coordinator.parts.commits.store = cast(Store, store)
    sender = Sender("i", "r", "a", "actor", 0).wire()
    begin = (1, "begin", 1, 1.0, 1.0, {"step": 1, "stage": "actor_update"})

    async def send_twice() -> None:
        store.slow = True
        calls = [asyncio.create_task(made.coordinator.parts.intake.record(sender, [begin]))]
        await asyncio.sleep(0)  # it has changed the state and waits for the disk
        calls.append(asyncio.create_task(made.coordinator.parts.intake.record(sender, [begin])))
        done, _ = await asyncio.wait(calls, timeout=0.2)
        assert not done
        store.release()
        answers = await asyncio.gather(*calls)
        assert [answer["received"] for answer in answers] == [1, 1]

    made.run(send_twice())
    assert made.statuses() == [(0, "open")]


@pytest.mark.parametrize("kind", ["begin", "finish"])
def test_a_raw_call_that_ray_repeats_is_answered_after_its_first_commit(
    made: Clocked, kind: str
) -> None:
    made.raw("begin", "before")
    store = HeldStore(made.store)
    made.coordinator.parts.commits.store = cast(Store, store)
    fields = {"run": "r", "step": 1}
    fields |= {"stage": "s"} if kind == "begin" else {}

    async def call_twice() -> None:
        store.slow = True
        call = made.coordinator.raw_calls.record
        calls = [asyncio.create_task(call(kind, "d", fields))]
        await asyncio.sleep(0)  # it has changed the state and waits for the disk
        calls.append(asyncio.create_task(call(kind, "d", fields)))
        done, _ = await asyncio.wait(calls, timeout=0.2)
        assert not done
        store.release()
        first, again = await asyncio.gather(*calls)
        assert first["attempt"] == again["attempt"]
        assert first.get("occurrence") == again.get("occurrence")

    made.run(call_twice())


def test_a_step_is_due_while_its_last_payload_is_written(made: Clocked) -> None:
    """Else a later step, aggregated meanwhile, is held against the rules before it."""
    store = HeldStore(made.store)
    made.coordinator.parts.commits.store = cast(Store, store)
    sender = Sender("i", "r", "a", "actor", 0).wire()
    announced = {"step": 1, "stage": "actor_update", "payload": {"tensors": {"x": {}}}}
    end = (1, "end", 2, 1.0, 1.0, announced)
    later = (1, "begin", 3, 2.0, 2.0, {"step": 2, "stage": "actor_update"})

    async def settle_slowly() -> None:
        await made.coordinator.parts.intake.record(sender, [end, later], {2: {}})
        attempt = made.coordinator.parts.state.attempt(1)
        assert attempt is not None
        assert list(attempt.pending) == [1]
        store.slow = True
        settling = asyncio.create_task(
            made.coordinator.parts.payloads.settle(PayloadKey("i", 2), "ingested", None)
        )
        await asyncio.sleep(0)  # it has changed the state and waits for the disk
        assert not attempt.pending
        assert list(made.coordinator.parts.runner._due) == [Aggregate(1, 1)]
        store.release()
        await settling
        assert not made.coordinator.parts.runner._due

    made.run(settle_slowly())


async def published(coordinator: Coordinator) -> None:
    """Wait until every rank is told an order's agreed step."""
    while coordinator.parts.plan.for_run("r")[0]["phase"] == "asked":  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.002)


def test_a_missed_step_is_asked_again_of_every_rank(made: Clocked) -> None:
    sender = Sender("i", "r", "a", "actor", 0).wire()
    place = {"step": 1, "stage": "actor_update"}

    async def miss() -> None:
        coordinator = made.coordinator
        await coordinator.parts.intake.record(sender, [(1, "begin", 1, 1.0, 1.0, place)])
        spec = {"run": "r", "stages": ["actor_update"], "steps": "next", "task": "statistics"}
        valid = validate_capture({**spec, "again": 1}, allowed_roots=())
        entry = coordinator.parts.requests.add(valid, by="me", mono=0.0, wall=0.0)
        await coordinator.parts.plan_changes.change([coordinator.parts.requests.row(entry)])
        await coordinator.parts.intake.poll(
            sender, coordinator.parts.plan.revision, [], 0.0
        )  # it acknowledges
        capture = {"capture_id": entry.capture_id}
        told = {"stage": "actor_update", **capture, "state": "estimated", "estimate": {}}
        await coordinator.parts.intake.record(sender, [(1, "dump", 2, 1.0, 1.0, told)])
        await coordinator.parts.plan_changes.check()
        # The poll has it looked at, too, and may still be writing.
        await asyncio.wait_for(published(coordinator), 30)
        (agreed,) = coordinator.parts.plan.for_run("r")
        assert (agreed["phase"], agreed["agreement"]) == ("agreed", 1)
        known = coordinator.parts.plan.revision
        (start,) = cast("list[int]", agreed["steps"])
        missed = {"step": start, "stage": "actor_update", **capture}
        await coordinator.parts.intake.record(
            sender, [(1, "dump", 3, 1.0, 1.0, {**missed, "state": "missed"})]
        )
        news = await coordinator.parts.intake.poll(sender, known, [], 0.0)
        assert news["plan"] is not None
        (asked,) = news["plan"]["captures"]
        assert (asked["phase"], asked["agreement"], asked["steps"]) == ("asked", 2, [])
        (finding,) = rows_of(made.store, "findings")
        assert (finding["kind"], finding["step"]) == ("capture_partial", missed["step"])

    made.run(miss())


def test_batches_bring_a_plan_and_acknowledge_it(made: Clocked) -> None:
    place = {"step": 1, "stage": "actor_update"}

    def sender(revision: int | None) -> tuple[object, ...]:
        return Sender("i", "r", "a", "actor", 0, plan_revision=revision).wire()

    async def train() -> None:
        coordinator = made.coordinator
        intake = coordinator.parts.intake
        answer = await intake.record(sender(0), [(1, "begin", 1, 1.0, 1.0, place)])
        assert "plan" not in answer
        spec = {"run": "r", "stages": ["actor_update"], "steps": "next", "task": "statistics"}
        valid = validate_capture(spec, allowed_roots=())
        entry = coordinator.parts.requests.add(valid, by="me", mono=0.0, wall=0.0)
        await coordinator.parts.plan_changes.change([coordinator.parts.requests.row(entry)])
        revision = coordinator.parts.plan.revision
        # A job of an earlier version says no revision, and polls for the plan.
        assert "plan" not in await intake.record(sender(None), [(1, "log", 2, 1.0, 1.0, place)])
        answer = await intake.record(sender(0), [(1, "log", 3, 1.0, 1.0, place)])
        assert answer.get("plan") == coordinator.parts.plan.wire("r")
        capture = {"capture_id": entry.capture_id}
        told = {"stage": "actor_update", **capture, "state": "estimated", "estimate": {}}
        answer = await intake.record(sender(revision), [(1, "dump", 4, 1.0, 1.0, told)])
        # A poll that was sent before the batch, and is read after it, undoes nothing.
        await intake.poll(sender(0), 0, [], 0.0)
        await coordinator.parts.plan_changes.check()
        await asyncio.wait_for(published(coordinator), 30)
        (process,) = rows_of(made.store, "processes")
        assert process["plan_revision"] == revision
        # A revision beyond the plan's own is of a catalogue before this one.
        for said in (revision + 100, revision):
            await intake.poll(sender(said), said, [], 0.0)
            (process,) = rows_of(made.store, "processes")
            assert process["plan_revision"] == said

    made.run(train())


def test_verdicts_of_many_ranks_are_written_once_for_all_their_late_events(made: Clocked) -> None:
    """As of ranks that were there before the service, and then send all that they did."""
    ranks, stages = 60, ("rollout", "reward", "old_log_prob", "actor_update")

    def events(rank: int) -> list[object]:
        kinds = [
            (kind, step, stage)
            for step in (1, 2)
            for stage in stages
            for kind in ("begin", "end")
            if (step, stage, kind) != (2, "actor_update", "end")
        ]
        made: list[object] = [(1, "hello", 1, 1.0, 1.0, {"world_size": ranks})]
        made += [
            (1, kind, seq, 1.0, 1.0, {"step": step, "stage": stage, "status": "ok"})
            for seq, (kind, step, stage) in enumerate(kinds, 2)
        ]
        return made

    async def send(coordinator: Coordinator, first: int, last: int) -> None:
        for rank in range(first, last):
            sender = Sender(f"i{rank}", "r", "a", "actor", rank).wire()
            await coordinator.parts.intake.record(sender, events(rank))

    def verdict() -> tuple[str, int]:
        [row] = [row for row in rows_of(made.store, "steps") if row["step"] == 1]
        return row["completeness"], len(row["missing"])

    made.run(send(made.coordinator, 0, 5))
    before = verdict()
    assert before[0] == "partial"
    assert before[1] > 200
    # Nothing is written while more comes; then once, by a coordinator that was started anew, too.
    made.pass_time(0.5, every=0.5)
    assert verdict() == before
    again = made.run(
        Coordinator.open(
            made.coordinator.parts.settings, made.store, made.coordinator.parts.ingestors, name="c2"
        )
    )
    time_then = time.monotonic()
    again.parts.steps._clock = Clock(time.time, lambda: time_then + 2.0)
    made.run(again.check())
    assert verdict() == ("partial", (ranks - 5) * len(stages))
    made.run(send(again, 5, ranks))
    again.parts.steps._clock = Clock(time.time, lambda: time_then + 20.0)
    made.run(again.check())
    assert verdict() == ("complete", 0)


class Trainer:
    """A rank of a start with the key `a`, that answers what its polls hand out, or does not."""

    def __init__(self, made: Clocked, rank: int, run: str = "r") -> None:
        self.made = made
        self.seq = 0
        self.sender = Sender(f"{run}{rank}", run, "a", "actor", rank, started=1.0).wire()
        self.polling: asyncio.Task[dict[str, object]] | None = None

    async def say(self, kind: str, **fields: object) -> None:
        self.seq += 1
        event = (1, kind, self.seq, float(self.seq), 1.0, fields)
        await self.made.coordinator.parts.intake.record(self.sender, [event])

    async def poll(self) -> list[RankRequest]:
        answer = await self.made.coordinator.parts.intake.poll(self.sender, 0, [], 20.0)
        requests: list[RankRequest] = answer["requests"]
        return requests

    async def obey(self, last: int) -> None:
        """Take leave as it is asked to, after what it has still to send."""
        asked: list[RankRequest] = []
        while not any(request["what"] == "finish" for request in asked):
            asked = await self.poll()
        await self.say("begin", step=last, stage="actor_update")
        await self.say("end", step=last, stage="actor_update", status="ok")
        await self.say("finish")


def live(made: Clocked) -> None:
    """Let the clock be the real one: what is waited for happens meanwhile."""
    made.mono = time.monotonic
    made.coordinator.parts.intake.poll_seconds = 0.05


def test_the_driver_of_a_job_waits_for_what_every_rank_has_still_to_send(made: Clocked) -> None:
    async def train() -> Drained:
        live(made)
        ranks = [Trainer(made, rank) for rank in (0, 1)]
        for rank in ranks:
            await rank.say("hello", world_size=2)
            await rank.say("begin", step=1, stage="actor_update")
            await rank.say("end", step=1, stage="actor_update", status="ok")
        drain = asyncio.create_task(made.coordinator.parts.draining.drain(None, 30.0, "a"))
        await asyncio.gather(*(rank.obey(2) for rank in ranks))
        return await drain

    said = made.run(train())
    assert (said["drained"], said["known"], said["missing"]) == (True, True, [])
    [attempt] = rows_of(made.store, "attempts")
    assert attempt["end_reason"] == "finished"
    steps = rows_of(made.store, "steps")
    assert {row["step"]: row["closed_wall"] is not None for row in steps} == {1: True, 2: True}


def test_the_driver_hears_of_what_will_never_arrive(made: Clocked) -> None:
    async def train() -> tuple[Drained, Drained, Drained]:
        live(made)
        for name in ("r", "other"):
            rank = Trainer(made, 0, name)
            await rank.say("hello", world_size=1)
            await rank.say("begin", step=1, stage="actor_update")
            if name == "r":
                lost = {"step": 1, "stage": "actor_update", "reason": "no room"}
                await rank.say("dropped", what="payload", count=2, **lost)
                await rank.say("dropped", what="event", count=1, **lost)
            await rank.say("end", step=1, stage="actor_update", status="ok")
            await rank.say("finish")
        drain = made.coordinator.parts.draining.drain
        return await drain("r", 1.0), await drain("r", 1.0, "a"), await drain("other", 1.0, "a")

    *of_run, of_other = made.run(train())
    for said in of_run:
        assert said["drained"]
        assert said["lost"] == ["actor rank 0: events 1", "actor rank 0: payloads 2"]
    assert of_other["drained"]
    assert "lost" not in of_other


def test_the_driver_hears_of_ranks_that_never_came(made: Clocked) -> None:
    async def train() -> tuple[Drained, ...]:
        live(made)
        nothing = await made.coordinator.parts.draining.drain(None, 0.05, "a")
        rank = Trainer(made, 1)
        await rank.say("hello", world_size=3)
        answer, _ = await asyncio.gather(
            made.coordinator.parts.draining.drain("r", 2.0, "a"), rank.obey(1)
        )
        other = await made.coordinator.parts.draining.drain("r", 0.05, "of another job")
        return nothing, answer, other

    nothing, answer, other = made.run(train())
    assert (nothing["drained"], nothing["known"]) == (False, False)
    assert (answer["drained"], answer["missing"]) == (False, ["actor rank 0", "actor rank 2"])
    assert other["known"]  # a run that was named counts whatever its key


def test_ranks_that_ended_unheard_are_named_and_leave_with_their_driver(
    made: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def train() -> Drained:
        live(made)
        monkeypatch.setattr(draining, "_LEAVE_SECONDS", 0.05)
        await Trainer(made, 0).say("hello", world_size=1)
        return await made.coordinator.parts.draining.drain(None, 30.0, "a")

    said = made.run(train())
    assert (said["drained"], said["missing"]) == (False, ["actor rank 0"])
    [attempt] = rows_of(made.store, "attempts")
    assert attempt["end_reason"] == "finished"
    assert not rows_of(made.store, "findings")


@pytest.mark.parametrize(
    ("ended_by", "reason", "kind"),
    [
        ({"error_type": "KeyboardInterrupt"}, "it was interrupted", "process_interrupted"),
        ({"error_type": "SIGTERM", "interrupted": True}, "it was interrupted",
         "process_interrupted"),
        ({"error_type": "ValueError", "error_message": "no data"},
         "an exception ended one of its processes", "process_crashed"),
    ],
)  # fmt: skip
def test_what_ends_the_driver_ends_the_attempt_at_once(
    made: Clocked, ended_by: dict[str, Any], reason: str, kind: str
) -> None:
    """Ray ends the ranks with it: one has nothing more to send, one never answers."""

    async def train() -> Drained:
        live(made)
        ranks = [Trainer(made, rank) for rank in (0, 1)]
        for rank in ranks:
            await rank.say("hello", world_size=3)
            await rank.say("begin", step=1, stage="actor_update")
        await ranks[0].say("end", step=1, stage="actor_update", status="ok")
        drain = made.coordinator.parts.draining.drain
        answer, _ = await asyncio.gather(drain(None, 0.3, "a", ended_by), ranks[0].obey(1))
        [lost] = rows_of(made.store, "losses")
        assert lost["reason"] == "its process ended with the driver inside the stage"
        assert (lost["rank"], lost["stage"]) == (1, "actor_update")
        # What a rank sends before Ray ends it does not make the attempt silent.
        await ranks[1].say("begin", step=1, stage="save_checkpoint")
        expired = made.coordinator.parts.state.expire(time.monotonic() + 100.0, 5000.0)
        await made.coordinator.parts.runner.carry_out(expired)
        return answer

    answer = made.run(train())
    assert answer["missing"] == ["actor rank 2", "actor rank 1"]
    [attempt] = rows_of(made.store, "attempts")
    assert attempt["end_reason"] == reason
    findings = [row for row in rows_of(made.store, "findings") if row["kind"] == kind]
    assert [(row["step"], row["role"], row["rank"]) for row in findings] == [(1, None, None)]


def test_ranks_of_another_job_with_the_same_key_outlive_a_driver(made: Clocked) -> None:
    async def train() -> None:
        live(made)
        rank = Trainer(made, 0)
        await rank.say("hello", world_size=1)
        await rank.say("begin", step=1, stage="actor_update")
        interrupted = {"error_type": "KeyboardInterrupt"}
        await made.coordinator.parts.draining.drain(None, 0.0, "a", interrupted)
        [attempt] = made.coordinator.parts.state.registry.attempts.values()
        assert attempt.driver_ended is not None
        attempt.driver_ended -= 60.0  # it ended a minute ago
        await rank.say("begin", step=2, stage="actor_update")
        assert not rows_of(made.store, "attempts")[0]["ended_wall"]
        expired = made.coordinator.parts.state.expire(time.monotonic() + 100.0, time.time())
        await made.coordinator.parts.runner.carry_out(expired)

    made.run(train())
    [attempt] = rows_of(made.store, "attempts")
    assert attempt["end_reason"] == "its processes fell silent"


def test_a_driver_that_ends_waits_for_no_rank_that_never_came(made: Clocked) -> None:
    async def end() -> tuple[Drained, float]:
        live(made)
        began = time.monotonic()
        drain = made.coordinator.parts.draining.drain
        answer = await drain(None, 30.0, "a", {"error_type": "KeyboardInterrupt"})
        return answer, time.monotonic() - began

    answer, seconds = made.run(end())
    assert not answer["known"]
    assert seconds < 5.0


def test_a_rank_that_goes_on_after_the_drivers_finish_is_taken_back(made: Clocked) -> None:
    async def train() -> None:
        live(made)
        rank = Trainer(made, 0)
        await rank.say("hello", world_size=1)
        await asyncio.gather(made.coordinator.parts.draining.drain(None, 30.0, "a"), rank.obey(1))
        await rank.say("begin", step=2, stage="actor_update")
        await rank.say("end", step=2, stage="actor_update", status="ok")

    made.run(train())
    [attempt] = rows_of(made.store, "attempts")
    assert (attempt["end_reason"], attempt["ended_wall"]) == (None, None)
    assert {row["status"] for row in rows_of(made.store, "stages")} == {"ok"}
    [process] = rows_of(made.store, "processes")
    assert process["finished_wall"] is None
    assert not rows_of(made.store, "losses")


def test_a_rank_between_two_polls_is_asked_by_the_next_and_only_once(made: Clocked) -> None:
    async def train() -> tuple[float, float]:
        live(made)
        made.coordinator.parts.intake.poll_seconds = 20.0
        rank = Trainer(made, 0)
        await rank.say("hello", world_size=1)
        drain = asyncio.create_task(made.coordinator.parts.draining.drain(None, 30.0, "a"))
        await asyncio.sleep(0)  # it asks, and waits
        assert made.coordinator.parts.draining._requests
        began = time.monotonic()
        asked = await rank.poll()  # it was not there when it was asked
        first = time.monotonic() - began
        assert [request["what"] for request in asked] == ["finish"]
        again = asyncio.create_task(rank.poll())  # it has still something to send
        await asyncio.wait({again}, timeout=0.2)
        assert not again.done()  # no poll after the other
        await rank.say("finish")
        assert (await drain)["drained"]
        again.cancel()
        return first, time.monotonic() - began

    first, _ = made.run(train())
    assert first < 5.0


def test_a_rank_that_was_given_up_goes_on_as_if_nothing_was(
    made: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def train() -> None:
        live(made)
        monkeypatch.setattr(draining, "_LEAVE_SECONDS", 0.05)
        rank = Trainer(made, 0)
        await rank.say("hello", world_size=1)
        await rank.say("begin", step=1, stage="actor_update")
        assert not (await made.coordinator.parts.draining.drain(None, 30.0, "a"))["drained"]
        await rank.say("begin", step=2, stage="actor_update")
        await rank.say("end", step=2, stage="actor_update", status="ok")

    made.run(train())
    [process] = rows_of(made.store, "processes")
    assert process["finished_wall"] is None
    stages = {row["step"]: row["status"] for row in rows_of(made.store, "stages")}
    assert stages[2] == "ok"


def test_another_jobs_driver_asks_nobody_to_leave(made: Clocked) -> None:
    async def train() -> Drained:
        live(made)
        await Trainer(made, 0).say("hello", world_size=1)
        return await made.coordinator.parts.draining.drain("r", 30.0, "of another job")

    assert made.run(train())["drained"]
    assert not made.coordinator.parts.draining._requests
    [process] = rows_of(made.store, "processes")
    assert process["finished_wall"] is None


def test_a_payload_whose_reading_failed_pins_nothing_and_is_read_when_offered_again(
    made: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*arguments: object) -> None:
        raise ConnectionError("the cluster does not answer")

    coordinator, waiting = made.coordinator, made.coordinator.work
    payloads = coordinator.parts.payloads
    work = {"step": 1, "stage": "actor_update"}
    fields = {**work, "status": "ok", "payload": {"tensors": {}, "meta": {}}}
    event = (1, "end", 1, 1.0, 1.0, fields)

    async def offer() -> None:
        sender = Sender("i", "r", "a", "actor", 0).wire()
        await coordinator.parts.intake.record(sender, [event], {1: object()})

    async def offer_and_read() -> None:
        await offer()
        assert payloads._payloads
        (ingest,) = [each for each in waiting.queue if isinstance(each, Ingest)]
        waiting.queue.clear()
        with monkeypatch.context() as patch:
            patch.setattr(coordinator.parts.ingestors, "ingest", fail)
            waiting.start_now(ingest)
            with pytest.raises(ConnectionError):
                await coordinator.parts.runner.settled()
        assert not payloads._payloads
        await offer()
        assert [type(each) for each in waiting.queue if isinstance(each, Ingest)] == [Ingest]

    made.run(offer_and_read())
