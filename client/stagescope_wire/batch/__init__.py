"""`Batch`: the exact recorded data of one step, and a list of what is missing.

Usage::

    batch = session.step(5).batch()         # or Batch.load("step5.safetensors")
    batch["old_log_probs"]                  # numpy, [rows, tokens], bits as recorded
    batch.as_tensors()                      # torch; also as_dataproto(), as_tensordict(), ...
    for part in batch.microbatches("actor_update"):
        part.numbers["loss"]
    batch.gaps                              # what is missing or disagrees, as text

A batch is one safetensors file. It has the rows of all stages, joined by sample id. `parts` says
which rows a stage processed in each mini-batch, and holds the values of repeated passes (epochs).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stagescope_wire import render
from stagescope_wire.batch import converters, file
from stagescope_wire.batch.data import (
    BatchData,
    BatchPart,
    Gap,
    Padding,
    Tensor,
    check_rows,
    flow_index,
    widened,
)
from stagescope_wire.nonfinite import Json
from stagescope_wire.render import context
from stagescope_wire.render_html import html_table
from stagescope_wire.tensorfile import Array

if TYPE_CHECKING:
    import tensordict
    import torch
    from typing_extensions import Self

    from verl import DataProto  # pyright: ignore[reportMissingImports]

__all__ = ["Batch", "BatchPart", "Gap", "Padding", "Tensor", "check_rows", "widened"]


class Batch(BatchData):
    """Rows of one step (`BatchData`), with conversions to files and to other libraries."""

    # --- files -------------------------------------------------------------------------------
    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Open a file of `save` or `stagescope batch --output`; tensors are read on demand.

        Raises:
            NotFound: there is no such file.
            InvalidTensor: it is not a safetensors file, or not a batch.
        """
        return file.load(Path(path), cls)

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file atomically, and return its path.

        Raises:
            InvalidInput: `path` cannot be a file, such as in a directory that does not exist.
            StoreError: the file cannot be written.
        """
        return file.save(self, Path(path))

    # --- conversions -------------------------------------------------------------------------
    def as_arrays(self) -> dict[str, Array]:
        """Return numpy copies by name, bits as recorded: bfloat16 as uint16 (see `tensor`)."""
        return {name: self[name].copy() for name in self}

    def as_tensors(self) -> dict[str, torch.Tensor]:
        """Return torch tensors by name: copies on the host, bits and dtypes as recorded."""
        return converters.torch_tensors(self)

    def as_tensordict(self) -> tensordict.TensorDict:
        """Return a TensorDict of the rows; strings are non-tensor data of the rows."""
        return converters.tensordict_of(self)

    def as_dataproto(self) -> DataProto:
        """Return verl's DataProto: tensors, strings as `non_tensor_batch`, meta as `meta_info`."""
        return converters.dataproto(self)

    def as_slime_samples(self) -> list[dict[str, Json]]:
        """Return slime's samples as dicts, aligned to the responses as in its rollout dumps."""
        return converters.slime_samples(self)

    def as_nexrl_trajectories(self) -> list[dict[str, Json]]:
        """Return trajectories in the format of NexRL's DataDumper."""
        return converters.nexrl_trajectories(self)

    # --- text --------------------------------------------------------------------------------
    @property
    def heading(self) -> str:
        """Run, attempt, step and number of rows, on one line."""
        rows = f"{self.rows} row{'' if self.rows == 1 else 's'}"
        return ", ".join(part for part in ("batch", context(self.source), rows) if part)

    def lines(self, *, width: int = 80) -> list[str]:
        """Return tensors, stages and gaps as lines of at most `width` columns."""
        lines = render.text_table(self._columns(), units={}, width=width)
        return lines + [line for note in self._notes() for line in render.wrapped("", note, width)]

    def __repr__(self) -> str:
        return "\n".join([render.clip(self.heading, 80), *self.lines()])

    def _repr_html_(self) -> str:
        return html_table(self._columns(), units={}, caption=self.heading, foot=self._notes())

    def _ipython_key_completions_(self) -> list[str]:
        return [*self]

    def _columns(self) -> dict[str, tuple[Json, ...]]:
        shown = sorted(self.tensors, key=lambda name: (flow_index(name), name))
        return {
            "tensor": tuple(shown),
            "dtype": tuple(self.tensors[name].dtype for name in shown),
            "shape": tuple(list(self.tensors[name].values.shape) for name in shown),
        }

    def _notes(self) -> list[str]:
        counts = {stage: len(self.parts_of(stage)) for stage in self.stages()}
        stages = ", ".join(f"{stage} ({count})" for stage, count in counts.items())
        return [
            f"strings: {', '.join(self.strings) or 'none'}",
            f"stages (parts): {stages or 'none'}",
            *(f"{gap.kind}: {gap.message}" for gap in self.gaps),
        ]
