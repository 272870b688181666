"""The route of bundles, and how one is made."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Final, NamedTuple, cast

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from stagescope_service.api.bundle.archive import write_archive
from stagescope_service.api.bundle.contents import CATALOGUE, Bundle, collect, finish
from stagescope_service.api.bundle.opened import BundleCommands
from stagescope_service.api.dependencies import (
    AttemptNumber,
    Commands,
    Dependencies,
    Deps,
    RunPath,
)
from stagescope_service.api.report.routes import as_html, as_markdown, make_report
from stagescope_service.api.target import Target
from stagescope_service.api.tokens import AccessTokens
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.tensorfile import disk_errors
from stagescope_wire.errors import StoreError
from stagescope_wire.names import safe_name
from stagescope_wire.schema import STEP_BOUND

router = APIRouter(tags=["runs"])

MEDIA_TYPE: Final = "application/gzip"
DEFAULT_BYTES: Final = 2 << 30
MIN_ROOM: Final = 16 << 20
"""Least bytes that a bundle needs: less is no disk to work on."""
_CHUNK: Final = 1 << 20
_FILE: Final = {"type": "string", "format": "binary", "description": "A tar.gz file."}


class BundleQuery(NamedTuple):
    """The query parameters of a bundle."""

    step: int
    attempt: int | None
    tensors: bool
    limit_bytes: int


async def bundle_query(
    step: Annotated[int, Query(ge=0, lt=STEP_BOUND, description="The trainer's step.")],
    attempt: AttemptNumber = None,
    tensors: Annotated[
        bool,
        Query(description="With the step's tensors: log-probs, and prompts and responses as ids."),
    ] = True,
    limit_bytes: Annotated[
        int,
        Query(ge=1 << 20, le=1 << 40, description="Most bytes of its files; others are named."),
    ] = DEFAULT_BYTES,
) -> BundleQuery:
    """Return the requested bundle."""
    return BundleQuery(step, attempt, tensors, limit_bytes)


@router.get(
    "/runs/{run}/bundle",
    response_class=StreamingResponse,
    responses={200: {"content": {MEDIA_TYPE: {"schema": _FILE}}}},
)
async def bundle(
    request: Request,
    deps: Deps,
    run: RunPath,
    query: Annotated[BundleQuery, Depends(bundle_query)],
) -> StreamingResponse:
    """Return a step as one archive without secrets, for a look at it elsewhere.

    It holds the run's rows of the catalogue, and the step's tensors, operators, findings, stacks,
    fingerprint and report. It holds logs that the training's variables name inside the allowed
    roots. The file `manifest.json` lists every file with its checksum, and what was left out, and
    why. The command `stagescope attach FILE` opens it, without a service.
    """
    target = deps.finder.step(run, query.attempt, query.step)
    tokens: AccessTokens | None = request.app.state.tokens
    secrets = () if tokens is None else (tokens.read, tokens.operate)
    made = await deps.long_computations.run(
        make_bundle, deps, target, tensors=query.tensors, limit=query.limit_bytes, secrets=secrets
    )
    headers = {
        "content-length": str(made.bytes),
        "content-disposition": f'attachment; filename="{made.name}"',
    }
    return StreamingResponse(_chunks(made.file), media_type=MEDIA_TYPE, headers=headers)


class MadeBundle(NamedTuple):
    """An archive; its file has no name any more, so it vanishes when it is closed."""

    file: BinaryIO
    bytes: int
    name: str


def make_bundle(
    deps: Dependencies, target: Target, *, tensors: bool, limit: int, secrets: tuple[str, ...]
) -> MadeBundle:
    """Make the archive of a step.

    Raises:
        StoreError: the disk has no room for it.
    """
    directory = deps.settings.data_path / "copies"
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        # Files and archive are both on the disk, which others need, too.
        room = (shutil.disk_usage(directory).free - deps.settings.reserve_bytes) // 2
        if room < MIN_ROOM:
            raise StoreError(
                f"{directory} has no room for a bundle", advice="free space on the disk of data_dir"
            )
        with tempfile.TemporaryDirectory(prefix="bundle-", dir=directory) as temporary:
            root, path = Path(temporary) / "bundle", Path(temporary) / "bundle.tar.gz"
            root.mkdir()
            made = collect(
                deps, target, root, limit=min(limit, room), tensors=tensors, secrets=secrets
            )
            _add_reports(deps, made)
            finish(made, deps.clock())
            size = write_archive(root, path)
            name = f"{safe_name(target.run)}-{target.number}-step{target.step_number}.tar.gz"
            return MadeBundle(path.open("rb"), size, name)


def _add_reports(deps: Dependencies, bundle: Bundle) -> None:
    """Add the reports of run and step, made from the bundle's own rows and files.

    So they are redacted like these, and say no more than the bundle can show.
    """
    catalogue = bundle.root / CATALOGUE
    settings = deps.settings.model_copy(
        update={
            "data_dir": catalogue.parent,
            "database_url": None,
            "database_schema": None,
            "allowed_roots": (),
        }
    )
    found = Catalogue(settings.catalogue_url)
    try:
        own = Dependencies.build(
            catalogue=found, commands=cast("Commands", BundleCommands("a bundle")),
            settings=settings, clock=deps.clock,
        )  # fmt: skip
        target = bundle.target
        for name, step in (("report-step", target.step_number), ("report-run", None)):
            attempt = None if step is None else target.number
            report = make_report(own, target.run, attempt=attempt, step=step)
            for ending, text in (("html", as_html(report)), ("md", as_markdown(report))):
                path = bundle.root / f"{name}.{ending}"
                path.write_text(text, "utf-8")
                bundle.list_file(path.name, "report")
    finally:
        found.close()
    shutil.rmtree(catalogue.parent / "copies", ignore_errors=True)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(_CHUNK):
            yield piece
