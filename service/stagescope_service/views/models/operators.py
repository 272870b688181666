"""Answers about operators: what a dump holds, and where it first went wrong."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import Field

from stagescope_service.compare.operators.divergence_answer import (
    CallPosition,
    Name,
    NonFinite,
    OperatorDivergence,
    Section,
    Source,
)
from stagescope_service.fields import Attempt, NodeId, Number, Part, Rank, Role, Run, Stage, Step
from stagescope_service.views.models.common import Model, Page, StepHeading


class OperatorTableKey(Model):
    """The stage, rank and part of a table of operators."""

    stage: Stage
    role: Role
    rank: Rank
    part: Part
    capture_id: str
    """Id of the capture that made the dump; `local` where the rank named none."""


class _Reading(Model):
    state: Annotated[str, Field(examples=["announced", "written"])]
    """`announced`: it is being read; else the table's state, or why it cannot be read."""
    reason: str | None
    """Why there is no table; null: there is one, or it is being read."""
    truncated: bool | None
    """Whether the dump was cut off."""
    done: bool | None
    """`ok` of the rank's DONE.json: false after a crash inside the stage; null: it has none, the
    rank did not reach its end."""


class Table(OperatorTableKey, _Reading):
    """The extent of a dump and of its table."""

    calls: int | None
    """Number of operator calls; null: not read."""
    rows: int | None
    """Number of rows of the table; null: not read."""
    non_finite_rows: int | None
    """Number of rows with NaN or infinities; null: not read."""
    truncated_at: int | None
    """Number of the byte of dump.json at which it was cut off; null: it is complete."""
    task: str | None
    """msprobe's task."""
    level: str | None
    """msprobe's level."""
    bytes: int | None
    """Size of the table in bytes; null: not read."""
    dump_path: str | None
    """msprobe's directory on that node."""
    path: str | None
    """The table's file there."""
    node_id: NodeId | None
    """Ray's id of the node on which both lie; null: unknown."""


class OperatorRow(OperatorTableKey):
    """An argument, a result, a parameter or a gradient of a call."""

    order: CallPosition
    name: Name
    kind: Annotated[str | None, Field(examples=["Module", "Functional", "Torch", "Tensor"])]
    """Kind of the call, by its name; null: the name is of an unknown form."""
    operator: str | None
    """The module's path, or the function's name."""
    module_class: str | None
    """Class of the module; null: it is none."""
    call: int | None
    """msprobe's counter in the name: index of the call among those of its operator; null: the name
    has none."""
    direction: Annotated[str | None, Field(examples=["forward", "backward"])]
    """Direction in the name: `forward`, `backward`, `parameters_grad` or `debug`; null: the name
    has none."""
    source: Source
    stack_id: str | None
    """For `/steps/{step}/operators/stack`."""
    parent: str | None
    """The module that called it."""
    section: Section | None
    """Section of the call that it belongs to; null: the call has no arguments and results."""
    index: str | None
    """Which argument or result of the section: position and keys, joined by dots."""
    type: Annotated[str | None, Field(examples=["torch.Tensor"])]
    """Type of the value, such as `torch.Tensor`."""
    dtype: Annotated[str | None, Field(examples=["bfloat16"])]
    """Dtype of the tensor; null: it is none."""
    shape: list[int] | None
    """Shape of the tensor in elements; null: it is none."""
    min: Number | None
    """Least value of the tensor's elements; null: unknown."""
    max: Number | None
    """Largest value of the tensor's elements; null: unknown."""
    mean: Number | None
    """Mean value of the tensor's elements; null: unknown."""
    norm: Number | None
    """L2 norm of the tensor's elements; null: unknown."""
    non_finite: NonFinite
    requires_grad: bool | None
    """Whether the tensor requires a gradient; null: not recorded."""
    checksum: str | None
    """msprobe's checksum, where it was requested."""
    value: str | None
    """Text of a value that is no tensor; null: it is one."""
    placements: str | None
    """Placements of a DTensor; null: it is none."""
    data_name: str | None
    """Name of the tensor's file, of task `tensor`; null: there is none."""


class Operators(StepHeading, Page[OperatorRow]):
    """Operator calls in execution order."""

    tables: list[Table]
    """A table a dump."""


class OperatorStack(StepHeading, OperatorTableKey):
    """The Python frames of an operator's call."""

    stack_id: str
    """Id of the stack in the dump."""
    frames: list[str]
    """The innermost first."""


class BadInput(Model):
    """An input that was not finite before a call."""

    section: Section
    index: str | None
    """Which input of the section: position and keys, joined by dots."""
    non_finite: NonFinite


