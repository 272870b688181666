"""The first operator in which two dumps differ, as an answer."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import Field

from stagescope_service.compare.operators.faulty_shards import FaultyShard
from stagescope_service.fields import Described, Number, Row, one_of
from stagescope_wire.nonfinite import Json

Name = Annotated[
    str,
    Field(
        description="msprobe's full name of the call.",
        examples=["Module.model.layers.0.mlp.down_proj.Linear.forward.0"],
    ),
]
CallPosition = Annotated[int, Field(description="Position of the call in the dump, from 0.")]
Source = Annotated[
    str | None, Field(description="The first frame of the call's stack outside torch.")
]
NonFinite = Annotated[
    str | None,
    Field(
        description="Which of NaN and infinities it holds: `nan` (alone or beside infinities), "
        "`+inf`, `-inf` or `inf` (both signs); null: none, or not known.",
        examples=["nan"],
    ),
]
Section = Annotated[
    str,
    Field(
        description="The part of the call that the tensor belongs to.",
        examples=["input_args", "output", "parameters", "grad"],
    ),
]


class SideCall(Row):
    """An operator call of one side."""

    order: CallPosition
    name: Name
    operator: str | None
    """The module's path, or the function's name."""
    module_class: str | None
    """Class of the module; null: it is no module."""
    direction: str | None
    """Direction in the name: `forward`, `backward`, `parameters_grad` or `debug`; null: the name
    has none."""
    source: Source
    stack_id: str | None
    """Id of the call's stack, for `/steps/{step}/operators/stack`; null: none was recorded."""
    parent: str | None
    """The module that called it; null: not known."""


class SideValue(SideCall):
    """An argument or result of one side."""

    shape: list[int] | None
    """Shape of the tensor in elements; null: it is no tensor."""
    type: str | None
    """Type of the value, such as `torch.Tensor`."""
    dtype: str | None
    """Dtype of the tensor; null: it is no tensor."""
    non_finite: NonFinite
    checksum: str | None
    """msprobe's checksum, if it was requested; null: there is none."""
    value: str | None
    """Text of a value that is no tensor; null: it is a tensor."""
    placements: str | None
    """Placements of a DTensor; null: it is no DTensor."""
    joined: str | None
    """How the tensors of the side's ranks were put together, such as `dimension 0 over dp, sum over
    tp`; null: the side has one rank, or the value is no tensor."""
    min: Number | None
    """Least value of the tensor's elements; null: unknown."""
    max: Number | None
    """Largest value of the tensor's elements; null: unknown."""
    mean: Number | None
    """Mean value of the tensor's elements; null: unknown."""
    norm: Number | None
    """L2 norm of the tensor's elements; null: unknown."""


class DivergentRow(Row):
    """A row that differs."""

    verdict: Annotated[
        str, one_of("missing", "type", "shape", "non_finite", "checksum", "value", "statistics")
    ]
    """Kind of the difference, the first that applies; `missing`: only one side has the row."""
    section: Section | None
    """Section of the call that has the row; null: unknown."""
    index: str | None
    """Which argument or result of the section: position and keys, joined by dots."""
    relative: Number | None
    """Relative difference of min, max, mean and norm, a ratio; null: one side alone has the row."""
    threshold: float
    """The ratio over which `relative` counts as a difference; 0: values must be equal."""
    a: SideValue | None
    """Null: only the other side has it."""
    b: SideValue | None
    """Null: only the other side has it."""
    shards: list[FaultyShard]
    """The ranks whose shards differ; empty: not known, or each side has one rank."""


class UnjoinedTensor(Row):
    """A tensor that could not be put together."""

    name: Name
    section: Section | None
    """Section of the call that has it; null: unknown."""
    index: str | None
    """Which argument or result of the section: position and keys, joined by dots."""
    reason: str
    """Why it was not compared."""


class UnequalParameter(Row):
    """A parameter of which ranks should hold the same, and do not."""

    name: Name
    section: Section | None
    """Section of the call that has it; null: unknown."""
    index: str | None
    """Which argument or result of the section: position and keys, joined by dots."""
    shards: list[FaultyShard]
    """The ranks that differ from the others, which are nearer to the other side."""


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorDivergence(Described):
    """The first operator in which two dumps differ, and counts of the other differences."""

    same: bool
    """Whether no row differs and both sides have the same operators."""
    first: DivergentRow | None
    """The first row that differs, in the order of side `a`; null: none does."""
    first_sections: list[str]
    """The sections of that call with rows that differ."""
    first_note: str | None
    """Where its input differs already: that no recorded call returned it; null: one may have."""
    first_parameter: DivergentRow | None
    """The first row of parameters that differs; null: none does."""
    first_gradient: DivergentRow | None
    """The first row of parameters' gradients that differs; null: none does."""
    rows: list[DivergentRow]
    """The first rows that differ, in execution order."""
    counts: dict[str, int]
    """Verdict -> number of rows, of all."""
    only_a: list[SideCall]
    """The first operators of side `a` without a partner."""
    only_b: list[SideCall]
    """The first operators of side `b` without a partner."""
    only_a_count: int
    """Number of operator calls of side `a` without a partner."""
    only_b_count: int
    """Number of operator calls of side `b` without a partner."""
    paired: int
    """Number of pairs of calls."""
    moved: int
    """Number of these pairs whose order differs between the sides."""
    compared: int
    """Number of rows that both sides have."""
    parameters_compared: int
    """Number of these rows that are parameters; 0 at level L1, which records none."""
    gradients_compared: int
    """Number of these rows that are gradients of parameters; 0 at level L1, which records none."""
    sharded: int
    """Number of rows left out because each rank holds another shard."""
    not_joined: int
    """Number of rows left out because the tensors of the ranks could not be put together."""
    unjoined: list[UnjoinedTensor]
    """The first of these rows, and why."""
    joined: dict[str, int]
    """How tensors of several ranks were put together -> number of tensors; empty: each side has one
    rank."""
    unequal_parameters: list[UnequalParameter]
    """The first parameters whose replicas differ in any bit that statistics show, also if the
    difference is no larger than what rounding explains between the sides."""
    sums_by_mean: int
    """Number of sums of parts of which only the mean was compared, because there are no full
    tensors, or too many."""
    layouts: list[str | None]
    """The layout of side `a` and of side `b`, such as `dp 2, tp 2`; null: one rank."""
    gradient_scales: list[float]
    """The divisor of the gradients of side `a` and of side `b`.

    It is the number of ranks along `dp` if each loss is a mean over its own rows, else 1.
    """
    not_read: int
    """Number of rows whose values differ in memory that no call read: no difference."""
    zero_gradients: int
    """Number of rows that differ in gradients that are zero except for rounding: no difference."""
    identifiers: int
    """Number of rows that differ in values that identify a process or a call: no difference. Such
    values are a process group, a peer, or whether the call was recomputed."""
    near_counts: int
    """Number of rows that differ in counts (`histc`, `bincount`) by what rounding moves: no
    difference, but with `exact`."""
    other_checksums: int
    """Number of rows whose statistics agree and whose checksums differ: a difference with `exact`
    alone."""
    exact_alignment: bool
    """False where the two differ so much that calls were paired by counting."""

    def fields(self) -> dict[str, Json]:
        """Return it as a dict."""
        return dataclasses.asdict(self)
