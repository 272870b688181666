"""One capture on the real PrecisionDebugger: start, stop, step, and an untouched process after.

msprobe is a singleton of the process. It is kept between captures with the same configuration
(constructing it costs 20 ms at L0, 150 to 200 ms at L1) and made anew when the configuration or
the functions that it wraps changed; between captures it is parked where nobody finds it.

What fails inside msprobe's hooks stays there: the collector is guarded, the first failure or
reached limit ends the collection, and training goes on without a wrapper.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stagescope.wire.errors import CaptureError, Conflict
from stagescope_workers.capture import msprobe_patches as patches
from stagescope_workers.capture.msprobe_config import MsprobeConfig, temporary_config

_log = logging.getLogger(__name__)

_COLLECTOR_CALLS: Final = (
    "forward_input_data_collect", "forward_output_data_collect", "forward_data_collect",
    "forward_data_collect_only_tensor", "backward_data_collect",
    "backward_data_collect_only_tensor", "backward_input_data_collect",
    "backward_output_data_collect", "params_data_collect", "update_api_or_module_name",
    "debug_data_collect_forward", "debug_data_collect_backward",
)  # fmt: skip
_JSON_BYTES: Final = 600
"""Of dump.json, stack.json and construct.json per call of the collector, for the byte cap."""
_FREE_CHECK_BYTES: Final = 64 << 20
_FREE_CHECK_SECONDS: Final = 1.0


class LimitReached(Exception):
    """A cap of the capture; raised and caught inside msprobe's collector only."""


class Watch:
    """What one capture has taken so far, and why it ended early."""

    def __init__(
        self, directory: Path, *, most_bytes: float | None, most_seconds: float | None, reserve: int
    ) -> None:
        self._directory = directory
        self._most_bytes = most_bytes
        self._most_seconds = most_seconds
        self._reserve = reserve
        self._began = time.monotonic()
        self._bytes = 0
        self._checked_bytes = 0
        # The first bytes are checked too: the estimate may have been forced aside.
        self._checked_at = -_FREE_CHECK_SECONDS
        self.reason: str | None = None
        self.error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more is collected."""
        return self.reason is not None

    @property
    def seconds(self) -> float:
        """Since the capture was armed."""
        return time.monotonic() - self._began

    def add(self, size: int) -> None:
        """Count bytes that are about to be written.

        Raises:
            LimitReached: a cap would be passed, or the disk has too little left.
        """
        if self._most_bytes is not None and self._bytes + size > self._most_bytes:
            raise LimitReached(f"the byte cap of {self._most_bytes:.0f} was reached")
        self._bytes += size
        now = time.monotonic()
        if self._most_seconds is not None and now - self._began > self._most_seconds:
            raise LimitReached(f"the time cap of {self._most_seconds:g} s was reached")
        written = self._bytes - self._checked_bytes
        if written > _FREE_CHECK_BYTES or now - self._checked_at > _FREE_CHECK_SECONDS:
            self._checked_bytes, self._checked_at = self._bytes, now
            free = free_bytes(self._directory)
            if free is not None and free - size < self._reserve:
                raise LimitReached(
                    f"the disk has {free} bytes left, {self._reserve} are kept for the training"
                )


def free_bytes(directory: Path) -> int | None:
    """Return the bytes that may be written there, or None where that cannot be told."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


