"""Tensors that are overwritten right after `record`: the values of the call must arrive."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import torch
from tests.tools.trial_device.results import Effort, Figure, Result, check, not_possible
from tests.tools.trial_device.spooled import spooled_probe
from tests.tools.trial_device.target import Target

_STATEMENT: Final = "a tensor that is overwritten right after record arrives as it was"
_SCALAR: Final = "so does a number that is logged as a tensor"
_BUSY_SECONDS: Final = 0.05

Forms = Mapping[str, Callable[[int], Any]]
"""Name -> what makes a value of this form for a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ownership(Result):
    title: ClassVar[str] = "Overwritten right after record"
    tensors: Annotated[int, Figure("tensors that were overwritten", "")]
    megabytes: Annotated[float, Figure("their size", "MB")]
    forms: Annotated[int, Figure("their forms: dtypes, views, rows, jagged", "")]


def measure(target: Target, effort: Effort) -> Ownership:
    """Record each form behind a busy stream, on the default stream and on another."""
    wrong: list[str] = []
    wrong_numbers: list[str] = []
    forms, impossible = _possible(_forms(target, effort))
    expected: dict[int, tuple[Mapping[str, Any], float]] = {}
    with spooled_probe(run="trial-ownership") as spooled:
        for step in range(2 * effort.repeats):
            values = {name: make(step) for name, make in forms.items()}
            number = target.place(torch.tensor(float(step)))
            target.synchronize()
            before = {name: _bits(value) for name, value in values.items()}
            if step % 2:
                with target.side_stream():
                    _record_and_overwrite(target, spooled.probe, step, values, number)
            else:
                _record_and_overwrite(target, spooled.probe, step, values, number)
            expected[step] = before, float(step)
        found = [each for each in spooled.close() if each.kind == "end"]
    by_step = {int(each.fields["step"]): each for each in found}
    for step, (tensors, number_before) in expected.items():
        arrived = by_step[step]
        for name, bits in tensors.items():
            got = arrived.tensors.get(name)
            if got is None or got.tobytes() != bits:
                wrong.append(f"{name} of step {step}")
        if arrived.fields["scalars"].get("number") != number_before:
            wrong_numbers.append(f"step {step}")
    count = len(expected) * len(forms)
    nbytes = sum(len(bits) for tensors, _ in expected.values() for bits in tensors.values())
    return Ownership(
        tensors=count, megabytes=nbytes / 1e6, forms=len(forms),
        checks=(
            check(_STATEMENT, not wrong, _text(wrong, count)),
            check(_SCALAR, not wrong_numbers, _text(wrong_numbers, len(expected))),
            *(not_possible(f"{name}: {_STATEMENT}", why) for name, why in impossible.items()),
        ),
    )  # fmt: skip


def _text(wrong: list[str], count: int) -> str:
    return f"{len(wrong)} of {count} are wrong: {', '.join(wrong[:5])}" if wrong else f"{count}"


def _record_and_overwrite(
    target: Target, probe: Any, step: int, values: Mapping[str, Any], number: torch.Tensor
) -> None:
    target.keep_busy(_BUSY_SECONDS)
    with probe.stage("trial", step=step) as stage:
        stage.record(values)
        stage.log(number=number)
        number.fill_(-1.0)
        for value in values.values():
            for tensor in value if isinstance(value, list) else [value]:
                _overwrite(tensor)


def _overwrite(tensor: torch.Tensor) -> None:
    values = tensor.values() if tensor.is_nested else tensor
    if values.dtype is torch.bool:
        values.logical_not_()
    else:
        values.fill_(99)


def _possible(forms: Forms) -> tuple[Forms, Mapping[str, str]]:
    """Return the forms that torch has on this device, and why it lacks the others."""
    impossible = {}
    for name, make in forms.items():
        try:
            make(0)
        except Exception as error:  # noqa: PERF203 - a kind of device may lack jagged tensors, or a dtype
            impossible[name] = f"{type(error).__name__}: {error!s:.200}"
    return {name: forms[name] for name in forms if name not in impossible}, impossible


def _forms(target: Target, effort: Effort) -> Forms:
    """Return every form."""
    shape = (effort.rows, effort.tokens)

    def dense(dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
        def make(step: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(step)
            raw = torch.randint(0, 90, shape, generator=generator)
            return target.place(raw.to(dtype))

        return make

    def rows(step: int) -> list[torch.Tensor]:
        wide = dense(torch.float32)(step)
        return [wide[row, : 1 + row % shape[1]].clone() for row in range(shape[0])]

    def jagged(step: int) -> torch.Tensor:
        each = rows(step)
        offsets = torch.tensor([0, *(row.shape[0] for row in each)]).cumsum(0)
        values: torch.Tensor = torch.cat(each)
        found: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, target.place(offsets))
        return found

    return {
        "float32": dense(torch.float32),
        "bfloat16": dense(torch.bfloat16),
        "float16": dense(torch.float16),
        "int64": dense(torch.int64),
        "int8": dense(torch.int8),
        "bool": dense(torch.bool),
        "transposed": lambda step: dense(torch.float32)(step).t(),
        "every second column": lambda step: dense(torch.float32)(step)[:, ::2],
        "rows": rows,
        "jagged": jagged,
    }


def _bits(value: Any) -> bytes:
    """Return the bytes in row-major order, read by torch's own blocking copy."""
    if isinstance(value, list):
        value = torch.cat(value)
    values = value.values() if value.is_nested else value
    host = values.detach().cpu().contiguous()
    raw = host.view(torch.int16) if host.dtype is torch.bfloat16 else host
    return np.ascontiguousarray(raw.numpy()).tobytes()
