"""Kept files and payload files of a step, and whether they can still be read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stagescope_service.store.artifacts import confine
from stagescope_service.store.queries.rollouts import side_by_side
from stagescope_service.store.tables import ArtifactRow
from stagescope_service.store.tensorfile import disk_errors
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models import steps as models
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.completeness import ALL_ROWS, rows_removed
from stagescope_service.views.reading.dependencies import Dependencies, RankQuery
from stagescope_service.views.reading.rows import as_row, matching
from stagescope_service.views.reading.target import Target
from stagescope_wire.errors import Forbidden, InvalidInput, StagescopeError
from stagescope_wire.keep import SECTIONS
from stagescope_wire.schema import Part

MAX_FILES: Final = 100_000


def _sort_key(row: ArtifactRow) -> tuple[str, str, int, str, float]:
    owner = (row["stage"], row["role"], row["rank"])
    return (*owner, str(Part.of_columns(row)), row["wall"])


def _file_row(row: ArtifactRow, state: str) -> models.KeptFile:
    part, sections = str(Part.of_columns(row)), [*(row["sections"] or {})]
    return as_row(models.KeptFile, row, part=part, sections=sections, state=state)


def _states(deps: Dependencies, rows: Sequence[ArtifactRow]) -> list[str]:
    """Return the state of each file; a node that does not answer is tried once."""
    unreachable: set[str] = set()
    states = []
    for row in rows:
        if row["deleted_wall"] is not None:
            states.append("deleted")
        elif row["kind"] == "ring":
            states.append("pinned")
        elif Path(row["path"]).is_file():
            states.append("kept")
        elif row["node_id"] in unreachable:
            states.append("unreachable")
        else:
            state = _remote_state(deps, row)
            if state == "unreachable":
                unreachable.add(row["node_id"])
            states.append(state)
    return states


def _remote_state(deps: Dependencies, row: ArtifactRow) -> str:
    try:
        deps.commands.read_artifact(node_id=row["node_id"], path=row["path"], offset=0, size=1)
    except StagescopeError as error:
        return "missing" if error.code == "not_found" else "unreachable"
    return "kept"


_PIECE: Final = 4 << 20

KEEP_ADVICE: Final = (
    "keep it: init(keep={'what': ['trajectories', 'is_loss'], 'every_n_steps': 10}), or "
    "stagescope capture --keep trajectories; the ring holds the newest steps, and pinned ones"
)

KINDS: Final = ("kept", "ring")
"""Kinds of artifacts, preferred ones first."""


def payload_artifacts(deps: Dependencies, target: Target, step: int) -> list[ArtifactRow]:
    """Return a step's payload files, kept ones first, and those of rollouts that it consumed.

    A consumed rollout that has no step of its own is listed with step None. Payloads that a newer
    incarnation of their rank repeated are left out, unless the step consumed them.
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


def local_file(deps: Dependencies, row: ArtifactRow, copies: Path) -> Path:
    """Return a local file with an artifact's content: the artifact itself, or a fetched copy.

    Args:
        deps: fetch from other nodes.
        row: of the catalogue's artifacts.
        copies: the caller's directory for fetched copies.

    Raises:
        Unreachable: the node is gone, or unknown.
        NotFound: the file is gone.
    """
    # A file that is not on this machine, or not readable here, is asked for at its node.
    with contextlib.suppress(OSError, Forbidden):
        path = confine(row["path"], deps.settings.roots)
        if path.stat().st_size == row["bytes"]:
            return path
    copy = copies / f"{row['kind']}-{len(list(copies.iterdir()))}.safetensors"
    read = functools.partial(deps.commands.read_artifact, node_id=row["node_id"], path=row["path"])
    piece = read(offset=0, size=_PIECE)  # a file that is gone leaves no empty copy
    with disk_errors(copy), copy.open("wb") as file:
        while piece:
            file.write(piece)
            piece = read(offset=file.tell(), size=_PIECE)
    return copy


def kept(
    deps: Dependencies, target: Target, page: Page, ranks: RankQuery, section: str | None = None
) -> JsonObject:
    """List the files that are kept of the step, by stage, role, rank and part."""
    if section is not None and section not in SECTIONS:
        raise InvalidInput(f"section is {section!r:.100}", expected=f"one of {', '.join(SECTIONS)}")
    step, pinned = target.step_number, bool(target.step_row["pinned"])
    every = deps.catalogue.artifacts(
        target.attempt_id, step, kind="kept", deleted=None, limit=MAX_FILES
    )
    if pinned:
        every += deps.catalogue.artifacts(target.attempt_id, step, kind="ring", limit=MAX_FILES)
    rows = matching(every, f"step {step}", **ranks)
    if section is not None:
        rows = [row for row in rows if section in (row["sections"] or {})]
    rows.sort(key=_sort_key)
    existing = [row for row in rows if row["deleted_wall"] is None]
    shown = rows[page.offset : page.offset + page.limit]
    files = [_file_row(row, state) for row, state in zip(shown, _states(deps, shown), strict=True)]
    return {
        **target.heading(),
        "pinned": pinned,
        "files": len(existing),
        "bytes": sum(row["bytes"] for row in existing),
        "gap": rows_removed(target.step_row),
        **page.answer(files, more=len(rows) > page.offset + page.limit),
    }