class FirstNonFinite(OperatorTableKey, _Reading):
    """The first operator of a rank with a NaN or infinite result; nulls: there is none."""

    order: CallPosition | None
    """Position of the call in the dump, from 0; null: there is none."""
    name: Name | None
    """msprobe's full name of the call; null: there is none."""
    operator: str | None
    """The module's path, or the function's name; null: there is none."""
    module_class: str | None
    """Class of the module; null: it is none."""
    parent: str | None
    """The module that called it; null: not known."""
    direction: str | None
    """Direction of the call: `forward`, `backward` or `parameters_grad`."""
    section: Section | None
    """Section of the call that is not finite: `output` or `grad`."""
    index: str | None
    """Which result of the section: position and keys, joined by dots."""
    non_finite: NonFinite
    dtype: str | None
    """Dtype of that result."""
    shape: list[int] | None
    """Shape of that result in elements."""
    source: Source
    stack_id: str | None
    """Id of the call's stack, for `/steps/{step}/operators/stack`; null: none was recorded."""
    bad_inputs: list[BadInput] | None
    """Inputs of that call that were not finite."""
    certain: bool | None
    """False where what was found may be a mask."""
    earliest: bool
    """Whether no rank found one earlier."""
    order_differs: bool
    """Whether the order of this rank's calls differs from the others'."""
    culprits: int | None
    """Number of calls with NaN or infinite results that are no masks, whatever their inputs; null:
    the table is not written."""
    masks: int | None
    """Number of calls with infinities that are, or may be, masks; null: the table is not
    written."""
    not_read: int | None
    """Number of calls that passed on memory without reading it: its content is no evidence; null:
    the table is not written."""
    calls: int | None
    """Number of calls in the dump; 0: msprobe recorded none."""
    task: str | None
    """msprobe's task, such as `statistics`; `structure` records no call."""
    measured: int | None
    """Number of tensors with a least and a largest value, in which NaN and infinities are found;
    null: not counted."""
    unmeasured: int | None
    """Number of other tensors that may hold NaN and infinities, which cannot be seen; null: not
    counted."""


class EarliestNonFinite(FirstNonFinite):
    """The earliest over ranks."""

    together: list[int]
    """All ranks that found it there, ascending."""


class NonFiniteOperators(StepHeading, Page[FirstNonFinite]):
    """The first operator with a NaN or infinite result on each rank."""

    earliest: EarliestNonFinite | None
    """The earliest over ranks; null: all results are finite, or masks."""


class Side(Table):
    """One side of a comparison of operators."""

    run: Run
    attempt: Attempt
    step: Step
    ranks: list[int] | None
    """The ranks whose tensors were put together; `rank` and the other fields are of the first.
    Null: one rank."""


class DeviceSide(Side):
    """One side, and the kind of device that it ran on."""

    device: Annotated[str | None, Field(examples=["npu", "cuda", "cpu"])]
    """Kind of the device that the rank ran on; null: unknown."""


@dataclasses.dataclass(frozen=True)
class Divergence(OperatorDivergence):
    """The first operator in which two dumps differ."""

    a: DeviceSide
    """Side `a`, which gives the order of calls."""
    b: DeviceSide
    """Side `b`."""
    factor: float | None
    """The threshold as a factor: times the eps of the coarsest dtype up to the row; null with
    `exact`."""
    exact: bool
    """Whether every number had to be equal."""
    by_dtype: dict[str, float]
    """dtype -> relative difference that counts, a ratio, instead of factor times eps."""


class TensorPair(Model):
    """Two full tensors, as msprobe compares them; values that it does not report are null."""

    name: str | None
    """Its name on side `a`, msprobe's NPU side."""
    name_b: str | None
    """Its name on side `b`, msprobe's bench."""
    dtype_a: str | None
    """Its dtype on side `a`; the Python type for a number."""
    dtype_b: str | None
    """Its dtype on side `b`; the Python type for a number."""
    shape_a: str | None
    """Its shape on side `a`, as msprobe writes it."""
    shape_b: str | None
    """Its shape on side `b`, as msprobe writes it."""
    cosine: Number | None
    """Cosine of the angle between the two, -1 to 1."""
    euclidean_distance: Number | None
    """Euclidean distance of the two, in the unit of the elements."""
    max_abs_error: Number | None
    """Largest absolute difference of two elements."""
    max_relative_error: Number | None
    """Largest relative difference of two elements, a ratio."""
    share_within_1e_3: Number | None = Field(alias="share_within_1e-3")
    """Share of elements within a relative error of 1e-3, 0 to 1."""
    share_within_5e_3: Number | None = Field(alias="share_within_5e-3")
    """Share of elements within a relative error of 5e-3, 0 to 1."""
    max_a: Number | None
    """Largest value of the elements on side `a`."""
    min_a: Number | None
    """Least value of the elements on side `a`."""
    mean_a: Number | None
    """Mean value of the elements on side `a`."""
    norm_a: Number | None
    """L2 norm of the elements on side `a`."""
    max_b: Number | None
    """Largest value of the elements on side `b`."""
    min_b: Number | None
    """Least value of the elements on side `b`."""
    mean_b: Number | None
    """Mean value of the elements on side `b`."""
    norm_b: Number | None
    """L2 norm of the elements on side `b`."""


class TensorPairs(Model):
    """Two dumps of full tensors, compared by msprobe."""

    a: Side
    """Side `a`, msprobe's NPU side."""
    b: Side
    """Side `b`, msprobe's bench."""
    count: int
    """Number of tensors that were compared."""
    rows: list[TensorPair]
    """In msprobe's order, from `offset` on."""
