"""`Batch`: what was recorded of one whole step, exactly, and what is not there.

Usage::

    batch = session.step(5).batch()         # or Batch.load("step5.safetensors")
    batch["old_log_probs"]                  # numpy, [rows, tokens], bits as recorded
    batch.as_tensors()                      # torch; also as_dataproto(), as_tensordict(), ...
    for part in batch.microbatches("actor_update"):
        part.numbers["loss"]
    batch.gaps                              # what is missing or disagrees, in words

A batch is one safetensors file: rows of every stage side by side, joined by sample id. Rows that a
stage saw more than once (epochs) or in other pieces (mini-batches) are found again in `parts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from stagescope import batch_file, render
from stagescope.flow import order_of
from stagescope.frames import context, no_column
from stagescope.wire.errors import InvalidInput, NotFound
from stagescope.wire.schema import STAGES, Part

if TYPE_CHECKING:
    import tensordict
    import torch

    from verl import DataProto  # pyright: ignore[reportMissingImports]

Array = np.ndarray[Any, Any]

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
class Batch:
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

    # --- files -------------------------------------------------------------------------------
    @classmethod
    def load(cls, path: str | Path) -> Batch:
        """Open what `save` or `stagescope batch --output` wrote; tensors stay in the file.

        Raises:
            NotFound: there is no such file.
            InvalidTensor: it is no safetensors file, or no batch.
        """
        return batch_file.load(Path(path))

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, whole or not at all, and return its path.

        Raises:
            InvalidInput: no file can be there, such as in a directory that is none.
            StoreError: the disk refused.
        """
        return batch_file.save(self, Path(path))

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
    def take(self, rows: Sequence[int] | Array) -> Batch:
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

    def microbatches(self, stage: str | None = None) -> Iterator[Batch]:
        """Yield the batch as a stage saw it: part by part, `parts_of`'s order.

        Each holds every tensor of its rows, those of earlier stages cut to its own width; what the
        part recorded itself is as it recorded it, bit by bit.
        """
        return map(self.microbatch, self.parts_of(stage))

    def microbatch(self, part: BatchPart) -> Batch:
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

    # --- as others have it -------------------------------------------------------------------
    def as_arrays(self) -> dict[str, Array]:
        """Return numpy copies by name, bits as recorded: bfloat16 as uint16 (see `tensor`)."""
        return {name: self[name].copy() for name in self}

    def as_tensors(self) -> dict[str, torch.Tensor]:
        """Return torch tensors by name, copies on the host, bits and dtypes as recorded."""
        from stagescope.converters import to_torch

        return to_torch.tensors(self)

    def as_tensordict(self) -> tensordict.TensorDict:
        """Return a TensorDict of the rows; strings are non-tensor data of each row."""
        from stagescope.converters import to_tensordict

        return to_tensordict.tensordict_of(self)

    def as_dataproto(self) -> DataProto:
        """Return verl's DataProto: tensors, strings as `non_tensor_batch`, meta as `meta_info`."""
        from stagescope.converters import to_verl

        return to_verl.dataproto(self)

    def as_slime_samples(self) -> list[dict[str, Any]]:
        """Return slime's samples as dicts, aligned to responses alone, as its rollout dumps."""
        from stagescope.converters import to_slime

        return to_slime.samples(self)

    def as_nexrl_trajectories(self) -> list[dict[str, Any]]:
        """Return trajectories as NexRL's DataDumper writes them."""
        from stagescope.converters import to_nexrl

        return to_nexrl.trajectories_of(self)

    # --- for a reader ------------------------------------------------------------------------
    @property
    def heading(self) -> str:
        """What this is, on one line."""
        rows = f"{self.rows} row{'' if self.rows == 1 else 's'}"
        return ", ".join(part for part in ("batch", context(self.source), rows) if part)

    def lines(self, *, width: int = 80) -> list[str]:
        """Return tensors, stages and gaps as lines of at most `width` columns."""
        shown = sorted(self.tensors, key=lambda name: (order_of(name), name))
        columns = {
            "tensor": tuple(shown),
            "dtype": tuple(self.tensors[name].dtype for name in shown),
            "shape": tuple(list(self.tensors[name].values.shape) for name in shown),
        }
        texts = ", ".join(self.strings)
        counts = {stage: len(self.parts_of(stage)) for stage in self.stages()}
        stages = ", ".join(f"{stage} ({count})" for stage, count in counts.items())
        lines = render.text_table(columns, units={}, width=width)
        lines += render.wrapped("", f"strings: {texts or 'none'}", width)
        lines += render.wrapped("", f"stages (parts): {stages or 'none'}", width)
        for gap in self.gaps:
            lines += render.wrapped("", f"{gap.kind}: {gap.message}", width)
        return lines

    def __repr__(self) -> str:
        return "\n".join([render.clip(self.heading, 80), *self.lines()])


def widened(tensor: Tensor) -> Array:
    """Return the values of a tensor; bfloat16 as float32, which holds each of its values."""
    if tensor.dtype != "bfloat16":
        return tensor.values
    return (tensor.values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def check_rows(batch: Batch) -> Batch:
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
