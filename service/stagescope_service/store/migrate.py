"""Migration of a catalogue to this version's tables, inside one transaction."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from stagescope.wire.errors import CatalogueUnavailable

HEAD: Final = "0011"
"""The newest revision in migrations/versions; a test keeps the two equal."""

_FOLDER: Final = Path(__file__).parent / "migrations"
_ALEMBIC: Final = threading.Lock()
"""Alembic's `op` and `context` are of the process: two upgrades at once, as of two bundles that are
packed, would run in each other's catalogue."""


def current(connection: sa.Connection) -> str | None:
    """Return the revision of a catalogue; None for an empty database."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()


def upgrade(connection: sa.Connection) -> None:
    """Create or upgrade the tables; does nothing on a catalogue of this version.

    Args:
        connection: inside a transaction that the caller commits. Its lock serializes services that
            start at the same time.

    Raises:
        CatalogueUnavailable: an unknown revision, written by a later package or by one before the
            first release.
    """
    revision = current(connection)
    if revision == HEAD:
        return
    # Imported here: the import takes longer than opening a catalogue that is up to date.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    revisions = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in revisions:
        raise CatalogueUnavailable(
            f"the catalogue is of revision {revision!r}, which this package does not know",
            expected=f"one of {', '.join(sorted(revisions))}",
            advice="install the stagescope that wrote it, or give another catalogue",
        )
    with _ALEMBIC:
        command.upgrade(config, HEAD)
