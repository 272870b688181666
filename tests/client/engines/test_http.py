"""A key that is never shown, bounded answers, deadlines, and the environment's addresses."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from pathlib import Path

import pytest
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from tests.support.answering import serving
from tests.support.engines.servers import EngineServer

from stagescope_wire.engines import Sampling, connect, http
from stagescope_wire.engines.http import EngineHttp, engine_key, engine_url
from stagescope_wire.engines.registry import (
    addresses_in,
    addresses_in_environment,
    addresses_in_log,
    check_engine,
    engine_name,
)
from stagescope_wire.errors import EngineError, InvalidInput, NotFound, Unauthorized

KEY = "a-key-of-the-tests"


def test_a_key_from_a_file_reaches_the_engine_and_no_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    server = EngineServer("vllm", key=KEY)
    with serving(server.app) as url:
        engine = connect(url, key_file=file)
        assert engine.generate([[1, 2]], Sampling(max_tokens=1))
        assert set(server.authorization) == {f"Bearer {KEY}"}
        shown = f"{engine!r} {engine.info!r} {EngineHttp(url, key=KEY)!r}"
        engine.close()
        monkeypatch.setenv(http.KEY_VARIABLE, "another-key")
        with pytest.raises(EngineError) as refused:
            connect(url)
    assert http.KEY_VARIABLE in str(refused.value)
    output = f"{shown} {refused.value} {caplog.text}"
    assert KEY not in output
    assert "another-key" not in output


def test_an_answer_that_repeats_the_key_is_shown_without_it() -> None:
    assert KEY not in EngineHttp("http://h:1", key=KEY).shown(f"bad header {KEY}\x1b[3".encode())
    assert "\x1b" not in EngineHttp("http://h:1").shown(b"\x1b[31mred")


def test_where_a_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (http.KEY_VARIABLE, http.KEY_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert engine_key() is None
    monkeypatch.setenv(http.KEY_VARIABLE, "from-the-environment")
    assert engine_key() == "from-the-environment"
    file = tmp_path / "key"
    file.write_text("from-a-file")
    monkeypatch.setenv(http.KEY_FILE_VARIABLE, str(file))
    assert engine_key() == "from-a-file"
    with pytest.raises(Unauthorized):
        engine_key(tmp_path / "absent")


def test_a_redirect_is_not_followed_with_the_key() -> None:
    seen: list[str] = []
    app = FastAPI()

    @app.get("/{path:path}")
    def answer(path: str) -> Response:
        seen.append(path)
        return Response(status_code=302, headers={"location": "/stolen"})

    with serving(app) as url, pytest.raises(EngineError, match="302"):
        connect(url)
    assert "stolen" not in seen


def test_an_endless_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BYTES", 1 << 16)
    app = FastAPI()

    @app.get("/{path:path}")
    def answer(path: str) -> Response:
        return StreamingResponse(b"x" * 4096 for _ in range(1 << 20))

    with serving(app) as url, pytest.raises(EngineError, match="returned more than"):
        EngineHttp(url).get("/v1/models")


def test_an_answer_that_drips_meets_the_deadline() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        with contextlib.suppress(OSError), connection:
            while not over.wait(0.02):
                connection.sendall(b" ")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(EngineError, match=r"within 0\.3 s"):
            EngineHttp(url, timeout=0.3).get("/v1/models")
    finally:
        over.set()
        thread.join(10)
        listener.close()


def test_urls_are_made_one() -> None:
    assert engine_url("127.0.0.1:20082") == "http://127.0.0.1:20082"
    assert engine_url("http://h:1/v1/") == "http://h:1"
    assert engine_name("http://[::1]:8000") == "-1-8000"
    assert engine_name("https://h.example") == "h.example-443"


def test_addresses_that_a_launcher_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "LLM inference server launched at: AREAL_LLM_SERVER_ADDRS="
    log = tmp_path / "llm_server.log"
    log.write_text(f"{line}10.0.0.1:1\nnoise\n\x1b[32m{line}127.0.0.1:20082,10.0.0.4:9\x1b[0m\n")
    assert addresses_in_log(log) == ["http://127.0.0.1:20082", "http://10.0.0.4:9"]
    assert addresses_in(f'export {line.split(": ")[1]}"127.0.0.1:7"') == ["http://127.0.0.1:7"]
    (tmp_path / "empty").write_text("not yet")
    with pytest.raises(NotFound, match="once its servers are up"):
        addresses_in_log(tmp_path / "empty")
    with pytest.raises(InvalidInput):
        addresses_in_log(tmp_path)
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)
    with pytest.raises(NotFound, match="is not set"):
        addresses_in_environment()
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "127.0.0.1:20082")
    assert addresses_in_environment() == ["http://127.0.0.1:20082"]


@pytest.mark.parametrize(
    "output",
    [
        {}, {"url": 7}, {"url": "file:///etc/passwd"}, {"url": "http://u:p@h:1"},
        {"url": "http://h:1", "name": "a/b"}, {"url": "http://h:1", "name": ".."},
        {"url": "http://h:1", "run": 7}, {"url": "http://h:1", "key": "secret"},
        {"url": "http://h:1", "model": "x" * 501}, {"url": "http://h:1", "settings": []},
    ],
)  # fmt: skip
def test_a_registration_that_cannot_be(output: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        check_engine(output)
