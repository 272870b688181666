from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.engines.tiny_llama import write_llama

from stagescope import cli
from stagescope_workers.bisect.command import bisect


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama as transformers has it."""
    pytest.importorskip("transformers")
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No service; the command is found without an installed package."""
    for name in ("STAGESCOPE_URL", "STAGESCOPE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(cli.main.commands, "bisect", bisect)
