"""Captures with msprobe around a stage of a training process.

`begin_capture` arms one where a stage begins. `ArmedCapture.finish` ends it where the stage ends,
also by an exception, and returns the fields of the DUMP event with the result. Nothing here
raises unless the capture is `strict`: not msprobe, not a full disk, not a wrong configuration.
Neither msprobe nor torch is imported before the first capture is armed.

One process collects one stage at a time: a capture that would overlap another is `skipped`.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

from stagescope_wire.errors import CaptureError, Conflict, InvalidPlan, StagescopeError
from stagescope_wire.nonfinite import Json
from stagescope_wire.plan import CaptureLimits, CaptureRequest
from stagescope_wire.schema import Part
from stagescope_workers.capture import capture_estimate, dump_paths
from stagescope_workers.capture.capture_estimate import Estimate, ModelSize
from stagescope_workers.capture.msprobe_config import (
    MsprobeConfig,
    check_baseline,
    resolve_config,
    with_baseline,
)
from stagescope_workers.capture.msprobe_session import LimitMonitor, MsprobeSession

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ArmedCapture", "begin_capture", "save"]

_log = logging.getLogger(__name__)

_NEEDS_MODEL: Final = ("L0", "mix")

# msprobe is a singleton of the process, so these are too.
_busy = threading.Lock()
_session = MsprobeSession()
_logged: set[str] = set()


def save(variable: object, name: str, save_backward: bool = True) -> None:
    """Save a value, and its gradient, in a capture of level debug; otherwise do nothing.

    Args:
        variable: a tensor or number, or lists and dicts of them.
        name: its name in debug.json; a counter is appended for each call.
        save_backward: whether the gradient is saved when it is computed inside the stage.
    """
    _session.save(variable, name, save_backward)


class _Running(NamedTuple):
    config: MsprobeConfig
    files: Path
    monitor: LimitMonitor


class ArmedCapture:
    """A capture that was begun: running, or already skipped or failed."""

    def __init__(
        self, capture: CaptureRequest, work: CapturedWork, data_root: str | None, tokens: int | None
    ) -> None:
        self._capture = capture
        self._work = work
        self._data_root = data_root
        self._tokens = tokens
        self._limits: CaptureLimits = capture.get("limits") or {}
        self._strict = bool(capture.get("strict"))
        self._running: _Running | None = None
        self._is_finished = False
        self._began = time.monotonic()
        self._fields: dict[str, Json] = {
            "capture_id": capture.get("capture_id"),
            "path": None,
            "state": "armed",
            "bytes": 0,
            "files": 0,
            "seconds": 0.0,
            "error": None,
            "task": None,
            "level": None,
            "overrides": [],
            "estimate": None,
        }
        if notes := capture.get("notes"):
            self._fields["notes"] = list(notes)

    @property
    def collecting(self) -> bool:
        """Whether msprobe is collecting for this capture."""
        return self._running is not None and not self._is_finished

    @property
    def path(self) -> str | None:
        """The directory of this rank's files, None where none was made."""
        path: str | None = self._fields["path"]
        return path

    def finish(self, exc: BaseException | None) -> dict[str, Json]:
        """End the capture and return the fields of its DUMP event; a second call returns the same.

        Args:
            exc: what the stage raised, or None. A dump that it cut short is written, with the
                state `truncated`.

        Raises:
            CaptureError: strict, and msprobe failed; never when the stage itself raised.
        """
        if not self._is_finished:
            if self._running is not None:
                self._fields.update(self._end(self._running, exc))
            self._is_finished = True
            if self._fields["state"] != "complete":
                _log_once(self._fields)
            if self._strict and exc is None and self._fields["state"] == "failed":
                raise CaptureError(f"the capture failed: {self._fields['error']}")
        return dict(self._fields)

    def skip(self, reason: str) -> None:
        """End the capture before it collects anything."""
        self._fields.update(state="skipped", error=reason[:2000])

    def arm(self, model: object) -> None:
        """Start msprobe for this capture, whose caller holds the process's one place for it.

        Raises:
            InvalidPlan, CaptureError: strict, and it cannot be carried out.
        """
        try:
            self._running = self._start(model)
        except Conflict as error:
            self.skip(str(error))
        except Exception as error:
            is_ours = isinstance(error, StagescopeError)
            text = str(error) if is_ours else f"{type(error).__name__}: {error}"
            self._fields.update(state="failed", error=text[:2000])
            if self._strict and is_ours:
                raise
            if self._strict:
                raise CaptureError(f"the capture could not be armed: {error}") from error
        finally:
            if self._running is None:
                _busy.release()

    def _start(self, model: object) -> _Running | None:
        """Start msprobe; None where the dump would be too large, with the reason in the fields."""
        work, rank = self._work, self._work["rank"]
        capture = with_baseline(
            self._capture,
            stage=work["stage"],
            part=str(work["part"]),
            role=work["role"],
            rank=rank,
        )
        config = resolve_config(capture, dump_path="", step=work["step"])
        self._fields.update(task=config.task, level=config.level)
        if config.level in _NEEDS_MODEL and (model is None or model in ([], ())):
            raise InvalidPlan(
                f"level {config.level!r} needs the model of stage {work['stage']!r}",
                expected="probe.stage(..., model=model), or level 'L1'",
            )
        check_baseline(config, rank)
        target = self._directory()
        cost = self._cost(model, config)
        reserve = capture_estimate.disk_reserve(self._limits)
        too_large = capture_estimate.too_large(
            cost, config, dump_paths.free_bytes(target.parent), reserve
        )
        if too_large and not capture.get("force"):
            self.skip(too_large)
            return None
        dump_path, files = dump_paths.claim_rank_directory(target, rank)
        config = resolve_config(capture, dump_path=str(dump_path), step=work["step"])
        self._fields.update(path=str(files), overrides=list(config.overrides))
        monitor = LimitMonitor(
            files,
            max_bytes=self._limits.get("bytes"),
            max_seconds=self._limits.get("seconds"),
            reserve=reserve,
        )
        running = _Running(config, files, monitor)
        try:
            _session.open(config, dump_path=dump_path, model=model, rank=rank, monitor=monitor)
        except Exception as error:
            state = "skipped" if isinstance(error, Conflict) else "failed"
            self._write_done(running, state, str(error))
            raise
        return running

    def _directory(self) -> Path:
        data_dir = self._capture.get("data_dir") or self._data_root
        if not data_dir:
            raise InvalidPlan(
                "no directory for the dump is known",
                expected="data_dir in the capture, or the service's data_dir",
            )
        # verl's block gets verl's layout only where it names the directory itself.
        verl = self._capture.get("source") == "verl" and bool(self._capture.get("data_dir"))
        work = self._work
        root = dump_paths.attempt_directory(
            Path(data_dir).expanduser().absolute(),
            run=work["run"],
            attempt_key=work["attempt_key"],
            verl=verl,
        )
        directory = dump_paths.stage_directory(root, work["step"], work["stage"], work["part"])
        dump_paths.check_path(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        return directory

    def _cost(self, model: object, config: MsprobeConfig) -> Estimate:
        tokens = self._limits.get("tokens") or self._tokens
        try:
            size = ModelSize.of_model(model)
            cost = capture_estimate.history.estimate(size, config, self._work["stage"], tokens)
        except Exception as error:
            # Not a torch module: the limits still apply.
            _log.debug("no estimate for %r: %s", type(model).__name__, error)
            cost = Estimate(0, 0.0, "unknown")
        self._fields["estimate"] = dataclasses.asdict(cost)
        return cost

    def _end(self, running: _Running, exc: BaseException | None) -> dict[str, Json]:
        try:
            failure = _session.close()
        except Exception as raised:
            failure = raised
        finally:
            _busy.release()
        state, error = _verdict(running, exc, failure)
        size, files = dump_paths.measure(running.files)
        seconds = time.monotonic() - self._began
        if state == "complete":
            # The time of arming is not included: the first import of msprobe takes seconds.
            stage, monitor = self._work["stage"], running.monitor
            capture_estimate.history.add(running.config, stage, size, monitor.seconds)
        problem = self._write_done(running, state, error)
        return {
            "state": state,
            "error": "; ".join(filter(None, (error, problem))) or None,
            "bytes": size,
            "files": files,
            "seconds": seconds,
        }

    def _write_done(self, running: _Running, state: str, error: str | None) -> str | None:
        """Write DONE.json; return the reason where it cannot be written."""
        work, config = self._work, running.config
        content = {
            "state": state,
            "ok": state == "complete",
            "error": error,
            "seconds": round(time.monotonic() - self._began, 3),
            "run": work["run"],
            "attempt": work["attempt_key"],
            "step": work["step"],
            "stage": work["stage"],
            "part": str(work["part"]),
            "role": work["role"],
            "rank": work["rank"],
            "capture_id": self._fields["capture_id"],
            "task": config.task,
            "level": config.level,
            "overrides": list(config.overrides),
        }
        try:
            dump_paths.write_done(running.files, content)
        except OSError as problem:
            return f"DONE.json could not be written: {problem}"
        return None


class CapturedWork(TypedDict):
    """The work that is captured."""

    run: str
    attempt_key: str
    stage: str
    step: int | None
    part: Part
    role: str
    rank: int


def begin_capture(
    capture: CaptureRequest,
    *,
    model: object,
    data_root: str | None,
    out_of_reach: str | None = None,
    tokens: int | None = None,
    **work: Unpack[CapturedWork],
) -> ArmedCapture | None:
    """Begin to collect a stage in this process.

    Args:
        capture: the request. The caller has checked that it matches this stage, step and rank
            (`stagescope_wire.captures.matches`). With `force` it is armed even where the estimate
            does not fit. Its limit `reserve_bytes` stays free on the disk (256 MB by default). Its
            limit `tokens` is the number of tokens of the stage, for the estimate.
        model: the module (or list of modules) that runs in the stage. Levels L0 and mix need
            one, and the estimate is made from it.
        data_root: where dumps go when the capture names no `data_dir`.
        out_of_reach: why the stage's operators cannot be captured here; then it is skipped.
        tokens: the stage's earlier number of tokens, used where `limits` has none.
        work: the work that is captured.

    Returns:
        The capture, also when it is skipped or failed (`finish` returns the reason). None
        where msprobe has nothing to do. Either the capture only keeps tensors, or it requests all
        stages and this one is rollout_generate: that runs in an inference engine.

    Raises:
        InvalidPlan, CaptureError: strict, and it cannot be carried out.
    """
    if capture.get("config") is None and capture.get("config_path") is None:
        return None
    if work["stage"] == "rollout_generate" and not _names_generation(capture):
        return None
    work["attempt_key"] = str(work["attempt_key"])
    armed = ArmedCapture(capture, work, data_root, tokens)
    if out_of_reach is not None:
        armed.skip(out_of_reach)
    elif not _busy.acquire(blocking=False):
        armed.skip("another stage of this process is being captured")
    else:
        armed.arm(model)
    return armed


def _names_generation(capture: CaptureRequest) -> bool:
    stages = capture.get("stages", "all")
    return capture.get("source") != "verl" and stages != "all" and "rollout_generate" in stages


def _verdict(
    running: _Running, exc: BaseException | None, failure: Exception | None
) -> tuple[str, str | None]:
    errors = [] if running.monitor.reason is None else [running.monitor.reason]
    if failure is not None:
        cause = failure.__cause__
        errors.append(f"{type(failure).__name__}: {failure}" + (f" ({cause})" if cause else ""))
    if exc is not None:
        errors.append(f"the stage raised {type(exc).__name__}: {exc}")
    text = "; ".join(errors)[:2000] or None
    if failure is not None or not _is_written(running):
        return "failed", text or "msprobe wrote nothing"
    return ("truncated", text) if errors else ("complete", None)


def _is_written(running: _Running) -> bool:
    level = running.config.level
    if level == "L2" or (level == "debug" and not running.monitor.ended):
        return True
    return (running.files / ("debug.json" if level == "debug" else "dump.json")).exists()


def _log_once(result: Mapping[str, object]) -> None:
    text = f"capture {result['capture_id']}: {result['state']}: {result['error']}"
    if text not in _logged:
        _logged.add(text)
        _log.warning("%s", text)
