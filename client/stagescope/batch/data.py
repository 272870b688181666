"""What was recorded of one step: tensors, texts, how stages split the rows, what is missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from typing_extensions import Self

from stagescope.frames import no_column
from stagescope.wire.errors import InvalidInput, NotFound
from stagescope.wire.schema import STAGES, Part

Array = np.ndarray[Any, Any]
T = TypeVar("T", bound="BatchData")

_UPDATES: Final = ("actor_update", "critic_update")


class Tensor(NamedTuple):
    """A tensor's bits and what they are: bfloat16 is held as uint16."""

    dtype: str
    values: Array


class Padding(NamedTuple):
    """How rows of unlike length were made one width: where, and with which value."""

    side: str
    """'left' or 'right'."""
    fill: float | int


class Gap(NamedTuple):
    """Something that is not in a batch, or that does not agree in it."""

    kind: str
    """'attempt' | 'rank' | 'payload' | 'file' | 'tensor' | 'number' | 'rows' | 'joined' |
    'disagrees'."""
    message: str


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPart:
    """What one rank recorded of one part of a stage: some of the batch's rows.

    Attributes:
        stage, role, rank, part: where it was recorded.
        rows: int64, which rows of the batch.
        names: everything that it recorded.
        widths: of those of them that are as wide as their tokens; the batch's may be wider.
        own: those whose values are not the batch's: of a later pass over the same rows, of no
            rows (a loss), or in disagreement.
        numbers: scalars by name.
    """

    stage: str
    role: str | None
    rank: int | None
    part: Part
    rows: Array
    names: tuple[str, ...] = ()
    widths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    own: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        who = "" if self.rank is None else f" {self.role or 'rank'} {self.rank}"
        return f"{self.stage}{who}" + ("" if self.part == Part() else f" part {self.part}")


