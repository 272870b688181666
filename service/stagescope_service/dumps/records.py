"""What a directory of dumps holds, in one form for every format: the contract of the readers.

A `Dump` lists its entries without reading their tensors; `Dump.read` reads one entry, so that
memory is bounded by one file. A file is never more than one place of one section, but it may make
several entries: one a section.

Tensors have the field's names, whatever the file calls them: `tokens` (a whole trajectory, prompt
included), `prompts`, `responses`, `loss_mask` (as wide as `tokens`), `response_mask` (as wide as
`responses`), `rollout_log_probs`, `old_log_probs`, `log_probs`, `ref_log_probs`, `entropy`,
`rewards`, `values`, `advantages`, `returns`, `prob_ratio`, `elementwise_loss`, `effective_valid`,
`loss`, `pg_loss`, `entropy_loss`; what has no such name keeps its own. Whether a dtype or a layout
was another is in `Record.about`.

A sample_uid is `{group_id}_{index}`, where the index is that of the trajectory in its group
(NexRL's `run_id`). Several sections of one file are several entries, told apart by `Entry.key`.

What a reader could not put into tensors, numbers or texts it names in `Record.about["left_out"]`:
{name: why}; nothing is dropped in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from stagescope.wire.errors import Forbidden, NotFound
from stagescope.wire.schema import Part
from stagescope_service.store.tensorfile import WireTensor

SECTIONS: Final[Mapping[str, str]] = {
    "trajectories": "what the rollout made: tokens, masks, log-probs, rewards, versions, ids",
    "batch_inputs": "what the model was given: input_ids, attention_mask, position_ids, ...",
    "old_log_probs": "log-probs before the step's updates, and those of the reference",
    "forward_data": "log_probs, entropy and mask of a forward pass",
    "advantages": "values, advantages, returns",
    "is_loss": "the importance-sampling loss and everything on the way to it",
    "loss": "loss values, each a number: loss, pg_loss, entropy_loss, ...",
    "gradients": "by name of the parameter",
    "parameters": "by name",
    "datums": "what was sent to a remote trainer",
    "metrics": "what a remote trainer answered, each a number",
    "other": "what has no section of its own",
}


AFTER: Final = "index t is token t + 1"
"""What `Record.about["alignment"]` says of a tensor (by name) that is shifted by one."""


class Place(NamedTuple):
    """Where a record was made; unknown is None, and a part is `Part()`."""

    step: int | None = None
    stage: str | None = None
    role: str | None = None
    rank: int | None = None
    part: Part = Part()

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"{self.role or 'rank'} {self.rank}"
        part = "" if self.part == Part() else f"part {self.part}"
        step = "" if self.step is None else f"step {self.step}"
        return ", ".join(word for word in (step, self.stage, rank, part) if word) or "one file"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One section of one file; small, hashable and picklable: it travels to where it is read.

    Attributes:
        section: one of SECTIONS.
        place: where it was made.
        path: the file.
        bytes: of the file; of a file of several places, of this place alone.
        key: which of several entries of the file, for the reader alone.
    """

    section: str
    place: Place
    path: Path
    bytes: int = 0
    key: str = ""


@dataclasses.dataclass(frozen=True)
class Record:
    """One entry, read.

    Attributes:
        tensors: name -> (dtype tag, shape, numpy buffer of that shape, offsets or None), as on the
            wire: bfloat16 as uint16; ragged rows are flat with int64 offsets [rows + 1]. [rows],
            [rows, tokens], packed tokens, or any other shape (a parameter). Views of a mapped file
            or of one buffer where possible.
        numbers: scalars by name; NaN and infinities stay.
        samples: sample_uid of each row, or None.
        groups: group_id of each row, or None.
        row_texts: other texts of each row by name (`run_id`, `task_id`, `uid`, ...).
        mask: which of `tensors` says what tokens of the row tensors count, or None. Token ids and
            masks themselves count wherever a row has tokens.
        about: what was said beside them, plain JSON values.
    """

    entry: Entry
    tensors: Mapping[str, WireTensor] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    samples: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None
    row_texts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    mask: str | None = None
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A file that is missing, damaged or refused; a finding, never a crash.

    Attributes:
        path: the file.
        kind: 'missing' | 'damaged' | 'refused' (not safe to load) | 'unknown' (no file of this
            format) | 'superseded' (another file of the same place is read).
        message: what is wrong and what to do.
        entry: which entry, where it was one.
    """

    path: Path
    kind: str
    message: str
    entry: Entry | None = None

    @classmethod
    def of(cls, path: Path, error: Exception, entry: Entry | None = None) -> Problem:
        """Return the problem of a file that could not be read."""
        kind = "missing" if isinstance(error, NotFound) else "damaged"
        kind = "refused" if isinstance(error, Forbidden) else kind
        return cls(path, kind, str(error), entry)


class Dump(Protocol):
    """A directory, or the kept files of a run's step, as one of the readers knows it.

    It is picklable and holds no open files, so that other processes may read its entries.
    """

    @property
    def name(self) -> str:
        """What it is, for a reader: a path, or `run@attempt:step`."""
        ...

    @property
    def kind(self) -> str:
        """Whose format: 'own', 'batch', 'nexrl', 'slime', 'areal', 'verl', 'msprobe'."""
        ...

    @property
    def entries(self) -> Sequence[Entry]:
        """Everything that can be read, ordered by step, section, rank and part."""
        ...

    @property
    def problems(self) -> Sequence[Problem]:
        """What was wrong already when the files were listed."""
        ...

    @property
    def about(self) -> Mapping[str, Any]:
        """What is known of the whole: settings, fingerprint; plain JSON values."""
        ...

    def read(self, entry: Entry) -> Record:
        """Read one entry.

        Raises:
            NotFound: the file is gone.
            InvalidTensor: it is damaged, or not of its format.
            Forbidden: it needs more than may be loaded safely; the message names what.
            StoreError: the disk refused.
        """
        ...
