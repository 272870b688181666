from __future__ import annotations

import collections
import gc
import sys
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest
import torch
from tests.support.small_decoder import forward_backward, small_decoder, token_ids
from tests.workers.capture.conftest import Captures
from torch import nn
from torch.nn import functional

from stagescope_workers.capture import msprobe_patches

LEVELS = ("L0", "L1", "mix")


def process_state() -> dict[str, object]:
    """Every attribute that msprobe may replace, by identity, and the optimizers' global hooks."""
    import torch.optim.optimizer as optimizer

    msprobe_patches.load_debugger_class()
    state: dict[str, object] = {}
    for owner in msprobe_patches.constructor_owners():
        for name, value in list(vars(owner).items()):
            # Modules are imported on demand, dynamo counts on, and a first copy of a tensor makes
            # `__slotnames__`. By type: some attributes warn when they are read.
            changing = name in ("initial_global_state", "__slotnames__")
            if type(value) not in (type(torch), int) and not changing:
                state[f"{owner!r:.80}.{name}"] = id(value)
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        state[name] = tuple(getattr(optimizer, name))
    state["gc"] = gc.isenabled()
    return state


def differences(before: Mapping[str, object]) -> list[str]:
    after = process_state()
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def module_state(model: nn.Module) -> dict[str, object]:
    return {
        name: {
            key: tuple(value) if isinstance(value, dict) else id(value)
            for key, value in vars(module).items()
        }
        for name, module in model.named_modules()
    }


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


MIX: Final = "mix"
"""The level with the hooks of both others."""


def step_with_optimizer(model: nn.Module) -> None:
    forward_backward(model, token_ids())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=0.0).step()


def test_process_and_model_are_as_before(captures: Captures, level: str) -> None:
    model = small_decoder()
    forward_backward(model, token_ids())
    expected = gradients(model)
    modules, process = module_state(model), process_state()
    for _ in range(2):
        with captures.around(model, level=level):
            step_with_optimizer(model)
        assert captures.last["state"] == "complete", captures.last
        assert captures.entries()
    model.zero_grad(set_to_none=True)
    assert differences(process) == []
    assert module_state(model) == modules
    forward_backward(model, token_ids())
    after = gradients(model)
    assert expected.keys() == after.keys()
    assert all(torch.equal(expected[name], after[name]) for name in expected)


def calls_of_a_step(model: nn.Module) -> collections.Counter[str]:
    """Every Python and C function that forward and backward enter: exact, where time is noisy."""
    calls: collections.Counter[str] = collections.Counter()

    def note(frame: types.FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno}"] += 1
        elif event == "c_call":
            calls[repr(argument).partition(" at 0x")[0]] += 1

    gc.disable()
    sys.setprofile(note)
    try:
        forward_backward(model, token_ids())
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_no_step_after_a_capture_enters_one_function_more(captures: Captures) -> None:
    model = small_decoder()
    msprobe_patches.load_debugger_class()
    forward_backward(model, token_ids())
    before = calls_of_a_step(model)
    with captures.around(model, level=MIX):
        step_with_optimizer(model)
        during = calls_of_a_step(model)
    forward_backward(model, token_ids())
    assert calls_of_a_step(model) == before
    assert during != before


def test_a_model_is_freed_after_its_capture(captures: Captures) -> None:
    model = small_decoder()
    captures.run(model, level=MIX)
    alive = weakref.ref(model.blocks[0])
    del model
    gc.collect()
    assert alive() is None


def test_several_models_and_stages_of_one_process(captures: Captures) -> None:
    actor, critic = small_decoder(1), small_decoder(2, width=8)
    counts: list[int] = []
    for model, stage in (
        (actor, "actor_update"), (critic, "critic_update"), (actor, "actor_compute_log_prob"),
        (actor, "actor_update"),
    ):  # fmt: skip
        captures.run(model, level=MIX, stage=stage, step=len(counts))
        counts.append(len(captures.entries()))
    assert len(set(counts)) == 1, counts


