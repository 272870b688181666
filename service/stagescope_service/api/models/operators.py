"""Answers about operators: what a dump holds, and where it first went wrong."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stagescope_service.api.models.common import (
    Attempt,
    Model,
    NodeId,
    Number,
    Page,
    Part,
    Rank,
    Role,
    Run,
    Stage,
    Step,
    StepHeading,
)

Name = Annotated[
    str,
    Field(
        description="msprobe's full name of the call.",
        examples=["Module.model.layers.0.mlp.down_proj.Linear.forward.0"],
    ),
]
Order = Annotated[int, Field(description="Position of the call in the dump, from 0.")]
Source = Annotated[
    str | None, Field(description="The first frame of the call's stack outside torch.")
]
NonFinite = Annotated[
    str | None,
    Field(description="Which of NaN and infinities it holds; null: none.", examples=["nan"]),
]
Section = Annotated[
    str,
    Field(
        description="What of the call it is.",
        examples=["input_args", "output", "parameters", "parameters_grad"],
    ),
]


class OperatorTableKey(Model):
    """The stage, rank and part of a table of operators."""

    stage: Stage
    role: Role
    rank: Rank
    part: Part
    capture_id: str


class _Reading(Model):
    state: Annotated[str, Field(examples=["announced", "written"])]
    """`announced`: it is being read; else the table's state, or why it cannot be read."""
    reason: str | None
    truncated: bool | None
    """Whether the dump was cut off."""
    done: bool | None
    """The content of its DONE.json; null: it has none, the rank did not reach its end."""


class Table(OperatorTableKey, _Reading):
    """What there is of a dump."""

    calls: int | None
    """Operator calls."""
    rows: int | None
    non_finite_rows: int | None
    truncated_at: int | None
    """Byte of dump.json at which it was cut off."""
    task: str | None
    """msprobe's task."""
    level: str | None
    """msprobe's level."""
    bytes: int | None
    """Of the table."""
    dump_path: str | None
    """msprobe's directory on that node."""
    path: str | None
    """The table's file there."""
    node_id: NodeId | None


class OperatorRow(OperatorTableKey):
    """An argument, a result, a parameter or a gradient of a call."""

    order: Order
    name: Name
    kind: Annotated[str | None, Field(examples=["Module", "Functional", "Torch", "Tensor"])]
    operator: str | None
    """The module's path, or the function's name."""
    module_class: str | None
    call: int | None
    """msprobe's counter in the name."""
    direction: Annotated[str | None, Field(examples=["forward", "backward"])]
    source: Source
    stack_id: str | None
    """For `/steps/{step}/operators/stack`."""
    parent: str | None
    """The module that called it."""
    section: Section | None
    index: str | None
    """Of the argument or result."""
    type: Annotated[str | None, Field(examples=["torch.Tensor"])]
    dtype: Annotated[str | None, Field(examples=["bfloat16"])]
    shape: list[int] | None
    min: Number | None
    max: Number | None
    mean: Number | None
    norm: Number | None
    """The L2 norm."""
    non_finite: NonFinite
    requires_grad: bool | None
    checksum: str | None
    """msprobe's checksum, where it was requested."""
    value: str | None
    """Of what is no tensor."""
    placements: str | None
    """Of a DTensor."""
    data_name: str | None
    """The tensor's file, of task `tensor`."""


class Operators(StepHeading, Page[OperatorRow]):
    """Operator calls in execution order."""

    tables: list[Table]
    """A table a dump."""


class OperatorStack(StepHeading, OperatorTableKey):
    """The Python frames of an operator's call."""

    stack_id: str
    frames: list[str]
    """The innermost first."""


class BadInput(Model):
    """An input that was not finite before a call."""

    section: Section
    index: str | None
    non_finite: NonFinite


class FirstNonFinite(OperatorTableKey, _Reading):
    """The first operator of a rank with a NaN or infinite result; nulls: there is none."""

    order: Order | None
    name: Name | None
    operator: str | None
    module_class: str | None
    parent: str | None
    direction: str | None
    section: Section | None
    index: str | None
    non_finite: NonFinite
    dtype: str | None
    shape: list[int] | None
    source: Source
    stack_id: str | None
    bad_inputs: list[BadInput] | None
    """Inputs of that call that were not finite."""
    certain: bool | None
    """False where what was found may be a mask."""
    earliest: bool
    """Whether no rank found one earlier."""
    order_differs: bool
    """Whether the order of this rank's calls differs from the others'."""
    culprits: int | None
    """Calls that made a NaN or an infinity of finite inputs; null: the table is not written."""
    masks: int | None
    """Calls with infinities that are masks."""
    not_read: int | None
    """Calls that passed on memory without reading it: its content is no evidence."""


