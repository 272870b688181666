"""Opens a bundle for the app: its catalogue without Ray; nothing can be changed."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path
from typing import cast

from stagescope_service.http.access_token_file import TOKEN_BYTES
from stagescope_service.http.access_tokens import AccessTokens
from stagescope_service.report.bundle.contents import CATALOGUE, ROOT, TOKENIZER
from stagescope_service.report.bundle.making import BundleCommands
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.copying import PlacedFile, make_empty, place_files, schema_of
from stagescope_service.views.reading.dependencies import Commands
from stagescope_wire.errors import InvalidInput


@dataclasses.dataclass(frozen=True)
class OpenedBundle:
    """Parts of a bundle that the app needs."""

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
        InvalidInput: its catalogue is of another version, or declares something of its own.
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
    """Write where the files of a bundle lie on this machine into its catalogue."""
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
