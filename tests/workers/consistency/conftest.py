from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.api import Service, service
from tests.support.engines.llama_cpp import llama_cpp
from tests.support.engines.tiny_llama import write_gguf, write_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama as transformers has it."""
    pytest.importorskip("transformers")
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in float32 for CTranslate2."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    folder = tmp_path_factory.mktemp("converted") / "float32"
    ctranslate2.converters.TransformersConverter(str(model)).convert(str(folder))
    return folder


@pytest.fixture(scope="session")
def llama_url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same served by llama.cpp, a real server on CPU."""
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    gguf = write_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    with llama_cpp(gguf) as url:
        yield url


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service in this process."""
    with service(tmp_path_factory.mktemp("home")) as started:
        yield started


@pytest.fixture
def live(running: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """The service, found by the environment."""
    assert running.tokens is not None
    monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.operate)
    return running
