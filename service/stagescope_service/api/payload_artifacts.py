"""The payload files of a step: kept ones, and what the rings still hold."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stagescope.wire.errors import Forbidden, Unreachable
from stagescope_service.api.completeness import ALL_ROWS
from stagescope_service.api.dependencies import Dependencies, Row
from stagescope_service.api.target import Target
from stagescope_service.store.artifacts import confine
from stagescope_service.store.queries.rollouts import side_by_side
from stagescope_service.store.tensorfile import disk_errors

_PIECE: Final = 4 << 20
KEEP_ADVICE: Final = (
    "keep it: init(keep={'what': ['trajectories', 'is_loss'], 'every_n_steps': 10}), or "
    "stagescope capture --keep trajectories; the ring holds the newest steps, and pinned ones"
)
KINDS: Final = ("kept", "ring")
"""Kinds of artifacts, those that are preferred first."""


def payload_artifacts(deps: Dependencies, target: Target, step: int) -> list[Row]:
    """Return a step's payload files, kept ones first, and those of rollouts that it consumed.

    A rollout of no step stands in it with step None. What a newer incarnation of its rank did
    again is left out, but for rollouts that the step consumed.
    """
    rows = deps.catalogue.artifacts(target.attempt_id, step, kind=KINDS, limit=ALL_ROWS)
    beside = side_by_side(deps.catalogue.attempts(target.run), target.attempt_id)
    consumed = deps.catalogue.payloads(beside, consumed_step=step, limit=ALL_ROWS)
    replaced = deps.catalogue.replaced(target.attempt_id, step)
    replaced -= {(row["incarnation"], row["seq"]) for row in consumed}
    rows = [row for row in rows if (row["incarnation"], row["seq"]) not in replaced]
    if consumed:
        keys = {(row["incarnation"], row["seq"]) for row in consumed if row["step"] is None}
        more = deps.catalogue.artifacts(
            incarnation=sorted({key[0] for key in keys}), kind=KINDS, limit=ALL_ROWS
        )
        rows += [row for row in more if (row["incarnation"], row["seq"]) in keys]
    return sorted(rows, key=lambda row: (KINDS.index(row["kind"]), row["artifact_id"]))


def local_file(deps: Dependencies, row: Row, copies: Path) -> Path:
    """Return a local file with an artifact's content: in its place, or fetched from its node.

    Args:
        desk: the collaborators.
        row: of the catalogue's artifacts.
        copies: a directory of the caller's own, for what is fetched.

    Raises:
        Unreachable: the node is gone, or not known.
        NotFound: the file is gone.
    """
    try:
        here = confine(row["path"], deps.settings.roots)
        if here.stat().st_size == row["bytes"]:
            return here
    except (OSError, Forbidden):
        pass
    if row["node_id"] is None:
        raise Unreachable(f"{row['path']} is gone, and its node is not known")
    copy = copies / f"{row['kind']}-{len(list(copies.iterdir()))}.safetensors"
    with disk_errors(copy), copy.open("wb") as file:
        while piece := deps.commands.read_artifact(
            node_id=row["node_id"], path=row["path"], offset=file.tell(), size=_PIECE
        ):
            file.write(piece)
    return copy
