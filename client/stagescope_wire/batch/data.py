"""`BatchData`: the recorded rows of one step, how its stages split them, and what is missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np

from stagescope_wire.errors import InvalidInput, NotFound
from stagescope_wire.names import unknown_name
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import STAGES, Part
from stagescope_wire.tensorfile import Array

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound="BatchData")

_UPDATES: Final = ("actor_update", "critic_update")


class Tensor(NamedTuple):
    """A tensor's dtype and its values; a bfloat16 tensor has its bits as uint16."""

    dtype: str
    values: Array


class Padding(NamedTuple):
    """How rows of different lengths were padded to one width."""

    side: str
    """'left' or 'right'."""
    fill: float | int


class Gap(NamedTuple):
    """Something that a batch lacks, or on which its sources disagree."""

    kind: str
    """'attempt' | 'rank' | 'payload' | 'file' | 'tensor' | 'number' | 'rows' | 'joined' |
    'disagrees'."""
    message: str


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPart:
    """The rows that one rank recorded in one part of a stage.

    Attributes:
        stage, role, rank, part: where they were recorded.
        rows: int64, indices of the batch's rows.
        names: all recorded tensors.
        widths: the width of each token-wise tensor; the batch's may be wider.
        own: tensors whose values are not the batch's. They come from a later pass over the same
            rows, have no rows (a loss), or disagree with the batch.
        numbers: scalars by name.
        lengths: row lengths of tensors in `own` that were recorded ragged, int64 [rows].
        about: `policy_version`, `data_rank` and `layout` of the rank, as far as they are known.
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
    lengths: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    about: JsonObject = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        who = "" if self.rank is None else f" {self.role or 'rank'} {self.rank}"
        return f"{self.stage}{who}" + ("" if self.part == Part() else f" part {self.part}")


@dataclasses.dataclass(frozen=True, eq=False)
class BatchData:
    """Rows of one step; every tensor is `[rows]`, `[rows, tokens]` or `[rows, tokens, ...]`.

    Attributes:
        rows: number of rows.
        tensors: by name, see `stagescope_wire.tensors.PAYLOAD_TENSORS`.
        strings: texts of each row by name: `sample_ids`, `group_ids`, `run_ids`, ...
        lengths: row lengths of tensors that were recorded ragged, int64 [rows].
        padding: of tensors whose parts had different widths.
        others: tensors without rows (a loss, a gradient); only in a microbatch.
        numbers: scalars; only in a microbatch.
        meta: `policy_version`, `settings`, `sampling`, and the metadata of payloads by stage.
        source: `run`, `attempt`, `step`, and `files` with their checksums.
        gaps: what is missing or disagrees; read it before you draw a conclusion.
        parts: how the stages split the rows.
    """

    rows: int
    tensors: Mapping[str, Tensor]
    strings: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    lengths: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    padding: Mapping[str, Padding] = dataclasses.field(default_factory=dict)
    others: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    meta: JsonObject = dataclasses.field(default_factory=dict)
    source: JsonObject = dataclasses.field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    parts: tuple[BatchPart, ...] = ()

    # --- content -----------------------------------------------------------------------------
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
            NotFound: it was not recorded or not kept.
        """
        if name not in self:
            raise unknown_name(name, tuple(self), what="tensor")
        return self.tensors[name] if name in self.tensors else self.others[name]

    @property
    def step(self) -> int | None:
        """The trainer's step."""
        return self.source.get("step")

    @property
    def sample_ids(self) -> tuple[str, ...] | None:
        """The sample_uid of each row; None if they were not recorded."""
        return self.strings.get("sample_ids")

    # --- parts -------------------------------------------------------------------------------
    def take(self, rows: Sequence[int] | Array) -> Self:
        """Return these rows in this order; without `parts`, which index the rows of all."""
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
        """Return the stages that recorded something, in their order within a step."""
        index = {name: number for number, name in enumerate(STAGES)}
        return tuple(
            sorted(
                dict.fromkeys(part.stage for part in self.parts),
                key=lambda name: index.get(name, len(index)),
            )
        )

    def parts_of(self, stage: str | None = None) -> tuple[BatchPart, ...]:
        """Return the parts of a stage, ordered by part and then by role and rank.

        The default stage is the actor's update, else the last stage that recorded something.

        Raises:
            NotFound: nothing was recorded in this stage.
        """
        stages = self.stages()
        if stage is None and stages:
            stage = next((name for name in _UPDATES if name in stages), stages[-1])
        parts = [part for part in self.parts if part.stage == stage]
        if not parts:
            raise NotFound(
                f"the batch has no stage {stage!r}", expected=f"one of {', '.join(stages)}"
            )
        return tuple(sorted(parts, key=lambda part: (part.part, part.role or "", part.rank or 0)))

    def microbatches(self, stage: str | None = None) -> Iterator[Self]:
        """Yield the batch as a stage processed it, one part at a time in the order of `parts_of`.

        Each microbatch has all tensors of its rows. Tensors of earlier stages are cut to its width.
        Tensors that the part itself recorded are bitwise as recorded.
        """
        return map(self.microbatch, self.parts_of(stage))

    def microbatch(self, part: BatchPart) -> Self:
        """Return the rows of one part as its stage processed them."""
        rows = self.take(part.rows)
        part_widths = self._part_widths(part)
        tensors = {}
        for name, tensor in rows.tensors.items():
            width = part.widths.get(name)
            if width is None and name != "prompts" and tensor.values.ndim > 1:
                width = part_widths.get(tensor.values.shape[1])
            tensors[name] = Tensor(tensor.dtype, _cut(tensor.values, width, self.side(name)))
        own = {n: t for n, t in part.own.items() if t.values.shape[:1] == part.rows.shape}
        others = {n: t for n, t in part.own.items() if n not in own}
        where = {"stage": part.stage, "role": part.role, "rank": part.rank, "part": str(part.part)}
        return dataclasses.replace(
            rows,
            tensors={n: t for n, t in {**tensors, **own}.items() if n not in others},
            lengths={
                **{n: each for n, each in rows.lengths.items() if n not in own},
                **part.lengths,
            },
            others=others,
            numbers=part.numbers,
            source={**self.source, **where},
        )

    def _part_widths(self, part: BatchPart) -> dict[int, int]:
        """Return width in the batch -> width in a part, of responses and of whole sequences."""
        name = next((n for n in ("response_mask", *part.widths) if n in part.widths), None)
        if name is None or name not in self.tensors:
            return {}
        batch_width, part_width = self[name].shape[1], part.widths[name]
        prompt = self["prompts"].shape[1] if "prompts" in self else 0
        return {prompt + batch_width: prompt + part_width, batch_width: part_width}

    def side(self, name: str) -> str:
        """Return the side on which a tensor is padded, 'left' or 'right'."""
        return self.padding[name].side if name in self.padding else "right"


