"""A probe tells what happened, owns what it was handed, and never hurts the training around it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.coordinators import FakeCoordinator, FakeService, wait_for

from stagescope_wire import names
from stagescope_wire.errors import InvalidInput, InvalidTensor
from stagescope_workers.integrations import configuration
from stagescope_workers.probe import handshake, identity, lifecycle
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import error_fields
from stagescope_workers.transport.calls import ServiceLink

MakeProbe = Callable[..., Probe]


def payload_of(coordinator: FakeCoordinator, seq: int) -> dict[str, Any]:
    found = [value for (_, at), value in coordinator.payloads.items() if at == seq]
    payload: dict[str, object] = found[0]
    return payload


def test_stage_is_reported_completely(make_probe: MakeProbe, coordinator: FakeCoordinator) -> None:
    probe = make_probe(rank=3, role="critic")
    with probe.stage("critic_update", step=5, policy_version=4, epoch=1) as stage:
        stage.record(
            old_log_probs=torch.zeros(2, 3),
            rollout_log_probs=torch.ones(2, 3),
            response_mask=torch.ones(2, 3, dtype=torch.bool),
            temperature=0.7,
        )
        stage.record(sample_ids=["a", "b"], streams={"rollout": {"engine": "vllm"}})
        stage.log(loss=1.5, bad=float("nan"))
        stage.log(grad_norm=np.float32(2.0), entropy=torch.tensor(3.0, requires_grad=True))
    [end] = coordinator.fields("end")
    [begin] = coordinator.of_kind("begin")
    assert begin.fields["stage"] == "critic_update"
    assert {name: end[name] for name in ("step", "policy_version", "occurrence", "epoch")} == {
        "step": 5, "policy_version": 4, "occurrence": 0, "epoch": 1,
    }  # fmt: skip
    assert end["status"] == "ok"
    assert end["begin_mono"] == begin.mono
    assert math.isnan(end["scalars"].pop("bad"))
    assert end["scalars"] == {"loss": 1.5, "grad_norm": 2.0, "entropy": 3.0}
    assert end["payload"]["tensors"]["response_mask"] == ["bool", [2, 3], None]
    assert end["payload"]["bytes"] == 24 + 24 + 6
    assert end["payload"]["meta"]["streams"] == {"rollout": {"engine": "vllm"}}
    payload = payload_of(coordinator, coordinator.of_kind("end")[0].seq)
    assert payload["strings"] == {"sample_ids": ["a", "b"]}
    np.testing.assert_array_equal(payload["tensors"]["rollout_log_probs"][2], np.ones((2, 3)))
    [sender] = {(s.run, s.attempt_key, s.role, s.rank) for s in coordinator.senders}
    assert sender == ("test-run", "attempt-a", "critic", 3)


class Stopped(KeyboardInterrupt):
    """A trainer's own."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), True),
        (Stopped(), True),
        (asyncio.CancelledError(), True),
        (SystemExit(), True),
        (SystemExit(0), True),
        (SystemExit(1), None),
        (SystemExit("no data"), None),
        (ValueError("no"), None),
    ],
)
def test_an_exception_that_stops_the_training_is_told_from_one_that_fails(
    error: BaseException, expected: bool | None
) -> None:
    assert error_fields(error).get("interrupted") is expected


