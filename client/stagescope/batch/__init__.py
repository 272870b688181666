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

from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from stagescope import render
from stagescope.batch import converters, file
from stagescope.batch.data import (
    Array,
    BatchData,
    BatchPart,
    Gap,
    Padding,
    Tensor,
    check_rows,
    widened,
)
from stagescope.flow import order_of
from stagescope.frames import context

if TYPE_CHECKING:
    import tensordict
    import torch

    from verl import DataProto  # pyright: ignore[reportMissingImports]

__all__ = ["Batch", "BatchPart", "Gap", "Padding", "Tensor", "check_rows", "widened"]


class Batch(BatchData):
    """Rows of one step (`BatchData`), to and from files, and as other libraries have them."""

    # --- files -------------------------------------------------------------------------------
    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Open what `save` or `stagescope batch --output` wrote; tensors stay in the file.

        Raises:
            NotFound: there is no such file.
            InvalidTensor: it is no safetensors file, or no batch.
        """
        return file.load(Path(path), cls)

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, whole or not at all, and return its path.

        Raises:
            InvalidInput: no file can be there, such as in a directory that is none.
            StoreError: the disk refused.
        """
        return file.save(self, Path(path))

    # --- as others have it -------------------------------------------------------------------
    def as_arrays(self) -> dict[str, Array]:
        """Return numpy copies by name, bits as recorded: bfloat16 as uint16 (see `tensor`)."""
        return {name: self[name].copy() for name in self}

    def as_tensors(self) -> dict[str, torch.Tensor]:
        """Return torch tensors by name, copies on the host, bits and dtypes as recorded."""
        return converters.torch_tensors(self)

    def as_tensordict(self) -> tensordict.TensorDict:
        """Return a TensorDict of the rows; strings are non-tensor data of each row."""
        return converters.tensordict_of(self)

    def as_dataproto(self) -> DataProto:
        """Return verl's DataProto: tensors, strings as `non_tensor_batch`, meta as `meta_info`."""
        return converters.dataproto(self)

    def as_slime_samples(self) -> list[dict[str, Any]]:
        """Return slime's samples as dicts, aligned to responses alone, as its rollout dumps."""
        return converters.slime_samples(self)

    def as_nexrl_trajectories(self) -> list[dict[str, Any]]:
        """Return trajectories as NexRL's DataDumper writes them."""
        return converters.nexrl_trajectories(self)

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
