"""The exact data of a step, to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stagescope.answers import Record
from stagescope.batch import Batch
from stagescope.cli.questions import ATTEMPT, MEASURED, RUN, question, words
from stagescope.errors import NotFound
from stagescope.session import Session, StepWord


class _Shown(Record):
    """What a batch holds; its arrays are in the file."""

    __slots__ = ("_batch",)

    def __init__(self, batch: Batch, path: Path | None) -> None:
        tensors = {n: [t.dtype, list(t.values.shape)] for n, t in batch.tensors.items()}
        fields: dict[str, Any] = {
            **batch.source,
            "rows": batch.rows,
            "tensors": tensors,
            "strings": [*batch.strings],
            "stages": {stage: len(batch.parts_of(stage)) for stage in batch.stages()},
            "gaps": [{"kind": gap.kind, "message": gap.message} for gap in batch.gaps],
            "output": None if path is None else str(path),
        }
        super().__init__(fields, title=batch.heading)
        self._batch = batch

    def lines(self, *, width: int = 80) -> list[str]:
        """Return what the batch itself says, and where it was written."""
        output = self["output"]
        written = [] if output is None else [f"written to {output}"]
        return [*self._batch.lines(width=width), *written]


def _words(_: click.Context, __: click.Parameter, value: str | None) -> list[str] | None:
    return None if value is None else words(value)


@question(
    MEASURED,
    RUN,
    ATTEMPT,
    click.option("--output", "-o", type=click.Path(path_type=Path), help="Write it here."),
    click.option("--names", callback=_words, metavar="A,B", help="Only these tensors."),
    click.option("--stages", callback=_words, metavar="A,B", help="Only these stages."),
)
def batch(session: Session, step: StepWord, output: Path | None, **options: Any) -> Record:
    """A step's exact data, as one safetensors file (`stagescope.Batch.load` reads it)."""
    place = {"run": options.pop("run"), "attempt": options.pop("attempt")}
    try:
        found = session.step(step, **place)
    except NotFound:
        if step != "measured":
            raise
        found = session.step("latest", **place)  # its tensors are there without numbers, too
    if output is None:
        return _Shown(found.batch(**options), None)
    return _Shown(found.save_batch(output, **options), output)
