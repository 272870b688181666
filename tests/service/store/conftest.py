from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from tests.support.stores import DATABASES, database, postgresql, url_of

from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.sql import SqlStore


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of a PostgreSQL server, for `database`."""
    with postgresql() as url:
        yield url


@pytest.fixture(scope="session")
def catalogue_template(server: str) -> Iterator[str]:
    """The name of an empty catalogue on it, of which others are copies: migrations take longer."""
    with database(server) as url:
        store = SqlStore(url)
        store.open()
        store.close()
        yield str(sa.engine.make_url(url).database)


@pytest.fixture(params=DATABASES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    """A new catalogue of each database that it may be in; `ON_SQLITE` leaves the others out."""
    with contextlib.ExitStack() as stack:
        url = url_of(tmp_path)
        if request.param == "postgresql":
            template = request.getfixturevalue("catalogue_template")
            url = stack.enter_context(database(request.getfixturevalue("server"), template))
        store = SqlStore(url)
        store.open()
        stack.callback(store.close)
        yield store


@pytest.fixture
def catalogue(store: SqlStore) -> Iterator[Catalogue]:
    catalogue = Catalogue(store.url)
    yield catalogue
    catalogue.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a filesystem")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
