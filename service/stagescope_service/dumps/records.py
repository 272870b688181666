"""The contents of a dump, in one form for every format: the contract that the readers implement.

A `Dump` lists its entries without reading their tensors. `Dump.read` reads one entry, so memory is
bounded by one file. A file may hold several sections, and each is one entry. One section of a file
has one place.

Tensors have the names of `stagescope_wire.tensors`, whatever the file calls them, and the losses
are `loss`, `pg_loss` and `entropy_loss`. `tokens` is a whole trajectory, prompt included, and
`loss_mask` is as wide. `response_mask` is as wide as `responses`. Any other tensor keeps its own
name. Conversions of a dtype or a layout are in `DumpContents.about`.

A sample_uid is `{group_id}_{index}`: the index counts the trajectories of a group (NexRL's
`run_id`). `DumpEntry.key` distinguishes the entries of one file.

Values that a reader cannot represent as tensors, numbers or texts are listed in
`DumpContents.about["left_out"]` as {name: reason}; nothing is dropped silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from stagescope_service.store.tensorfile import WireTensor
from stagescope_wire import batch
from stagescope_wire.errors import Forbidden, NotFound
from stagescope_wire.schema import Part
from stagescope_wire.tensorfile import Array

SECTIONS: Final[Mapping[str, str]] = {
    "trajectories": "output of the rollout: tokens, masks, log-probs, rewards, versions, ids",
    "batch_inputs": "input of the model: input_ids, attention_mask, position_ids, ...",
    "old_log_probs": "log-probs before the step's updates, and those of the reference",
    "forward_data": "log_probs, entropy and mask of a forward pass",
    "advantages": "values, advantages, returns",
    "is_loss": "the importance-sampling loss and its intermediate values",
    "loss": "loss values, each a number: loss, pg_loss, entropy_loss, ...",
    "gradients": "by name of the parameter",
    "parameters": "by name",
    "datums": "requests to a remote trainer",
    "metrics": "answers of a remote trainer, each a number",
    "other": "everything without a section of its own",
}


IMPORTED_CAPTURE: Final = "imported"
"""The capture id of operator dumps that were imported."""
SHIFTED_BY_ONE: Final = "index t is token t + 1"
"""Value in `DumpContents.about["alignment"]` (by tensor name) of a tensor shifted by one."""


class Location(NamedTuple):
    """Which step, stage, role, rank and part wrote a record; unknown is None, and `Part()`."""

    step: int | None = None
    stage: str | None = None
    role: str | None = None
    rank: int | None = None
    part: Part = Part()

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"{self.role or 'rank'} {self.rank}"
        part = "" if self.part == Part() else f"part {self.part}"
        step = "" if self.step is None else f"step {self.step}"
        return ", ".join(text for text in (step, self.stage, rank, part) if text) or "one file"


class RankDump(NamedTuple):
    """A directory with msprobe's files of one rank, and its place."""

    directory: Path
    location: Location


@dataclasses.dataclass(frozen=True)
class DumpEntry:
    """One section of one file; small, hashable and picklable, so that any process can read it.

    Attributes:
        section: one of SECTIONS.
        location: which step, stage, role, rank and part wrote it.
        path: the file.
        bytes: size of the file; where a file holds several places, the size of this one.
        key: distinguishes the entries of a file; only the reader interprets it.
    """

    section: str
    location: Location
    path: Path
    bytes: int = 0
    key: str = ""

    @property
    def stage(self) -> str:
        """The stage that wrote it; without one, the name of its section."""
        return self.location.stage or self.section


@dataclasses.dataclass(frozen=True)
class DumpContents:
    """The contents of one entry.

    Attributes:
        tensors: name -> (dtype tag, shape, numpy buffer of that shape, offsets or None), as on the
            wire: bfloat16 as uint16; ragged rows are flat with int64 offsets [rows + 1]. [rows],
            [rows, tokens], packed tokens, or any other shape (a parameter). Views of a mapped file
            or of one buffer where possible.
        numbers: scalars by name; NaN and infinities stay.
        samples: sample_uid of each row, or None.
        groups: group_id of each row, or None.
        row_texts: other texts of each row by name (`run_id`, `task_id`, `uid`, ...).
        mask: name of the tensor that selects the tokens of row tensors that count, or None. Token
            ids and masks themselves count for all tokens of a row.
        about: metadata besides the tensors, plain JSON values.
        problems: rows of the file that were not read.
    """

    entry: DumpEntry
    tensors: Mapping[str, WireTensor] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    samples: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    row_texts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    mask: str | None = None
    about: Mapping[str, object] = dataclasses.field(default_factory=dict)
    problems: Sequence[DumpProblem] = ()


@dataclasses.dataclass(frozen=True)
class DumpProblem:
    """A file, or rows of one, that is missing, damaged or refused; the others are read.

    Attributes:
        path: the file.
        kind: 'missing' | 'damaged' | 'refused' (not safe to load) | 'unknown' (not a file of this
            format) | 'superseded' (another file of the same place is read).
        message: what is wrong and what to do.
        entry: the entry, if the file would have been one.
    """

    path: Path
    kind: str
    message: str
    entry: DumpEntry | None = None

    @classmethod
    def from_error(
        cls, path: Path, error: Exception, entry: DumpEntry | None = None
    ) -> DumpProblem:
        """Return the problem of a file that could not be read."""
        kind = "missing" if isinstance(error, NotFound) else "damaged"
        kind = "refused" if isinstance(error, Forbidden) else kind
        return cls(path, kind, str(error), entry)


class Dump(Protocol):
    """A directory, or the kept files of a run's step, as opened by one of the readers.

    It is picklable and holds no open files, so that other processes can read its entries.
    """

    @property
    def name(self) -> str:
        """Display name: a path, or `run@attempt:step`."""
        ...

    @property
    def kind(self) -> str:
        """The format, one of `discover.KINDS`: 'own', 'batch', 'nexrl', 'slime', 'areal', ..."""
        ...

    @property
    def entries(self) -> Sequence[DumpEntry]:
        """All readable entries, ordered by step, section, rank and part."""
        ...

    @property
    def problems(self) -> Sequence[DumpProblem]:
        """Problems found while the files were listed."""
        ...

    @property
    def about(self) -> Mapping[str, object]:
        """Metadata of the dump: settings, fingerprint; plain JSON values."""
        ...

    def read(self, entry: DumpEntry) -> DumpContents:
        """Read one entry.

        Raises:
            NotFound: the file no longer exists.
            InvalidTensor: it is damaged, or not of its format.
            Forbidden: it cannot be loaded safely; the message names what it needs.
            StoreError: the disk reported an error.
        """
        ...


def widened(tensor: WireTensor) -> Array:
    """Return a tensor's values; bfloat16 as float32, which is exact."""
    return batch.widened(batch.Tensor(tensor[0], tensor[2]))


def mapping(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return the dict under a name, or an empty one if the value is anything else."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}
