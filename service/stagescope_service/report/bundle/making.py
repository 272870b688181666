"""Makes the archive of a bundle."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, cast

from stagescope_service.report.bundle.archive import write_archive
from stagescope_service.report.bundle.contents import CATALOGUE, Bundle, collect, finish
from stagescope_service.report.rendering import as_html, as_markdown, make_report
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.tensorfile import disk_errors
from stagescope_service.views.reading.dependencies import Commands, Dependencies, Reply
from stagescope_service.views.reading.target import Target
from stagescope_wire.errors import Forbidden, NotFound, StoreError
from stagescope_wire.names import safe_name

MIN_ROOM: Final = 16 << 20
"""Least free bytes of the disk for a bundle."""


class BundleCommands:
    """`Commands` of a bundle: every one but the state's is refused."""

    def __init__(self, what: str, opens: str = "") -> None:
        self._what = what
        self.opens = opens
        """The page's address of the step that the bundle is of; empty: not known."""

    @property
    def bundle(self) -> str:
        """Name of the bundle that the page shows in place of a service."""
        return self._what

    async def plan(self) -> Reply:
        """Return an empty plan."""
        return {"revision": 0, "captures": []}

    async def status(self) -> Reply:
        """Return the state, which says that this is a bundle."""
        return {"not_ready": f"this is {self._what}, which is read only: nothing reports to it"}

    def read_artifact(self, *, node_id: str, path: str, offset: int, size: int) -> bytes:
        """Refuse: there are no nodes.

        Raises:
            NotFound: always.
        """
        raise NotFound(
            f"{path} is not in {self._what}",
            advice="manifest.json lists what was left out, and why",
        )

    def __getattr__(self, name: str) -> Callable[..., Coroutine[object, object, Reply]]:
        """Return a call that is refused."""

        async def refuse(**arguments: object) -> Reply:
            raise Forbidden(
                f"this is {self._what}, which is read only",
                expected="a request that changes nothing",
                advice="ask the service that made it",
            )

        return refuse


class MadeBundle(NamedTuple):
    """An archive; its file has no name any more, so that it vanishes when it is closed."""

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
        # Files and archive lie side by side, and others need the disk, too.
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

    So they are redacted as these are, and say no more than the bundle can show.
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
