from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.stores import url_of

from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.sql import SqlStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    store = SqlStore(url_of(tmp_path))
    store.open()
    yield store
    store.close()


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
