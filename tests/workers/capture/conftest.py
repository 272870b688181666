from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from stagescope_wire.plan import CaptureRequest
from stagescope_wire.schema import Part
from stagescope_workers.capture.msprobe_capture import ArmedCapture, begin_capture


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
        stage: str = "actor_update",
        step: int | None = 1,
        part: Part = Part(),  # noqa: B008
        rank: int = 0,
        attempt_key: str = "first",
        run: str = "run",
        **capture: object,
    ) -> ArmedCapture:
        content = {"task": task, "level": level, task: section or {}, **(config or {})}
        request: dict[str, object] = {
            "capture_id": "c",
            "stages": [stage],
            "ranks": "all",
            "steps": "all",
            "config": content,
            "data_dir": str(self.data_dir),
            **capture,
        }
        armed = begin_capture(
            cast("CaptureRequest", request),
            run=run,
            attempt_key=attempt_key,
            stage=stage,
            step=step,
            part=part,
            role="actor",
            rank=rank,
            model=model,
            data_root=None,
        )
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
