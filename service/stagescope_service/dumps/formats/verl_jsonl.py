"""verl's generations: `trainer.rollout_data_dir` and `trainer.validation_data_dir`.

`{step}.jsonl`, one line per trajectory: `input`, `output`, `gts`, `score`, `step` and the other
values of the reward function. They hold texts, no tokens, and not verl's `uid`. The prompt
therefore names a sample: the group is a hash of `input`, the index counts the prompt's lines.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stagescope_service.dumps.formats.columns import are_numbers, collect_rows, odd_problem
from stagescope_service.dumps.formats.content import damage_of, first_values
from stagescope_service.dumps.formats.json_lines import UNNAMED, read_object_lines
from stagescope_service.dumps.formats.listing import (
    FileDump,
    ListedFile,
    file_dump,
    files_of,
    unknown_file,
)
from stagescope_service.dumps.records import DumpContents, DumpEntry, DumpProblem, Location
from stagescope_wire.errors import NotFound

KIND: Final = "verl"

_FILE: Final = re.compile(r"\d{1,18}\Z")
_NAMES: Final = {"score": "rewards"}
_TEXTS: Final = ("input", "output", "gts", "uid")
"""Columns that are texts; all others should be numbers."""


def is_verl(found: ListedFile) -> bool:
    """Return whether a file is verl's, by its name and its first line."""
    if found.path.suffix != ".jsonl" or not _FILE.match(found.path.stem):
        return False
    values = first_values(found.path)
    return "input" in values and "output" in values


def holds_verl(found: Sequence[ListedFile]) -> bool:
    """Return whether any of the files is verl's."""
    return any(map(is_verl, found))


def open_verl(path: Path, *, step: int | None = None) -> FileDump:
    """List a file of verl's generations, or a directory of them.

    Args:
        path: the file or directory.
        step: only this step.

    Raises:
        NotFound: no such path, or no generations of verl's in it.
        TooLarge: more files than a dump has.
        StoreError: the disk refused.
    """
    found, problems = files_of(path)
    generations = [each for each in found if is_verl(each)]
    problems += [
        problem
        for each in found
        if each not in generations
        for problem in [_problem_of(each)]
        if problem.entry is None or step in (None, problem.entry.location.step)
    ]
    if not generations:
        raise NotFound(
            f"{path} holds no generations of verl's",
            expected="STEP.jsonl with lines of input, output, score, step",
        )
    entries = map(_entry_of, generations)
    return file_dump(path, KIND, entries, problems, read_entry, step=step)


def _entry_of(found: ListedFile) -> DumpEntry:
    location = Location(int(found.path.stem), _stage(found))
    return DumpEntry("trajectories", location, found.path, found.bytes)


def _problem_of(found: ListedFile) -> DumpProblem:
    """Return the problem of a file whose first line is not verl's."""
    is_named = found.path.suffix == ".jsonl" and _FILE.match(found.path.stem)
    if is_named and (error := damage_of(found.path)) is not None:
        return DumpProblem.from_error(found.path, error, _entry_of(found))
    return unknown_file(found, "verl's generations")


def _stage(found: ListedFile) -> str | None:
    """Return a name that distinguishes directories opened together (rollouts and validation)."""
    return found.name.rpartition("/")[0] or None


def read_entry(entry: DumpEntry) -> DumpContents:
    """Read one file; see `records.Dump.read`."""
    lines = read_object_lines(entry.path)
    rows = [*lines.rows.values()]
    is_one_step = bool(rows) and all(row.get("step") == rows[0].get("step") for row in rows)
    found = collect_rows(rows, names=_NAMES, skip=("step",) if is_one_step else ())
    for name, texts in found.texts.items():
        if name not in _TEXTS and are_numbers(texts):
            found.left_out[name] = "its numbers are texts in the file, and are kept as texts"
    found.about["samples"] = (
        UNNAMED
        if lines.has_holes
        else "named by a hash of their prompt and their position among its answers"
    )
    groups = tuple(_hash(row.get("input")) for row in rows)
    seen: Counter[str] = Counter()
    samples: list[str] = []
    for group in groups:
        samples.append(f"{group}_{seen[group]}")
        seen[group] += 1
    problems = [*lines.problems(entry), *odd_problem(found, entry, lines.names())]
    return DumpContents(
        entry, found.tensors, {}, None if lines.has_holes else tuple(samples), groups, found.texts,
        about=found.metadata(), problems=problems,
    )  # fmt: skip


def _hash(text: object) -> str:
    return hashlib.blake2b(str(text).encode(errors="surrogatepass"), digest_size=6).hexdigest()