@pytest.mark.parametrize("rank", [None, 0])
def test_a_process_that_knows_of_no_other_rank_says_so(
    make_probe: MakeProbe,
    coordinator: FakeCoordinator,
    rank: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    make_probe(rank=rank)
    [hello] = coordinator.fields("hello")
    assert hello.get("single") == (True if rank is None else None)
    assert hello["launch"] == "Slurm job 7, restart 0"


def test_hello_comes_first_and_says_who(
    make_probe: MakeProbe, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "tr0ub4dor")
    monkeypatch.setenv("SOME_URL", "https://me:tr0ub4dor@host/")
    monkeypatch.setenv("NCCL_DEBUG", "shown")
    make_probe(world_size=2, layout={"tp_rank": 1}, settings={"rollout_is": "token"})
    wait_for(lambda: coordinator.batches)
    hello = coordinator.batches[0][0]
    assert (hello.kind, hello.seq) == ("hello", 1)
    assert hello.fields["world_size"] == 2
    assert hello.fields["pid"] == os.getpid()
    assert hello.fields["layout"]["tp_rank"] == 1
    assert hello.fields["layout"]["host"]
    fingerprint = hello.fields["fingerprint"]
    assert fingerprint["environment"]["NCCL_DEBUG"] == "shown"
    assert "tr0ub4dor" not in repr(fingerprint)
    assert fingerprint["packages"]["numpy"] == np.__version__
    assert fingerprint["config"] == {"rollout_is": "token"}


def test_record_owns_a_copy(make_probe: MakeProbe, service: FakeService) -> None:
    coordinator, service.coordinator = service.coordinator, None
    probe = make_probe()
    array, tensor = np.ones(4), torch.ones(4, dtype=torch.bfloat16)
    ids, meta = ["a"], {"engine": ["x"]}
    with probe.stage("s", step=1) as stage:
        stage.record(rewards=array, advantages=tensor, sample_ids=ids, streams=meta)
        array.fill(9)
        tensor.fill_(9)
        ids[0] = meta["engine"][0] = "changed"
    assert coordinator is not None
    service.coordinator = coordinator
    [end] = coordinator.fields("end")
    payload = payload_of(coordinator, 3)
    assert payload["tensors"]["rewards"][2].tolist() == [1.0] * 4
    assert payload["tensors"]["advantages"][2].tolist() == [0x3F80] * 4
    assert payload["strings"]["sample_ids"] == ["a"]
    assert end["payload"]["meta"]["streams"] == {"engine": ["x"]}


def test_parts_are_numbered_in_order_of_entry(make_probe: MakeProbe) -> None:
    probe = make_probe()
    occurrences = [
        probe.stage("s", step=step, epoch=epoch).work
        for step, epoch in [(1, None), (1, None), (2, None), (1, 0), (1, 1), (1, 1), (1, None)]
    ]
    assert [work.part.occurrence for work in occurrences if work] == [0, 1, 0, 0, 0, 1, 2]
    given = probe.stage("s", step=1, occurrence=7).work
    assert given is not None
    assert given.part.occurrence == 7


def test_stages_of_one_name_may_overlap(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    first = probe.begin("rollout_generate", policy_version=2)
    second = probe.begin("rollout_generate", policy_version=2)
    first.log(x=1)
    second.log(x=2)
    probe.end(second)
    probe.end(first)
    found = {end["occurrence"]: end["scalars"]["x"] for end in coordinator.fields("end", 2)}
    assert found == {0: 1.0, 1: 2.0}


def test_exception_continues_unchanged_and_is_reported(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    error = RuntimeError("out of memory")

    def update() -> None:
        with probe.stage("actor_update", step=1) as stage:
            stage.record(rewards=[1.0])
            raise error

    with pytest.raises(RuntimeError) as caught:
        update()
    assert caught.value is error
    [end] = coordinator.fields("end")
    assert (end["status"], end["error_type"], end["error_message"]) == (
        "failed", "RuntimeError", "out of memory",
    )  # fmt: skip
    assert end["payload"]["tensors"]["rewards"] == ["float64", [1], None]


BAD_CALLS: dict[str, Callable[[Probe], object]] = {
    "step": lambda probe: probe.begin("s", step="five"),  # type: ignore[arg-type]
    "name": lambda probe: probe.begin("", step=1),
    "part": lambda probe: probe.begin("s", step=1, minbatch=2),
    "scalar": lambda probe: probe.begin("s", step=1).log(loss=[1, 2]),
    "scalar that is None": lambda probe: probe.begin("s", step=1).log(loss=None, reward=1.0),
    "scalar beyond float64": lambda probe: probe.log(step=1, loss=10**400),
    "scalar with a long name": lambda probe: probe.begin("s", step=1).log(**{"n" * 201: 1.0}),
    "log of None": lambda probe: probe.log(step=1, loss=None),
    "tensor": lambda probe: probe.begin("s", step=1).record(
        old_log_probs=torch.zeros(2).to_sparse()
    ),
    "twice": lambda probe: _record_twice(probe),
    "mask": lambda probe: _end_without_mask(probe),
    "misspelt": lambda probe: _record_misspelt(probe),
    "misspelt stream": lambda probe: _record_misspelt_stream(probe),
    "beside the known": lambda probe: _record_beside_the_known(probe),
    "negative step": lambda probe: probe.begin("s", step=-1),
    "negative step of a log": lambda probe: probe.log(step=-1, loss=1.0),
    "negative end": lambda probe: probe.end_step(-1),
    "end_step": lambda probe: probe.end_step(1.5),  # type: ignore[arg-type]
    "log": lambda probe: probe.log(step=1, loss="high"),
}


def _record_twice(probe: Probe) -> None:
    stage = probe.begin("s", step=1)
    stage.record(rewards=[1])
    stage.record(rewards=[2])


def _end_without_mask(probe: Probe) -> None:
    with probe.stage("s", step=1) as stage:
        stage.record(old_log_probs=torch.zeros(2, 3), rollout_log_probs=torch.zeros(2, 3))


def _record_misspelt(probe: Probe) -> None:
    with probe.stage("s", step=1) as stage:
        stage.record(rollout_logprobs=torch.zeros(2, 3), my_own_name=torch.zeros(2, 3))


def _record_beside_the_known(probe: Probe) -> None:
    with probe.stage("s", step=1) as stage:
        stage.record(sample_ids=["a"], sample_id=["b"], responses=[[1]], response=["text"])


def _record_misspelt_stream(probe: Probe) -> None:
    with probe.stage("s", step=1) as stage:
        stage.record(producers={"rollout_logprobs": "engine", "old": "fsdp", "judge": "api"})


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_input_is_reported_and_raised_only_when_strict(
    call: Callable[[Probe], object], make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    call(probe)
    assert "expected" in coordinator.fields("refused")[0]["message"]
    assert sum(probe.refused.values()) == 1
    strict = make_probe(strict=True, attempt_key="b")
    with pytest.raises(InvalidInput):
        call(strict)
    assert sum(strict.refused.values()) == 1


def test_each_kind_of_message_is_logged_once_with_its_place(
    make_probe: MakeProbe, caplog: pytest.LogCaptureFixture
) -> None:
    probe = make_probe(rank=3)
    for step in (1, 2, 3):
        with probe.stage("s", step=step) as stage:
            stage.record(rollout_logprobs=[-1.0])
        with probe.stage("t", step=step) as stage:
            stage.record(rollout_log_probs=[-1.0], old_log_probs=[-1.0])
    for step in (-1, -2, 2**63, 10**400):
        probe.stage("s", step=step)
    probe.stage("s", step="9")  # type: ignore[arg-type]
    lines = [record.getMessage() for record in caplog.records]
    for word in ("rollout_logprobs", "response_mask", "step is -1", "64 bits", "step is '9'"):
        assert len([line for line in lines if word in line]) == 1, (word, lines)
    assert not [line for line in lines if "step is -2" in line]
    where = "run test-run, actor 3, stage t, step 1: record: "
    assert any(line.startswith(f"{where}response_mask is missing") for line in lines)
    assert probe.refused["stage"] == 5


def test_one_bad_value_does_not_cost_the_others(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    with probe.stage("s", step=1) as stage:
        stage.record(old_log_probs=np.zeros(2, complex), response_mask=[1, 1], rewards=[1.0])
        stage.log(loss=None, reward=1.0)
    [end] = coordinator.fields("end")
    assert set(end["payload"]["tensors"]) == {"response_mask", "rewards"}
    assert end["scalars"] == {"reward": 1.0}
    assert probe.refused == {"record": 1, "log": 1}


@pytest.mark.parametrize(
    ("options", "told", "used"),
    [
        ({"role": "actr"}, ("role 'actr' counts as one of your own", "actor, the closest"), {}),
        (
            {"rank": 8, "world_size": 8},
            ("rank 8 is not one of the 8 ranks", "a rank from 0 to 7"),
            {"world_size": None},
        ),
        (
            {"resumed_from_step": -1},
            ("resumed_from_step is -1", "None where the training starts over"),
            {"resumed_from_step": None},
        ),
    ],
)
def test_an_argument_of_init_that_cannot_be_right_is_reported(
    make_probe: MakeProbe,
    coordinator: FakeCoordinator,
    options: dict[str, Any],
    told: tuple[str, str],
    used: dict[str, object],
) -> None:
    make_probe(role="judge", attempt_key="b")  # a role of one's own that resembles none
    with pytest.raises(InvalidInput, match=told[0]):
        make_probe(strict=True, **options)
    make_probe(**options).stage("s", step=1).begin()
    coordinator.fields("begin")
    [refused] = coordinator.fields("refused")
    assert all(text in refused["message"] for text in told)
    for hello in coordinator.fields("hello", 2):
        assert {name: hello.get(name) for name in used} == used


def test_finish_is_false_where_init_was_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The driver's ranks may have reported: they are asked to send what they have all the same.
    drained: list[object] = []

    def drain(*arguments: object) -> bool:
        drained.append(arguments)
        return True

    monkeypatch.setattr(lifecycle, "_drain_all", drain)
    monkeypatch.setattr(lifecycle, "_refused", {})
    refused = lifecycle.init("mine", watchdog=-1)
    assert "inert" in repr(refused)
    assert lifecycle.finish(0.1) is False
    assert len(drained) == 1
    assert "init was refused here" in caplog.text
    assert "watchdog is -1" in caplog.text
    lifecycle.init("mine", role="critic").close(timeout=0)
    assert lifecycle.finish(0.1) is False  # the actor is refused still
    lifecycle.init("mine").close(timeout=0)
    lifecycle.finish(0.1)
    assert lifecycle._refused == {}


def test_a_misspelt_name_is_reported_once_with_the_closest_and_kept(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    for step in (1, 2):
        with probe.stage("s", step=step) as stage:
            stage.record(sample_ids=["a"], sample_id=["b"], rewards=[1.0], reward=[2.0])
            stage.record(producers={"rollout": "engine", "rolout": "vllm"}, rollout_logprobs=[0.5])
    coordinator.fields("end", 2)
    messages = [fields["message"] for fields in coordinator.fields("refused", 4)]
    for message, words in zip(
        messages,
        (
            ("rollout_logprobs is kept", "expected rollout_log_probs"),
            ("reward is kept beside rewards",),
            ("sample_id is kept beside sample_ids", "expected sample_ids alone"),
            ("producers has rollout too, which counts",),
        ),
        strict=True,
    ):
        assert all(word in message for word in words), message
    assert payload_of(coordinator, 3)["strings"] == {"sample_ids": ["a"], "sample_id": ["b"]}


def test_shapes_that_disagree_are_named_and_everything_is_kept(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    with probe.stage("s", step=1) as stage:
        stage.record(
            old_log_probs=torch.zeros(2, 3),
            rollout_log_probs=torch.zeros(2, 4),
            response_mask=torch.ones(2, 3),
        )
    message = coordinator.fields("refused")[0]["message"]
    assert "rollout_log_probs is float32[2, 4] and response_mask is float32[2, 3]" in message
    payload = coordinator.fields("end")[0]["payload"]
    assert (len(payload["tensors"]), payload["reported"]) == (3, True)
    with probe.stage("s", step=2) as stage:
        stage.record(old_log_probs=torch.zeros(2, 3), response_mask=torch.ones(2, 3))
    assert "reported" not in coordinator.fields("end", 2)[1]["payload"]


def test_lists_of_responses_are_no_problem_beside_padded_tensors(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    padded = {"old_log_probs": torch.zeros(2, 3), "response_mask": torch.ones(2, 3)}
    probe = make_probe()
    for step, responses in ((1, [[5, 6], [7]]), (2, [[5, 6], [7], [8]])):
        with probe.stage("s", step=step) as stage:
            stage.record(responses=responses, **padded)
    (refused,) = coordinator.fields("refused")
    assert "responses is int64[4] in 3 rows" in refused["message"]


def test_a_misspelt_mask_is_one_problem(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    streams = {"old_log_probs": torch.zeros(2, 3), "rollout_log_probs": torch.zeros(2, 3)}
    with make_probe().stage("s", step=1) as stage:
        stage.record(streams, respones_mask=torch.ones(2, 3))
    coordinator.fields("end")
    [refused] = coordinator.fields("refused")
    assert "response_mask is missing" in refused["message"]
    assert "rename respones_mask" in refused["message"]
    assert refused["severity"] == "error"


def test_strict_never_replaces_the_stages_own_exception(make_probe: MakeProbe) -> None:
    probe = make_probe(strict=True)

    def divide() -> None:
        with probe.stage("s", step=1) as stage:
            stage.record(old_log_probs=torch.zeros(2, 3), rollout_log_probs=torch.zeros(2, 3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        divide()


def test_refused_init_gives_a_probe_that_does_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_refused", {})  # else `finish` of later tests is False
    probe = lifecycle.init("name", rank=-1)
    with probe.stage("s", step=1) as stage:
        stage.record(rewards=[1.0])
        stage.log(loss=1)
    probe.log(step=1, loss=1.0)
    probe.end_step(1)
    assert not probe.close(5.0)
    assert "rank is -1" in caplog.text
    with pytest.raises(InvalidInput, match="run name"):
        lifecycle.init(7, strict=True)  # type: ignore[arg-type]


def test_a_run_that_is_not_named_is_the_one_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "_refused", {})
    with pytest.raises(InvalidInput, match="STAGESCOPE_RUN"):
        lifecycle.init(strict=True)
    monkeypatch.setenv("STAGESCOPE_RUN", "qwen3/grpo")
    named, given = lifecycle.init(), lifecycle.init("mine")
    assert (named.run, given.run) == ("qwen3-grpo-9bf7109e", "mine")
    assert not named.close(0.0)
    assert not given.close(0.0)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("qwen3/grpo", "qwen3-grpo-9bf7109e"),
        ("  my run 1 ", None),
        ("qwen3-测试", "qwen3-214316dd"),
        ("..", None),
        ("", None),
        ("-valid.", "-valid."),
        ("x" * 101, None),
    ],
)
def test_a_name_of_a_run_is_normalised_with_one_warning(
    given: str,
    name: str | None,
    make_probe: MakeProbe,
    coordinator: FakeCoordinator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "_warned_runs", set())
    probes = [make_probe(run=given, rank=rank) for rank in (0, 1)]
    wait_for(lambda: len(coordinator.of_kind("hello")) == 2)
    expected = names.normal_run_name(given) if name is None else name
    assert {probe.run for probe in probes} == {sender.run for sender in coordinator.senders}
    assert probes[0].run == expected
    shown = None if given == expected else names.display_name(given)
    assert {sender.display_name for sender in coordinator.senders} == {shown}
    warned = [each for each in caplog.records if each.name == "stagescope.names"]
    assert len(warned) == (0 if given == expected else 1)
    monkeypatch.setenv("STAGESCOPE_RUN", given)
    assert configuration.named_run("another", fallback="run") == (given or "another")


def test_a_connected_run_says_so_once_with_the_address_of_its_page(
    make_probe: MakeProbe, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.page = "https://head/scope/"
    for rank in (0, 1, 0):
        make_probe(run="qwen3/grpo", role="connects", rank=rank)
    wait_for(lambda: len(coordinator.of_kind("hello")) == 3)
    wait_for(lambda: len(coordinator.revisions) >= 6)  # the first polls were answered
    said = [each for each in caplog.records if "connected to" in each.getMessage()]
    assert [(each.levelname, each.getMessage()) for each in said] == [
        (
            "INFO",
            "run qwen3-grpo-9bf7109e, connects 0: connected to the test; its page: "
            "https://head/scope/#/runs/qwen3-grpo-9bf7109e",
        )
    ]


@pytest.mark.parametrize("name", ["stagescope", "stagescope.workers"])
def test_the_line_is_seen_without_logging_unless_it_is_set_to_warnings(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("stagescope.workers")
    monkeypatch.setattr(log, "propagate", False)  # to the handlers of this test
    handshake.log_visibly(log, "connected")
    assert capsys.readouterr().err == "stagescope: connected\n"
    monkeypatch.setattr(logging.getLogger(name), "level", logging.WARNING)
    handshake.log_visibly(log, "connected")
    assert capsys.readouterr().err == ""


def test_stage_without_a_service_costs_next_to_nothing(
    make_probe: MakeProbe, service: FakeService
) -> None:
    service.coordinator = None
    began = time.perf_counter()
    probe = make_probe()
    made = time.perf_counter() - began
    began = time.perf_counter()
    for step in range(200):
        with probe.stage("s", step=step) as stage:
            stage.log(loss=1.0)
    # Far above what was seen (0.1 ms a stage), far below any network's timeout.
    assert time.perf_counter() - began < 5.0
    assert made < 5.0
    assert probe.outbox.waiting == 401


def test_close_does_not_wait_for_a_service_that_never_was(
    make_probe: MakeProbe, service: FakeService
) -> None:
    service.coordinator = None
    probe = make_probe()
    probe._handshake.created -= 10.0
    began = time.monotonic()
    assert not probe.close(60.0)
    assert time.monotonic() - began < 10.0


def test_close_gives_up_only_after_a_search_for_the_service(
    make_probe: MakeProbe, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> dict[str, object]:
        begun.set()
        assert go_on.wait(30)
        return {}

    monkeypatch.setattr(identity, "fingerprint", slow)
    probe = make_probe()
    assert begun.wait(30)
    probe._handshake.created -= 10.0  # so long did the fingerprint take
    with probe.stage("s", step=1):
        pass
    arrived: list[bool] = []
    closing = threading.Thread(target=lambda: arrived.append(probe.close(30.0)))
    closing.start()
    closing.join(0.3)
    assert closing.is_alive()
    go_on.set()
    closing.join(30)
    assert arrived == [True]


def test_close_joins_no_cluster_any_more_and_takes_the_address(
    make_probe: MakeProbe, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def find(*_: object, **reported: Any) -> ServiceLink | None:
        waited.append(reported["waited"])
        return service.find() if math.isinf(reported["waited"]) else None  # as `find_link` does it

    monkeypatch.setattr(handshake, "find_link", find)
    probe = make_probe()
    with probe.stage("s", step=1):
        pass
    wait_for(lambda: waited)
    probe._handshake.created -= 3.0
    assert probe.close(30.0)
    assert waited[0] < 60.0


def test_close_waits_for_payload_receipts(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    with probe.stage("s", step=1) as stage:
        stage.record(rewards=[1.0])
    coordinator.fields("end")
    settle = threading.Timer(0.1, coordinator.settle, [{3: "ingested"}])
    settle.start()
    assert probe.close(10.0)
    assert coordinator.receipts
    assert coordinator.of_kind("finish")
    settle.join()


@pytest.mark.parametrize("state", ["lost", "refused"])
def test_close_says_which_payloads_the_service_will_never_have(
    make_probe: MakeProbe,
    coordinator: FakeCoordinator,
    caplog: pytest.LogCaptureFixture,
    state: str,
) -> None:
    probe = make_probe()
    with probe.stage("s", step=1) as stage:
        stage.record(rewards=[1.0])
    coordinator.fields("end")
    coordinator.settle({3: state})
    assert not probe.close(10.0)
    assert any(
        f"not everything of run test-run arrived (payloads {state}: 1): `stagescope lost --run"
        in text
        for text in caplog.messages
    ), caplog.messages


def test_context_manager_closes(make_probe: MakeProbe, coordinator: FakeCoordinator) -> None:
    with make_probe() as probe:
        probe.log(step=3, reward=0.5)
        probe.end_step(3)
    assert coordinator.of_kind("log")[0].fields["scalars"] == {"reward": 0.5}
    assert coordinator.of_kind("end_step")[0].fields == {"step": 3}
    assert coordinator.of_kind("finish")


def test_copy_of_a_probe_does_not_report_as_it(make_probe: MakeProbe) -> None:
    assert pickle.loads(pickle.dumps(make_probe())).is_inert


def test_forked_child_is_silent() -> None:
    program = """
import os, sys
from stagescope_workers import init
probe = init("fork", attempt_key="a")
child = os.fork()
if child == 0:
    with probe.stage("s", step=1) as stage:
        stage.record(rewards=[1.0])
    probe.close(5.0)
    os._exit(0 if probe.is_inert else 1)
_, status = os.waitpid(child, 0)
assert not probe.is_inert
with probe.stage("s", step=1):
    pass
assert probe.outbox.waiting == 3, probe.status()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_repr_says_no_service_only_after_a_search(
    make_probe: MakeProbe, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = threading.Event()

    def search(*args: object, **named: object) -> ServiceLink | None:
        searched.wait(30.0)
        return service.find(*args, **named)

    monkeypatch.setattr(handshake, "find_link", search)
    probe = make_probe()
    assert repr(probe).endswith("not connected yet, looking for a service>")
    searched.set()
    wait_for(lambda: ": connected to " in repr(probe))
    service.coordinator = None
    alone = make_probe(rank=1)
    thread = alone._sender
    assert thread is not None
    wait_for(lambda: thread.has_searched)
    assert "looking for a service" in repr(alone)  # this process may be about to join its cluster


def test_import_needs_numpy_only() -> None:
    program = """
import sys
for name in ("torch", "ray", "numba", "httpx", "yaml", "pandas"):
    sys.modules[name] = None
from stagescope_workers import init
probe = init("plain", attempt_key="a")
with probe.stage("s", step=1) as stage:
    stage.record(old_log_probs=[[1.0], [2.0]])
assert not probe.refused, probe.refused
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_problem_between_streams_is_found_without_reading_data(make_probe: MakeProbe) -> None:
    probe = make_probe(strict=True)
    rows = [torch.zeros(2), torch.zeros(3)]
    with probe.stage("s", step=1) as stage:  # lists, jagged and packed agree with their like
        stage.record(old_log_probs=rows, rollout_log_probs=rows, response_mask=rows)
    with pytest.raises(InvalidTensor, match="2 rows"), probe.stage("s", step=2) as stage:
        stage.record(old_log_probs=rows, response_mask=torch.zeros(5))
    with probe.stage("s", step=3) as stage:
        flat = torch.zeros(5)
        stage.record(
            old_log_probs=flat, ref_log_prob=flat, response_mask=flat,
            cu_seqlens=torch.tensor([0, 2, 5]), sample_ids=["a", "b"],
        )  # fmt: skip
    with pytest.raises(InvalidTensor, match="sample_ids has 1"), probe.stage("s", step=4) as stage:
        stage.record(response_mask=torch.zeros(2, 3), sample_ids=["a"])
