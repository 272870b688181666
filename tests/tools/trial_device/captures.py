"""A capture with msprobe of a small model on the device: its content, and what it costs."""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import torch
from tests.support.small_decoder import forward_backward, small_decoder, token_ids
from tests.tools.trial_device.results import (
    Check,
    Effort,
    Figure,
    Result,
    as_fast,
    check,
    not_possible,
    spread,
)
from tests.tools.trial_device.spooled import spooled_probe
from tests.tools.trial_device.target import Target

from stagescope_wire.errors import CaptureError
from stagescope_workers.capture.msprobe_patches import load_debugger_class

_COMPLETE: Final = "captures of a running model are complete"
_SAME: Final = "the extremes in a capture are those that torch computes"
_AFTER: Final = "the steps after a capture take as long as before"
_STATEMENTS: Final = (_COMPLETE, _SAME, _AFTER)
_ROUNDS: Final = 3
_MOST_WIDTH: Final = 256
_VOCABULARY: Final = 1000
_ROWS: Final = 2
_LIMIT: Final = 0.25
"""Msprobe leaves pure Python behind, if anything: microseconds a module, in a step of milliseconds.
`tests/benchmarks/bench_capture.py` measures this more closely, in minutes."""
_LOGITS: Final = "Module.lm_head.Linear.forward.0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Captures(Result):
    title: ClassVar[str] = "A capture with msprobe"
    load: Annotated[float | None, Figure("import of msprobe, once", "s")]
    plain: Annotated[float | None, Figure("step of the small model", "ms")]
    captured: Annotated[float | None, Figure("captured step (statistics, mix)", "ms")]
    ratio: Annotated[float | None, Figure("the second over the first", "x")]
    after: Annotated[float | None, Figure("steps after the captures over those before", "x")]
    operators: Annotated[int | None, Figure("operators and modules in a dump", "")]
    dump: Annotated[float | None, Figure("size of a dump", "MB")]


def measure(target: Target, effort: Effort) -> Captures:
    """Capture a few steps of a training that goes on before and after."""
    began = time.perf_counter()
    try:
        load_debugger_class()
    except CaptureError as error:
        none = tuple(not_possible(each, str(error)) for each in _STATEMENTS)
        return Captures(load=None, plain=None, captured=None, ratio=None, after=None,
                        operators=None, dump=None, checks=none)  # fmt: skip
    load = time.perf_counter() - began
    model = small_decoder(width=min(_MOST_WIDTH, effort.width), vocabulary=_VOCABULARY)
    model.to(target.device)
    tokens = target.place(token_ids(_ROWS, effort.tokens // 8, _VOCABULARY))
    with tempfile.TemporaryDirectory(prefix="trial-capture-") as root:
        plan = _plan(root, steps=range(1, _ROUNDS + 1))
        with spooled_probe(run="trial-captures", plan=plan) as spooled:

            def step(number: int) -> float:
                target.synchronize()
                began = time.perf_counter()
                with spooled.probe.stage("actor_update", step=number, model=model):
                    forward_backward(model, tokens)
                    target.synchronize()
                return time.perf_counter() - began

            count = 5 * effort.repeats
            # Steps 101 to 103 warm up.
            before = [step(100 + number) for number in range(1, count + 4)][3:]
            captured = [step(number) for number in range(1, _ROUNDS + 1)]
            after = [step(1000 + number) for number in range(1, count + 4)][3:]
            dumps = [dict(each.fields) for each in spooled.close() if each.kind == "dump"]
        done = [each for each in dumps if each["state"] != "armed"]
        with torch.no_grad():
            logits = model(tokens)
        return _result(target, done, before, captured, after, load, logits)


def _plan(root: str, steps: range) -> Mapping[str, object]:
    config = {"task": "statistics", "level": "mix", "statistics": {}}
    capture = {"stages": ["actor_update"], "steps": [*steps], "data_dir": root, "config": config}
    return {"captures": [capture]}


def _result(
    target: Target, done: list[dict[str, Any]], before: list[float], captured: list[float],
    after: list[float], load: float, logits: torch.Tensor,
) -> Captures:  # fmt: skip
    plain, dumped = statistics.median(before), statistics.median(captured)
    changed = statistics.median(after) / plain
    limit = 1.0 + max(_LIMIT, spread(before))
    errors = [f"{each['state']}: {each['error']}" for each in done if each["state"] != "complete"]
    text = "; ".join(errors)[:300] or f"{len(done)} of {_ROUNDS}"
    complete = check(_COMPLETE, len(done) == _ROUNDS and not errors, text)
    calls = _calls(done)
    return Captures(
        load=load, plain=plain * 1e3, captured=dumped * 1e3, ratio=dumped / plain, after=changed,
        operators=len(calls), dump=max((each["bytes"] for each in done), default=0) / 1e6,
        checks=(
            complete,
            _extremes(calls, logits),
            as_fast(_AFTER, changed, limit, is_accelerator=target.is_accelerator),
        ),
    )  # fmt: skip


def _calls(done: list[dict[str, Any]]) -> Mapping[str, Any]:
    for each in done:
        for path in Path(each["path"] or "").rglob("dump.json") if each["path"] else ():
            calls: Mapping[str, Any] = json.loads(path.read_text())["data"]
            return calls
    return {}


def _extremes(calls: Mapping[str, Any], logits: torch.Tensor) -> Check:
    """Compare the logits' extremes: the model was not changed since the captured steps."""
    call = calls.get(_LOGITS)
    if call is None:
        return check(_SAME, False, f"{_LOGITS} is not among {len(calls)} calls")
    [output] = call["output"]
    found = (float(output["Max"]), float(output["Min"]))
    expected = (float(logits.max()), float(logits.min()))
    close = all(abs(a - b) <= 1e-4 * max(1.0, abs(b)) for a, b in zip(found, expected, strict=True))
    return check(_SAME, close, f"logits {found[0]:.5f} and {found[1]:.5f}")
