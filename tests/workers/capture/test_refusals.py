"""What cannot be captured: said in the result, raised only when strict, and training goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.small_decoder import begin, forward_backward, small_decoder, token_ids
from tests.workers.capture.conftest import Captures

from stagescope_wire.errors import CaptureError, InvalidPlan
from stagescope_wire.plan import CaptureRequest
from stagescope_workers.capture import msprobe_capture, msprobe_patches


def test_a_nested_capture_is_skipped_and_the_outer_is_whole(captures: Captures) -> None:
    model = small_decoder()
    with captures.around(model, step=1):
        inner = captures.begin(model, step=2)
        assert not inner.collecting
        forward_backward(model, token_ids())
        result = inner.finish(None)
        assert result["state"] == "skipped"
        assert "another stage" in result["error"]
    assert captures.last["state"] == "complete"
    assert any(".backward" in name for name in captures.entries())


def test_a_trainers_own_debugger_is_not_disturbed(captures: Captures, tmp_path: Path) -> None:
    debugger_class = msprobe_patches.load_debugger_class()
    other = object()
    debugger_class._instance = other
    try:
        result = captures.begin(small_decoder()).finish(None)
        assert debugger_class._instance is other
    finally:
        debugger_class._instance = None
    assert result["state"] == "skipped"
    assert "another PrecisionDebugger" in result["error"]
    captures.run(small_decoder())


def test_a_constructor_that_fails_poisons_nothing(captures: Captures) -> None:
    model = small_decoder()
    # Known to msprobe only, so that its own check refuses it.
    section = {"scope": ["of", "three", "names"]}
    result = captures.begin(model, section=section).finish(None)
    assert result["state"] == "failed"
    assert "msprobe could not be started" in result["error"]
    captures.run(model, step=2)


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_start_that_fails_leaves_nothing_running(captures: Captures, level: str) -> None:
    from msprobe.core.common.runtime import Runtime

    result = captures.begin(object(), level=level).finish(None)
    assert result["state"] == "failed"
    assert not Runtime.is_running
    assert not any(
        msprobe_patches.is_dump_code(value)
        for owner in msprobe_patches.constructor_owners()
        for value in vars(owner).values()
    )
    captures.run(small_decoder(), level=level, step=2)


def test_a_level_that_needs_a_model_says_so(captures: Captures) -> None:
    result = captures.begin(None, level="L0").finish(None)
    assert result["state"] == "failed"
    assert "needs the model of stage 'actor_update'" in result["error"]
    with captures.around(None, level="L1"):
        forward_backward(small_decoder(), token_ids())
    assert captures.last["state"] == "complete"


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"config": {"task": "statistic"}}, InvalidPlan),
        ({"data_dir": "/proc/no such place"}, CaptureError),  # a path that msprobe refuses
        ({"data_dir": "/proc/nowhere"}, CaptureError),  # one that cannot be made
        ({"config_path": "/nowhere/config.json", "config": None}, InvalidPlan),
    ],
)
def test_strict_raises_and_lenient_does_not(
    captures: Captures, spec: CaptureRequest, error: type[Exception]
) -> None:
    def attempt(strict: bool) -> Any:
        data_dir, config = str(captures.data_dir), {"task": "statistics"}
        request = {"strict": strict, "data_dir": data_dir, "config": config, **spec}
        return begin(request, small_decoder())

    with pytest.raises(error):
        attempt(strict=True)
    assert attempt(strict=False).finish(None)["state"] == "failed"


def test_strict_raises_at_the_end_but_never_over_the_stages_own_error(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_decoder()

    def break_writing(armed: object) -> None:
        writer = msprobe_capture._session._debugger.service.data_collector.data_writer
        monkeypatch.setattr(writer, "dump_file_path", "/proc/nothing/dump.json")

    armed = captures.begin(model, strict=True)
    break_writing(armed)
    forward_backward(model, token_ids())
    with pytest.raises(CaptureError, match="failed"):
        armed.finish(None)
    assert armed.finish(None)["state"] == "failed"
    monkeypatch.undo()

    armed = captures.begin(model, strict=True, step=2)
    break_writing(armed)
    forward_backward(model, token_ids())
    assert armed.finish(ValueError("the stage's"))["state"] == "failed"
    monkeypatch.undo()
    captures.run(model, step=3)


def test_a_missing_msprobe(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "msprobe", None)
    monkeypatch.setitem(sys.modules, "msprobe.pytorch", None)
    result = captures.begin(small_decoder()).finish(None)
    assert result["state"] == "failed"
    assert "mindstudio-probe" in result["error"]
    with pytest.raises(CaptureError, match="mindstudio-probe"):
        captures.begin(small_decoder(), strict=True)
    monkeypatch.undo()
    captures.run(small_decoder())


def test_generation_is_never_captured_for_all_stages(captures: Captures) -> None:
    def attempt(**fields: object) -> Any:
        request = {"config": {"task": "statistics"}, "strict": True, **fields}
        work = {"stage": "rollout_generate", "role": "rollout"}
        return begin(request, data_root=str(captures.data_dir), **work)

    assert attempt(stages="all") is None
    assert attempt(stages=["rollout_generate"], source="verl") is None
    named = attempt(stages=["rollout_generate"])
    assert named.finish(None)["state"] == "complete"


def test_a_capture_that_only_keeps_tensors_is_not_msprobes(captures: Captures) -> None:
    request = {"config": None, "config_path": None, "keep": ["old_log_probs"]}
    assert begin(request, data_root=str(captures.data_dir)) is None


def test_the_same_failure_is_logged_once(
    captures: Captures, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "stagescope_workers"):
        for step in range(3):
            captures.begin(None, level="L0", step=step, capture_id="only-once").finish(None)
    reported = [record for record in caplog.records if "only-once" in record.getMessage()]
    assert len(reported) == 1


def test_what_breaks_inside_a_hook_stays_there(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_decoder()
    forward_backward(model, token_ids())
    expected = {name: p.grad for name, p in model.named_parameters()}
    with captures.around(model, task="tensor", level="L1"):
        processor = msprobe_capture._session._debugger.service.data_collector.data_processor
        calls = []

        def failing(*_: object, **__: object) -> None:
            calls.append(1)
            raise RuntimeError("no space left in this test")

        monkeypatch.setattr(processor, "analyze_forward_output", failing)
        forward_backward(model, token_ids())
        monkeypatch.undo()
    assert len(calls) == 1, "collection ends at the first failure"
    assert captures.last["state"] == "truncated"
    assert "no space left in this test" in captures.last["error"]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name])  # type: ignore[arg-type]
    captures.run(model, task="tensor", step=2)
