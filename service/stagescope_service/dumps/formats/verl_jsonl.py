"""verl's generations: `trainer.rollout_data_dir` and `trainer.validation_data_dir`.

`{step}.jsonl`, one line per trajectory: `input`, `output`, `gts`, `score`, `step` and the other
values of the reward function. They hold texts, no tokens, and not verl's `uid`. The prompt
therefore names a sample: the group is a hash of `input`, the index counts the prompt's lines.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from stagescope_service.dumps.formats.columns import are_numbers, collect_rows
from stagescope_service.dumps.formats.json_lines import numbered, read_object_lines
from stagescope_service.dumps.formats.listing import FileFormat, ListedFile
from stagescope_service.dumps.records import DumpContents, DumpEntry, Location

_FILE: Final = re.compile(r"\d{1,18}\Z")
_NAMES: Final = {"score": "rewards"}
_TEXTS: Final = ("input", "output", "gts", "uid")
"""Columns that are texts; all others should be numbers."""


def _place_of(found: ListedFile) -> Location | None:
    if found.path.suffix != ".jsonl" or not _FILE.match(found.path.stem):
        return None
    # The directory distinguishes rollouts and validation that are opened together.
    return Location(int(found.path.stem), found.name.rpartition("/")[0] or None)


def read_entry(entry: DumpEntry) -> DumpContents:
    """Read one file; see `records.Dump.read`."""
    lines = read_object_lines(entry.path)
    rows = [*lines.rows.values()]
    is_one_step = bool(rows) and all(row.get("step") == rows[0].get("step") for row in rows)
    found = collect_rows(rows, names=_NAMES, skip=("step",) if is_one_step else ())
    for name, texts in found.texts.items():
        if name not in _TEXTS and are_numbers(texts):
            found.left_out[name] = "its numbers are texts in the file, and are kept as texts"
    found.about["samples"] = lines.naming
    groups = tuple(_hash(row.get("input")) for row in rows)
    return found.contents(
        entry,
        samples=None if lines.has_holes else numbered(groups),
        groups=groups,
        problems=lines.problems(entry),
        rows=lines.names(),
    )


def _hash(text: object) -> str:
    return hashlib.blake2b(str(text).encode(errors="surrogatepass"), digest_size=6).hexdigest()


FORMAT: Final = FileFormat(
    kind="verl",
    layout="verl's generations (STEP.jsonl with lines of input, output, score, step)",
    title="verl's generations",
    section="trajectories",
    place_of=_place_of,
    read=read_entry,
    marks=("input", "output"),
)
