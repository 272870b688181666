"""Captures with msprobe around a stage of a training process.

`Capturer.begin` arms one where a stage begins. `ArmedCapture.finish` ends it where the stage ends,
also by an exception, and returns the fields of the DUMP event with the result. Nothing here
raises unless the capture is `strict`: not msprobe, not a full disk, not a wrong configuration.
Neither msprobe nor torch is imported before the first capture is armed.

One process collects one stage at a time: a capture that would overlap another is `skipped`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

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
from stagescope_workers.capture.msprobe_session import LimitMonitor, MsprobeSession, free_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ArmedCapture", "Capturer", "save"]

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


class ArmedCapture:
    """A capture that was begun: running, or already skipped or failed."""

    def __init__(self, fields: dict[str, Json], *, strict: bool) -> None:
        self._fields = fields
        self._strict = strict
        self._result: dict[str, Json] | None = None
        self._running: _RunningCapture | None = None

    @property
    def collecting(self) -> bool:
        """Whether msprobe is collecting for this capture."""
        return self._running is not None and self._result is None

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
        if self._result is None:
            if self._running is not None:
                self._fields.update(self._running.end(exc))
            self._result = self._fields
            if self._result["state"] != "complete":
                _log_once(self._result)
            if self._strict and exc is None and self._result["state"] == "failed":
                raise CaptureError(f"the capture failed: {self._result['error']}")
        return dict(self._result)


class CapturedWork(TypedDict):
    """The work that is captured."""

    run: str
    attempt_key: str
    stage: str
    step: int | None
    part: Part
    role: str
    rank: int


class Capturer:
    """Arms captures in this process."""

    def begin(
        self,
        capture: CaptureRequest,
        *,
        model: object,
        data_root: str | None,
        out_of_reach: str | None = None,
        tokens: int | None = None,
        **work: Unpack[CapturedWork],
    ) -> ArmedCapture | None:
        """Begin to collect a stage.

        Args:
            capture: the request. The caller has checked that it matches this stage, step and rank
                (`stagescope_wire.captures.matches`). `force` arms it although the estimate does
                not fit. `limits` may hold `reserve_bytes` (kept free on the disk, 256 MB by
                default) and `tokens` (number of tokens of the stage, for the estimate).
            model: the module (or list of modules) that runs in the stage. Levels L0 and mix need
                one, and the estimate is made from it.
            data_root: where dumps go when the capture names no `data_dir`.
            out_of_reach: why the stage's operators cannot be captured here; then it is skipped.
            tokens: the stage's earlier number of tokens, used where `limits` has none.
            work: the work that is captured.

        Returns:
            The capture, also when it is skipped or failed (`finish` returns the reason). None
            where msprobe has nothing to do: the capture only keeps tensors, or it requests all
            stages and this one is rollout_generate, which runs in an inference engine.

        Raises:
            InvalidPlan, CaptureError: strict, and it cannot be carried out.
        """
        if capture.get("config") is None and capture.get("config_path") is None:
            return None
        if work["stage"] == "rollout_generate" and not _names_generation(capture):
            return None
        strict = bool(capture.get("strict"))
        work["attempt_key"] = str(work["attempt_key"])
        setup = _CaptureSetup(capture, work, data_root, tokens)
        armed = ArmedCapture(setup.fields, strict=strict)
        if out_of_reach is not None:
            setup.end_early("skipped", out_of_reach)
            return armed
        if not _busy.acquire(blocking=False):
            setup.end_early("skipped", "another stage of this process is being captured")
            return armed
        try:
            armed._running = setup.arm(model)
        except StagescopeError as error:
            setup.end_early("skipped" if isinstance(error, Conflict) else "failed", str(error))
            if strict and not isinstance(error, Conflict):
                raise
        except Exception as error:
            setup.end_early("failed", f"{type(error).__name__}: {error}")
            if strict:
                raise CaptureError(f"the capture could not be armed: {error}") from error
        finally:
            if armed._running is None:
                _busy.release()
        return armed


def _names_generation(capture: CaptureRequest) -> bool:
    stages = capture.get("stages", "all")
    return capture.get("source") != "verl" and stages != "all" and "rollout_generate" in stages


class _CaptureSetup:
    """A capture before it is armed: checks the request and starts msprobe."""

    def __init__(
        self, capture: CaptureRequest, work: CapturedWork, data_root: str | None, tokens: int | None
    ) -> None:
        self.capture = capture
        self.work = work
        self.data_root = data_root
        self.tokens = tokens
        self.limits: CaptureLimits = capture.get("limits") or {}
        self.fields: dict[str, Json] = {
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
            self.fields["notes"] = list(notes)

    def end_early(self, state: str, error: str) -> None:
        self.fields.update(state=state, error=error[:2000])

    def arm(self, model: object) -> _RunningCapture | None:
        """Start msprobe, or return None with the reason in the fields."""
        began = time.monotonic()
        work = self.work
        self.capture = with_baseline(
            self.capture,
            stage=work["stage"],
            part=str(work["part"]),
            role=work["role"],
            rank=work["rank"],
        )
        config = resolve_config(self.capture, dump_path="", step=work["step"])
        self.fields.update(task=config.task, level=config.level)
        if config.level in _NEEDS_MODEL and (model is None or model in ([], ())):
            raise InvalidPlan(
                f"level {config.level!r} needs the model of stage {work['stage']!r}",
                expected="probe.stage(..., model=model), or level 'L1'",
            )
        check_baseline(config, work["rank"])
        target = self._directory()
        cost = self._cost(model, config)
        reserve = capture_estimate.disk_reserve(self.limits)
        too_large = capture_estimate.too_large(cost, config, free_bytes(target.parent), reserve)
        if too_large and not self.capture.get("force"):
            self.end_early("skipped", too_large)
            return None
        dump_path, files = dump_paths.claim_rank_directory(target, work["rank"])
        self.fields["path"] = str(files)
        config = resolve_config(self.capture, dump_path=str(dump_path), step=work["step"])
        self.fields["overrides"] = list(config.overrides)
        monitor = LimitMonitor(
            files,
            max_bytes=self.limits.get("bytes"),
            max_seconds=self.limits.get("seconds"),
            reserve=reserve,
        )
        running = _RunningCapture(self, config, files, monitor, began)
        try:
            _session.open(
                config, dump_path=dump_path, model=model, rank=work["rank"], monitor=monitor
            )
        except Exception as error:
            running.write_done("skipped" if isinstance(error, Conflict) else "failed", str(error))
            raise
        return running

    def _directory(self) -> Path:
        data_dir = self.capture.get("data_dir") or self.data_root
        if not data_dir:
            raise InvalidPlan(
                "no directory for the dump is known",
                expected="data_dir in the capture, or the service's data_dir",
            )
        # verl's block gets verl's layout only where it names the directory itself.
        verl = self.capture.get("source") == "verl" and bool(self.capture.get("data_dir"))
        work = self.work
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
        tokens = self.limits.get("tokens") or self.tokens
        try:
            size = ModelSize.of_model(model)
            cost = capture_estimate.history.estimate(size, config, self.work["stage"], tokens)
        except Exception as error:
            # Not a torch module: the limits still apply.
            _log.debug("no estimate for %r: %s", type(model).__name__, error)
            cost = Estimate(0, 0.0, "unknown")
        self.fields["estimate"] = cost.fields()
        return cost


class _RunningCapture:
    """A capture that msprobe collects."""

    def __init__(
        self,
        setup: _CaptureSetup,
        config: MsprobeConfig,
        files: Path,
        monitor: LimitMonitor,
        began: float,
    ) -> None:
        self._setup = setup
        self._config = config
        self._files = files
        self._monitor = monitor
        self._began = began

    def end(self, exc: BaseException | None) -> dict[str, Json]:
        try:
            failure = self._close()
        finally:
            _busy.release()
        state, error = self._verdict(exc, failure)
        size, files = dump_paths.measure(self._files)
        seconds = time.monotonic() - self._began
        if state == "complete":
            # The time of arming is not included: the first import of msprobe takes seconds.
            stage = self._setup.work["stage"]
            capture_estimate.history.add(self._config, stage, size, self._monitor.seconds)
        problem = self.write_done(state, error)
        return {
            "state": state,
            "error": "; ".join(filter(None, (error, problem))) or None,
            "bytes": size,
            "files": files,
            "seconds": seconds,
        }

    @staticmethod
    def _close() -> Exception | None:
        try:
            return _session.close()
        except Exception as error:
            return error

    def _verdict(
        self, exc: BaseException | None, failure: Exception | None
    ) -> tuple[str, str | None]:
        """Return the state and the errors, in the order in which they occurred."""
        errors = [] if self._monitor.reason is None else [self._monitor.reason]
        if failure is not None:
            cause = failure.__cause__
            errors.append(f"{type(failure).__name__}: {failure}" + (f" ({cause})" if cause else ""))
        if exc is not None:
            errors.append(f"the stage raised {type(exc).__name__}: {exc}")
        text = "; ".join(errors)[:2000] or None
        if failure is not None or not self._is_written():
            return "failed", text or "msprobe wrote nothing"
        return ("truncated", text) if errors else ("complete", None)

    def _is_written(self) -> bool:
        name = "debug.json" if self._config.level == "debug" else "dump.json"
        if self._config.level == "L2" or (name == "debug.json" and not self._monitor.ended):
            return True
        return (self._files / name).exists()

    def write_done(self, state: str, error: str | None) -> str | None:
        """Write DONE.json; return the reason where it cannot be written."""
        work = self._setup.work
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
            "capture_id": self._setup.fields["capture_id"],
            "task": self._config.task,
            "level": self._config.level,
            "overrides": list(self._config.overrides),
        }
        try:
            dump_paths.write_done(self._files, content)
        except OSError as problem:
            return f"DONE.json could not be written: {problem}"
        return None


def _log_once(result: Mapping[str, object]) -> None:
    text = f"capture {result['capture_id']}: {result['state']}: {result['error']}"
    if text not in _logged:
        _logged.add(text)
        _log.warning("%s", text)