class EarliestNonFinite(FirstNonFinite):
    """The earliest over ranks."""

    together: list[int]
    """All ranks that found it there."""


class NonFiniteOperators(StepHeading, Page[FirstNonFinite]):
    """The first operator with a NaN or infinite result on each rank."""

    earliest: EarliestNonFinite | None


class Side(Table):
    """One side of a comparison of operators."""

    run: Run
    attempt: Attempt
    step: Step


class DeviceSide(Side):
    """One side, and the kind of device that it ran on."""

    device: Annotated[str | None, Field(examples=["npu", "cuda", "cpu"])]


class SideCall(Model):
    """An operator call of one side."""

    order: Order
    name: Name
    operator: str | None
    module_class: str | None
    direction: str | None
    source: Source
    stack_id: str | None
    parent: str | None


class SideValue(SideCall):
    """An argument or result of one side."""

    shape: list[int] | None
    type: str | None
    dtype: str | None
    non_finite: NonFinite
    checksum: str | None
    value: str | None
    placements: str | None
    min: Number | None
    max: Number | None
    mean: Number | None
    norm: Number | None


class DivergentRow(Model):
    """A row that differs."""

    verdict: Literal["missing", "type", "shape", "non_finite", "checksum", "value", "statistics"]
    section: Section | None
    index: str | None
    relative: Number | None
    """The relative difference of min, max, mean and norm; null: there is none."""
    threshold: float
    """What it is held against."""
    a: SideValue | None
    """Null: only the other side has it."""
    b: SideValue | None


class Divergence(Model):
    """The first operator in which two dumps differ."""

    a: DeviceSide
    b: DeviceSide
    factor: float | None
    """Times the eps of the coarsest dtype: the threshold; null with `exact`."""
    exact: bool
    """Whether every number had to be equal."""
    same: bool
    """Whether no row differs and both sides have the same operators."""
    first: DivergentRow | None
    first_sections: list[str]
    """The sections of that call with rows that differ."""
    first_note: str | None
    """Where its input differs already: that no recorded call returned it; null: one may have."""
    first_parameter: DivergentRow | None
    first_gradient: DivergentRow | None
    """The first of parameters' gradients."""
    rows: list[DivergentRow]
    """The first rows that differ, in execution order."""
    counts: dict[str, int]
    """Verdict -> rows, of all."""
    only_a: list[SideCall]
    """The first operators without a partner."""
    only_b: list[SideCall]
    only_a_count: int
    only_b_count: int
    paired: int
    """Pairs of calls."""
    moved: int
    """Of these, in another order."""
    compared: int
    """Rows that both sides have."""
    parameters_compared: int
    """Of these; 0 at level L1, which records none."""
    gradients_compared: int
    sharded: int
    """Rows left out because each rank holds another shard."""
    not_read: int
    """Rows whose values differ in memory that no call read: no difference."""
    zero_gradients: int
    """Rows that differ in gradients that are zero but for rounding: no difference."""
    exact_alignment: bool
    """False where the two differ so much that calls were paired by counting."""


class TensorPair(Model):
    """Two full tensors, as msprobe compares them; values that it does not report are null."""

    name: str | None
    """Of side `a`, msprobe's NPU side."""
    name_b: str | None
    """Of side `b`, its bench."""
    dtype_a: str | None
    dtype_b: str | None
    shape_a: str | None
    shape_b: str | None
    cosine: Number | None
    euclidean_distance: Number | None
    max_abs_error: Number | None
    max_relative_error: Number | None
    share_within_1e_3: Number | None = Field(alias="share_within_1e-3")
    """Share of elements within a relative error of 1e-3, 0 to 1."""
    share_within_5e_3: Number | None = Field(alias="share_within_5e-3")
    """Share of elements within 5e-3."""
    max_a: Number | None
    min_a: Number | None
    mean_a: Number | None
    norm_a: Number | None
    max_b: Number | None
    min_b: Number | None
    mean_b: Number | None
    norm_b: Number | None


class TensorPairs(Model):
    """Two dumps of full tensors, compared by msprobe."""

    a: Side
    b: Side
    count: int
    """How many tensors were compared."""
    rows: list[TensorPair]
    """In msprobe's order, from `offset` on."""