@dataclasses.dataclass(frozen=True, eq=False)
class BatchData:
    """Rows of one step; every tensor is `[rows]`, `[rows, tokens]` or `[rows, tokens, ...]`.

    Attributes:
        rows: how many.
        tensors: by name, see `schema.PAYLOAD_TENSORS`.
        strings: texts of each row by name: `sample_ids`, `group_ids`, `run_ids`, ...
        lengths: of tensors that were recorded ragged, int64 [rows].
        padding: of tensors whose parts were of unlike width.
        others: tensors of no rows (a loss, a gradient); of a microbatch alone.
        numbers: scalars; of a microbatch alone.
        meta: `policy_version`, `settings`, `sampling`, and by stage what was said beside tensors.
        source: `run`, `attempt`, `step`, and `files` with their checksums.
        gaps: what is missing or disagrees; read it before a conclusion is drawn.
        parts: how the stages split the rows.
    """

    rows: int
    tensors: Mapping[str, Tensor]
    strings: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    lengths: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    padding: Mapping[str, Padding] = dataclasses.field(default_factory=dict)
    others: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    parts: tuple[BatchPart, ...] = ()

    # --- what is in it -----------------------------------------------------------------------
    def __getitem__(self, name: str) -> Array:
        return self.tensor(name).values

    def __contains__(self, name: object) -> bool:
        return name in self.tensors or name in self.others

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.others

    def __len__(self) -> int:
        return self.rows

    def tensor(self, name: str) -> Tensor:
        """Return a tensor with its dtype.

        Raises:
            NotFound: it was not recorded, or not kept.
        """
        if name not in self:
            raise no_column(name, tuple(self), what="tensor")
        return self.tensors[name] if name in self.tensors else self.others[name]

    @property
    def step(self) -> int | None:
        """The trainer's step."""
        return self.source.get("step")

    @property
    def sample_ids(self) -> tuple[str, ...] | None:
        """sample_uid of each row; None where they were not said."""
        return self.strings.get("sample_ids")

    # --- parts of it -------------------------------------------------------------------------
    def take(self, rows: Sequence[int] | Array) -> Self:
        """Return some rows in this order; without parts, since these are of the whole."""
        index = np.asarray(rows, np.int64)
        return dataclasses.replace(
            self,
            rows=len(index),
            tensors={n: Tensor(t.dtype, t.values[index]) for n, t in self.tensors.items()},
            strings={n: tuple(texts[row] for row in index) for n, texts in self.strings.items()},
            lengths={name: lengths[index] for name, lengths in self.lengths.items()},
            parts=(),
        )

    def stages(self) -> tuple[str, ...]:
        """Return the stages that recorded something, in the order of a step."""
        known = {name: order for order, name in enumerate(STAGES)}
        return tuple(
            sorted(
                dict.fromkeys(part.stage for part in self.parts),
                key=lambda name: known.get(name, len(known)),
            )
        )

    def parts_of(self, stage: str | None = None) -> tuple[BatchPart, ...]:
        """Return the parts of a stage in the order of its passes, rank by rank in each.

        Without a stage that is the update of the actor, else the last stage there is.

        Raises:
            NotFound: nothing was recorded in this stage.
        """
        there = self.stages()
        if stage is None and there:
            stage = next((name for name in _UPDATES if name in there), there[-1])
        found = [part for part in self.parts if part.stage == stage]
        if not found:
            raise NotFound(
                f"the batch has no stage {stage!r}", expected=f"one of {', '.join(there)}"
            )
        return tuple(sorted(found, key=lambda part: (part.part, part.role or "", part.rank or 0)))

    def microbatches(self, stage: str | None = None) -> Iterator[Self]:
        """Yield the batch as a stage saw it: part by part, `parts_of`'s order.

        Each holds every tensor of its rows, those of earlier stages cut to its own width; what the
        part recorded itself is as it recorded it, bit by bit.
        """
        return map(self.microbatch, self.parts_of(stage))

    def microbatch(self, part: BatchPart) -> Self:
        """Return the rows of one part, as it saw them."""
        rows = self.take(part.rows)
        usual = self._widths(part)
        tensors = {}
        for name, tensor in rows.tensors.items():
            width = part.widths.get(name)
            if width is None and name != "prompts" and tensor.values.ndim > 1:
                width = usual.get(tensor.values.shape[1])
            tensors[name] = Tensor(tensor.dtype, _cut(tensor.values, width, self.side(name)))
        mine = {n: t for n, t in part.own.items() if t.values.shape[:1] == part.rows.shape}
        others = {n: t for n, t in part.own.items() if n not in mine}
        place = {"stage": part.stage, "role": part.role, "rank": part.rank, "part": str(part.part)}
        return dataclasses.replace(
            rows,
            tensors={n: t for n, t in {**tensors, **mine}.items() if n not in others},
            others=others,
            numbers=part.numbers,
            source={**self.source, **place},
        )

    def _widths(self, part: BatchPart) -> dict[int, int]:
        """Return the batch's widths and what they were in a part: of responses, of sequences."""
        named = next((n for n in ("response_mask", *part.widths) if n in part.widths), None)
        if named is None or named not in self.tensors:
            return {}
        whole, own = self[named].shape[1], part.widths[named]
        prompt = self["prompts"].shape[1] if "prompts" in self else 0
        return {prompt + whole: prompt + own, whole: own}

    def side(self, name: str) -> str:
        """Return the side on which a tensor is padded, 'left' or 'right'."""
        return self.padding[name].side if name in self.padding else "right"


def widened(tensor: Tensor) -> Array:
    """Return the values of a tensor; bfloat16 as float32, which holds each of its values."""
    if tensor.dtype != "bfloat16":
        return tensor.values
    return (tensor.values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def check_rows(batch: T) -> T:
    """Return a batch whose tensors and strings all have its rows.

    Raises:
        InvalidInput: one that has not.
    """
    for name, tensor in batch.tensors.items():
        if tensor.values.shape[:1] != (batch.rows,):
            raise InvalidInput(
                f"tensor {name} has shape {tensor.values.shape}", expected=f"{batch.rows} rows"
            )
    for name, lengths in batch.lengths.items():
        if name not in batch.tensors or lengths.shape != (batch.rows,):
            raise InvalidInput(f"lengths of {name} are {lengths.shape}", expected=f"{batch.rows}")
    for name, texts in batch.strings.items():
        if len(texts) != batch.rows:
            raise InvalidInput(f"{name} has {len(texts)} texts", expected=f"{batch.rows}")
    for part in batch.parts:
        if part.rows.size and not 0 <= part.rows.min() <= part.rows.max() < batch.rows:
            raise InvalidInput(f"{part} has rows beyond the batch's", expected=f"0-{batch.rows}")
    return batch


def _cut(values: Array, width: int | None, side: str) -> Array:
    if width is None or values.ndim < 2:
        return values
    return values[:, :width] if side == "right" else values[:, values.shape[1] - width :]