class MsprobeSession:
    """The process's one debugger; `open` and `close` frame a capture.

    Not thread-safe: its caller holds a lock from `open` to the end of `close`.
    """

    def __init__(self) -> None:
        self._class: Any = None
        self._debugger: Any = None
        self._signature: str | None = None
        self._constructor_patches: list[patches.Patch] = []
        self._start_patches: list[patches.Patch] = []
        self._models: list[Any] = []
        self._compile_again: Callable[[], None] | None = None
        self._ignored: Any = None
        self._gc_was_on = True
        self.watch: Watch | None = None

    def open(
        self, config: MsprobeConfig, *, dump_path: Path, model: Any, rank: int, watch: Watch
    ) -> None:
        """Start collecting into `dump_path/step0/rank{rank}`.

        Raises:
            CaptureError: msprobe is missing or refuses; the process is as it was before.
            Conflict: somebody else's PrecisionDebugger lives in this process.
        """
        self._class = patches.load_debugger_class()
        if self._class._instance is not None:
            raise Conflict(
                "another PrecisionDebugger is alive in this process",
                advice="turn the trainer's own precision debugger off, or leave captures to it",
            )
        self._gc_was_on = gc.isenabled()
        self._models = [] if model is None else list(model) if _is_many(model) else [model]
        try:
            if not self._take_up(config):
                self._construct(config, dump_path)
            self._start(dump_path, model, rank, watch)
        except BaseException as error:
            self._restore()
            self.drop()
            if not isinstance(error, Exception):
                raise
            raise CaptureError(
                f"msprobe could not be started: {type(error).__name__}: {error}",
                advice="set MSPROBE_LOG_LEVEL=1 to see msprobe's own messages",
            ) from error

    def close(self) -> Exception | None:
        """Stop, write what was collected, restore the process; return msprobe's failure, if any."""
        debugger, failure = self._debugger, None
        try:
            try:
                debugger.stop()
            except Exception as error:
                failure = error
                # A limit that was met while asynchronous data were saved: the rest still counts.
                with contextlib.suppress(Exception):
                    debugger.service.data_collector.write_json()
                    failure = None if isinstance(error, LimitReached) else error
            if failure is None:
                try:
                    debugger.step()
                except Exception as error:
                    failure = error
        finally:
            self._restore()
        if failure is not None:
            self.drop()
        return failure

    def save(self, variable: Any, name: str, save_backward: bool) -> None:
        """Save a value at level debug."""
        if self.watch is not None and not self.watch.ended:
            try:
                self._debugger.save(variable, name, save_backward)
            except Exception as error:
                self._end(self.watch, error)

    def drop(self) -> None:
        """Forget the debugger; the process is restored already."""
        debugger, self._debugger = self._debugger, None
        self._signature, self._constructor_patches = None, []
        service = getattr(debugger, "service", None)
        if service is None:
            return
        collector = service.data_collector
        atexit.unregister(collector.write_json_at_exit)
        # The registry outlives its debugger: at L0 its wrapper of view_as would come back.
        for name in ("inner_used_ori_attr", "inner_used_wrapped_attr"):
            getattr(service.api_register, name, {}).clear()
        executor = getattr(collector.data_processor, "_crc_executor", None)
        if executor is not None:
            executor.shutdown(wait=False)

    def _take_up(self, config: MsprobeConfig) -> bool:
        """Take up the parked debugger if it serves this configuration and these functions."""
        if self._debugger is None:
            return False
        fits = self._signature == config.signature
        # A function that was patched since (a trainer's own monkey patch) must be wrapped anew,
        # or the wrappers would call, and the end would restore, the one of before.
        if not fits or not all(patch.applicable for patch in self._constructor_patches):
            self.drop()
            return False
        for patch in self._constructor_patches:
            patch.redo()
        self._debugger.service.api_register.all_api_registered = True
        patches.switch_triton(on=True)
        self._class._instance = self._debugger
        return True

    def _construct(self, config: MsprobeConfig, dump_path: Path) -> None:
        snapshot = patches.Snapshot(patches.constructor_owners())
        try:
            with temporary_config(config, dump_path) as path:
                self._debugger = self._class(config_path=path, dump_path=str(dump_path))
        finally:
            found = snapshot.patches()
            # With its wrapper of dynamo any later torch.compile would install the others again.
            dynamo = [patch for patch in found if patch.name == "_compile"]
            for patch in dynamo:
                patch.undo()
            self._constructor_patches = [patch for patch in found if patch not in dynamo]
        self._signature = config.signature
        self._guard()

    def _start(self, dump_path: Path, model: Any, rank: int, watch: Watch) -> None:

        service = self._debugger.service
        service.reset_status()
        service.loop = service.init_step = 0
        service.should_stop_service = False
        service.current_step_first_debug_save = True
        # The rank is detected at a first start and kept: with it, hooks are registered each time.
        service.first_start = True
        service._get_current_rank = lambda: rank
        service.config.dump_path = str(dump_path)
        self._compile_again = patches.run_compiled_eagerly()
        self._ignored = patches.ignore_hook_warning()
        self.watch = watch
        snapshot = patches.Snapshot(patches.start_owners())
        try:
            with patches.verl_unseen():
                self._debugger.start(model=model, rank_id=rank)
        finally:
            self._start_patches = snapshot.patches()

    def _guard(self) -> None:
        """Keep what msprobe raises inside its hooks, and count what it writes."""
        service = self._debugger.service
        collector, manager = service.data_collector, service.hook_manager
        for name in _COLLECTOR_CALLS:
            if hasattr(collector, name):
                setattr(collector, name, self._guarded(getattr(collector, name), _JSON_BYTES))
        for name, otherwise in (
            ("_register_backward_pre_hook", lambda arguments: arguments[-1]),
            ("_get_params_dict", lambda arguments: {}),
            ("_register_param_hook", lambda arguments: None),
            ("_register_forward_hook", lambda arguments: None),
            ("_maybe_update_dump_dir", lambda arguments: None),
        ):
            if hasattr(manager, name):
                setattr(manager, name, self._guarded(getattr(manager, name), 0, otherwise))
        handler = getattr(collector.data_processor, "tensor_handler", None)
        if handler is not None:
            handler.save_tensor = self._guarded_save(handler.save_tensor)

    def _guarded(
        self,
        call: Callable[..., Any],
        size: int,
        otherwise: Callable[[tuple[Any, ...]], Any] = lambda arguments: None,
    ) -> Callable[..., Any]:
        def guarded(*arguments: Any, **named: Any) -> Any:
            watch = self.watch
            # A graph kept from an earlier stage may run its hooks at any time.
            if watch is None or watch.ended:
                return otherwise(arguments)
            try:
                result = call(*arguments, **named)
                if size:
                    watch.add(size)
            except Exception as error:
                self._end(watch, error)
                return otherwise(arguments)
            return result

        return guarded

    def _guarded_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(tensor: Any, path: str) -> None:
            watch = self.watch
            if watch is None or watch.ended:
                return
            watch.add(int(tensor.numel()) * int(tensor.element_size()))
            save(tensor, path)

        return guarded

    def _end(self, watch: Watch, error: Exception) -> None:
        """End the collection for the rest of the stage, which goes on at full speed."""
        from msprobe.core.common.runtime import Runtime

        Runtime.is_running = False
        self._debugger.service.primitive_switch = False
        if not isinstance(error, LimitReached):
            watch.error = error
        watch.reason = _reason(error)
        for patch in self._constructor_patches:
            patch.undo()

    def _restore(self) -> None:
        """Leave the process as it was found; one failing piece does not keep the others."""
        self.watch = None
        self._piece(self._restore_service)
        for patch in (*self._start_patches, *self._constructor_patches):
            self._piece(patch.undo)
        self._start_patches = []
        self._piece(patches.remove_optimizer_hooks)
        self._piece(lambda: patches.switch_triton(on=False))
        models, self._models = self._models, []
        self._piece(lambda: patches.unhook(models))
        self._piece(_forget_hooks)
        compile_again, self._compile_again = self._compile_again, None
        if compile_again is not None:
            self._piece(compile_again)
        ignored, self._ignored = self._ignored, None
        if ignored is not None:
            self._piece(lambda: patches.heed_hook_warning(ignored))
        self._class._instance = None
        if gc.isenabled() != self._gc_was_on:
            (gc.enable if self._gc_was_on else gc.disable)()

    def _restore_service(self) -> None:
        from msprobe.core.common.runtime import Runtime

        Runtime.is_running = False
        service = getattr(self._debugger, "service", None)
        if service is None:
            return
        service._disable_dump_runtime()
        service.reset_status()
        service.hooked_modules.clear()
        service.model = None
        service.api_register.all_api_registered = False
        writer = service.data_collector.data_writer
        writer.stat_stack_list, writer.crc32_stack_list = [], []
        # Else the exit handler would write a failed dump once more.
        writer.data_updated = False
        getattr(service.data_collector.data_processor, "_async_dump_cache", {}).clear()

    @staticmethod
    def _piece(restore: Callable[[], None]) -> None:
        try:
            restore()
        except Exception:
            _log.warning("a piece of msprobe could not be taken back", exc_info=True)


def _is_many(model: Any) -> bool:
    return isinstance(model, list | tuple)


def _reason(error: BaseException) -> str:
    """Say what failed, down to the cause: msprobe wraps a full disk in a bare RuntimeError."""
    if isinstance(error, LimitReached):
        return str(error)
    said: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(said) < 5:
        said.append(f"{type(seen).__name__}: {seen}")
        seen = seen.__cause__ or seen.__context__
    return "; caused by ".join(said)[:2000]


def _forget_hooks() -> None:
    from msprobe.core.dump.hook_manager import BaseHookManager
    from msprobe.pytorch.dump.module_dump.module_processor import ModuleProcessor

    for handle in list(BaseHookManager.hook_handle_dict.values()):
        handle.remove()
    BaseHookManager.hook_handle_dict.clear()
    # msprobe 26.0 would number the gradients of the next capture on from these.
    BaseHookManager.grad_hook_call.clear()
    ModuleProcessor.module_with_backward_hook.clear()
