from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_decoder import begin, forward_backward, token_ids

from stagescope_workers.capture.msprobe_capture import ArmedCapture

_WORK = ("run", "attempt_key", "stage", "step", "part", "rank")


class Captures:
    """Begins captures with defaults that fit a test."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.last: dict[str, Any] = {}

    def begin(
        self,
        model: object,
        *,
        task: str = "statistics",
        level: str = "L1",
        section: Mapping[str, object] | None = None,
        config: Mapping[str, object] | None = None,
        **fields: Any,
    ) -> ArmedCapture:
        """Begin a capture; `fields` are of its work, such as `step`, and of its request."""
        content = {"task": task, "level": level, task: section or {}, **(config or {})}
        work = {name: fields.pop(name) for name in _WORK if name in fields}
        scope = {"stages": "all", "ranks": "all", "steps": "all"}
        request = {**scope, "config": content, "data_dir": str(self.data_dir), **fields}
        armed: ArmedCapture | None = begin(request, model, **{"attempt_key": "first", **work})
        assert armed is not None
        return armed

    @contextlib.contextmanager
    def around(self, model: object, **arguments: Any) -> Iterator[ArmedCapture]:
        armed = self.begin(model, **arguments)
        try:
            yield armed
        except BaseException as error:
            self.last = armed.finish(error)
            raise
        self.last = armed.finish(None)

    def run(self, model: Any, *, state: str = "complete", **arguments: Any) -> None:
        """Capture a forward and a backward pass, which ends in `state`."""
        with self.around(model, **arguments):
            forward_backward(model, token_ids())
        assert self.last["state"] == state, self.last

    def entries(self) -> dict[str, object]:
        """What dump.json of the last capture holds."""
        text = (Path(self.last["path"]) / "dump.json").read_text(encoding="utf-8")
        data: dict[str, object] = json.loads(text)["data"]
        return data

    def done(self) -> dict[str, Any]:
        text = (Path(self.last["path"]) / "DONE.json").read_text(encoding="utf-8")
        content: dict[str, object] = json.loads(text)
        return content


@pytest.fixture
def captures(tmp_path: Path) -> Iterator[Captures]:
    made = Captures(tmp_path / "dumps")
    yield made
    from stagescope_workers.capture.msprobe_capture import _busy

    assert not _busy.locked(), "a capture was left open"
