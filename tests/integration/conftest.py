from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support import documented


@pytest.fixture(autouse=True)
def answers_as_documented(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hold what a real service answers in a test to the API's document."""
    answers: list[documented.Answered] = []
    send = httpx.Client.send

    def sent(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        response = send(client, request, **options)
        media_type = response.headers.get("content-type", "").partition(";")[0]
        if documented.VALIDATORS is not None and media_type.endswith("json") and response.is_closed:
            said = response.content
            answers.append(
                documented.Answered(
                    request.method, request.url.path, response.status_code, media_type, said
                )
            )
        return response

    monkeypatch.setattr(httpx.Client, "send", sent)
    yield
    documented.check(answers)


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