def widened(tensor: Tensor) -> Array:
    """Return the values of a tensor; bfloat16 becomes float32, which is exact."""
    if tensor.dtype != "bfloat16":
        return tensor.values
    return (tensor.values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def check_rows(batch: T) -> T:
    """Return the batch after checking that all tensors, strings and parts fit its rows.

    Raises:
        InvalidInput: one of them does not.
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
        for name, lengths in part.lengths.items():
            if name not in part.own or lengths.shape != part.rows.shape:
                raise InvalidInput(
                    f"lengths of {name} of {part} are {lengths.shape}",
                    expected=f"{part.rows.shape}",
                )
        if part.rows.size and not 0 <= part.rows.min() <= part.rows.max() < batch.rows:
            raise InvalidInput(f"{part} has rows beyond the batch's", expected=f"0-{batch.rows}")
    return batch


def _cut(values: Array, width: int | None, side: str) -> Array:
    if width is None or values.ndim < 2:
        return values
    return values[:, :width] if side == "right" else values[:, values.shape[1] - width :]


FLOW: Final = (
    "prompts", "responses", "tokens", "prompt_text", "response_text", "input_ids", "position_ids",
    "positions",
    "attention_mask", "loss_mask", "response_mask", "round_ids", "turn_ids", "versions",
    "rollout_log_probs",
    "rewards",
    "old_log_probs", "recomputed_log_probs", "ref_log_probs", "entropy",
    "values",
    "advantages", "returns",
    "log_probs",
    "prob_ratio", "elementwise_loss", "effective_valid",
    "pg_loss", "kl", "kl_loss", "entropy_loss", "value_loss", "loss",
    "gradient", "grad_norm", "parameter",
)  # fmt: skip
"""Names of tensors and numbers in that order; `gradient` and `parameter` stand for their families
(`gradient/lm_head.weight`)."""

_ORDER: Final = {name: order for order, name in enumerate(FLOW)}
_PASS: Final = _ORDER["log_probs"]


def flow_index(name: str, stage: str | None = None) -> int:
    """Return the index of a tensor or number in `FLOW`; unknown names come last.

    In an update stage, `entropy` and `values` belong to the update's own forward pass.
    """
    family = name.partition("/")[0].partition(".")[0]
    if family in ("gradient", "parameter", "gradients", "parameters"):
        name = family.removesuffix("s")
    order = _ORDER.get(name, len(FLOW))
    return _PASS if stage in _UPDATES and name in ("entropy", "values") else order
