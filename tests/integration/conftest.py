from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster for the tests of a module."""
    pytest.importorskip("ray")
    from tests.support.cluster import ray_cluster

    with ray_cluster() as found:
        yield found


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data directory: a filesystem of its own, where this user may mount one."""
    path = tmp_path_factory.mktemp("data") / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield path / "data"
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)
