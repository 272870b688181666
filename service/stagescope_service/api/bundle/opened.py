"""An open bundle: the API's app on its catalogue, without Ray; nothing can be changed."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import cast

from stagescope_service.api.bundle.contents import CATALOGUE, ROOT, TOKENIZER
from stagescope_service.api.dependencies import Commands, Reply
from stagescope_service.api.token_file import TOKEN_BYTES
from stagescope_service.api.tokens import AccessTokens
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.copying import PlacedFile, make_empty, place_files, schema_of
from stagescope_wire.errors import Forbidden, InvalidInput, NotFound


class BundleCommands:
    """`Commands` of a bundle: every one but the state's is refused."""

    def __init__(self, what: str, opens: str = "") -> None:
        self._what = what
        self.opens = opens
        """The page's address of the bundle's step; empty: not known."""

    @property
    def bundle(self) -> str:
        """The text that is shown in place of a service."""
        return self._what

    async def plan(self) -> Reply:
        """Return an empty plan."""
        return {"revision": 0, "captures": []}

    async def status(self) -> Reply:
        """Return that it is a bundle."""
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


@dataclasses.dataclass(frozen=True)
class OpenedBundle:
    """The parts of a bundle that the app needs."""

    settings: Settings
    catalogue: Catalogue
    commands: Commands
    tokens: AccessTokens


def open_unpacked(root: Path, what: str, opens: str = "") -> OpenedBundle:
    """Open a directory with a bundle.

    Args:
        root: the directory; its catalogue gets the paths of this machine.
        what: its name in messages: `the bundle x.tar.gz`.
        opens: the page's address of its step, `#/runs/...`.

    Raises:
        InvalidInput: its catalogue has another version, or declares something of its own.
        CatalogueUnavailable: it is no catalogue.
    """
    catalogue = root / CATALOGUE
    empty = root / "empty"
    empty.mkdir()
    if schema_of(catalogue) != schema_of(make_empty(empty)):
        raise InvalidInput(
            "its catalogue is not one of this version of stagescope",
            expected="the tables of this version, and nothing else",
            advice="open it with the version that made it: see manifest.json",
        )
    tokenizer = root / TOKENIZER
    settings = Settings(
        home=root / "home", data_dir=catalogue.parent, database_url=None, database_schema=None,
        host="127.0.0.1", port=0, auth=True, allowed_roots=(), allowed_hosts=(), allowed_origins=(),
        tokenizer=tokenizer if tokenizer.is_file() else None, triggers=None, keep=None,
    )  # fmt: skip
    found = Catalogue(settings.catalogue_url)
    _place(found, catalogue, root)
    tokens = AccessTokens(*(secrets.token_urlsafe(TOKEN_BYTES) for _ in range(2)))
    commands = cast("Commands", BundleCommands(what, opens))
    return OpenedBundle(settings, found, commands, tokens)


def _place(found: Catalogue, catalogue: Path, root: Path) -> None:
    """Write the paths of a bundle's files on this machine into its catalogue."""
    placed: list[PlacedFile] = []
    for row in found.placed_artifacts(ROOT):
        path = str(root / row["path"].removeprefix(ROOT))
        checksum = row["checksum"] or ""
        placed.append(PlacedFile(path, row["bytes"], checksum, artifact_id=row["artifact_id"]))
    for table in found.placed_operators(ROOT):
        path = str(root / str(table["path"]).removeprefix(ROOT))
        key = (table["incarnation"], table["work_key"], table["capture_id"])
        placed.append(PlacedFile(path, table["bytes"] or 0, table["checksum"] or "", key=key))
    found.close()
    place_files(catalogue, placed)