def test_configuration_changes_from_capture_to_capture(captures: Captures) -> None:
    model = small_decoder()
    process = process_state()
    kinds: list[dict[str, Any]] = [
        {"level": "L0"},
        {"level": "L1"},
        {"level": "mix"},
        {"level": "L1", "section": {"summary_mode": "md5"}},
        {"level": "L1", "section": {"summary_mode": "xor"}},
        {"level": "L1", "task": "tensor"},
        {"level": "mix", "task": "structure"},
        {"level": "L0"},
        {"level": "L1"},
    ]
    entries = []
    for step, kind in enumerate(kinds):
        captures.run(model, step=step, **kind)
        entries.append(set(captures.entries()))
    assert entries[0] == entries[-2]
    assert entries[1] == entries[-1] == entries[3] == entries[5]
    assert entries[2] == entries[0] | entries[1]
    assert differences(process) == []


@pytest.mark.parametrize("failing", ["module", "api"])
def test_a_stage_that_raises_leaves_its_dump_and_the_next_is_whole(
    captures: Captures, level: str, failing: str
) -> None:
    model = small_decoder()
    captures.run(model, level=level)
    complete = set(captures.entries())
    process = process_state()
    model.failing = failing
    with (
        pytest.raises((ValueError, RuntimeError)) as raised,
        captures.around(model, level=level, step=2),
    ):
        forward_backward(model, token_ids())
    assert captures.last["state"] == "truncated"
    assert type(raised.value).__name__ in captures.last["error"]
    assert 0 < len(captures.entries()) < len(complete)
    assert captures.done()["state"] == "truncated"
    assert differences(process) == []
    model.failing = None
    captures.run(model, level=level, step=3)
    assert set(captures.entries()) == complete
    assert captures.last["state"] == "complete"


def test_collection_state_of_gc_is_kept(captures: Captures) -> None:
    model = small_decoder()
    gc.disable()
    try:
        captures.run(model, level=MIX)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture
def plain_linear() -> Iterator[object]:
    original = functional.linear
    yield original
    functional.linear = original


def test_a_function_patched_between_captures_stays_patched(
    captures: Captures, plain_linear: Any
) -> None:
    model = small_decoder()
    captures.run(model, level="L1")
    calls = []

    def counting(*arguments: object, **named: object) -> Any:
        calls.append(1)
        return plain_linear(*arguments, **named)

    functional.linear = counting
    captures.run(model, level="L1", step=2)
    assert functional.linear is counting
    assert len(calls) == 9
    assert "Functional.linear.0.forward" in captures.entries()


def test_a_graph_kept_beyond_its_stage_writes_nowhere(captures: Captures) -> None:
    model = small_decoder()
    with captures.around(model, level=MIX, step=1):
        loss = model(token_ids()).sum()
    first = dict(captures.last)
    with captures.around(model, level=MIX, step=2):
        pass
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        loss.backward()
    assert captures.entries() == {}
    assert all(".backward" not in name for name in captures.entries())
    assert first["state"] == "complete"


def test_compiled_functions_inside_and_after(captures: Captures, level: str) -> None:
    model = small_decoder()
    compiled = torch.compile(model, backend="eager")
    expected = model(token_ids())
    assert torch.allclose(compiled(token_ids()), expected)
    process = process_state()
    with captures.around(model, level=level):
        assert torch.allclose(compiled(token_ids()), expected)
    assert captures.last["state"] == "complete", captures.last
    assert captures.entries()
    assert torch.allclose(compiled(token_ids()), expected)
    fresh = torch.compile(small_decoder(3), backend="eager")
    fresh(token_ids()).sum().backward()
    assert differences(process) == []
    torch._dynamo.reset()


def test_hooks_of_the_user_are_not_changed(captures: Captures, level: str) -> None:
    model = small_decoder()
    seen: list[str] = []
    model.lm_head.register_forward_hook(lambda *_: seen.append("forward"))
    model.lm_head.register_full_backward_hook(lambda *_: seen.append("backward"))
    own_forward = model.lm_head.forward
    model.lm_head.forward = own_forward  # type: ignore[method-assign]
    captures.run(model, level=level)
    forward_backward(model, token_ids())
    assert seen == ["forward", "backward"] * 2
    assert captures.last["state"] == "complete"
    assert not msprobe_patches.is_dump_code(model.lm_head.forward)


def test_every_submodule_is_seen_where_verl_is_imported(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_decoder()
    verl = types.ModuleType("verl")
    monkeypatch.setitem(sys.modules, "verl", verl)
    captures.run(model, level="L0")
    assert sys.modules["verl"] is verl
    assert any("lm_head" in name for name in captures.entries())
    assert any("embedding" in name for name in captures.entries())
