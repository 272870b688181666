"""One capture on the real PrecisionDebugger: start, stop, step, and a restored process after.

msprobe is a singleton of the process. It is kept between captures with the same configuration:
constructing it costs 20 ms at L0, 150 to 200 ms at L1. It is constructed again when the
configuration or the functions that it wraps changed. No other code can reach it between captures.

Exceptions inside msprobe's hooks stay there: the collector is guarded, the first failure or
reached limit ends the collection, and training continues without a wrapper.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stagescope_wire.errors import CaptureError, Conflict
from stagescope_workers.capture import dump_paths
from stagescope_workers.capture import msprobe_patches as patches
from stagescope_workers.capture.msprobe_config import MsprobeConfig, temporary_config

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_COLLECTOR_CALLS: Final = (
    "forward_input_data_collect", "forward_output_data_collect", "forward_data_collect",
    "forward_data_collect_only_tensor", "backward_data_collect",
    "backward_data_collect_only_tensor", "backward_input_data_collect",
    "backward_output_data_collect", "params_data_collect", "update_api_or_module_name",
    "debug_data_collect_forward", "debug_data_collect_backward",
)  # fmt: skip
_JSON_BYTES: Final = 600
"""Bytes of dump.json, stack.json and construct.json per call of the collector, for the cap."""
_FREE_CHECK_BYTES: Final = 64 << 20
_FREE_CHECK_SECONDS: Final = 1.0


class LimitReached(Exception):
    """A limit of the capture; raised and caught inside msprobe's collector only."""


class LimitMonitor:
    """The bytes and seconds that one capture has used, and why it ended early."""

    def __init__(
        self, directory: Path, *, max_bytes: float | None, max_seconds: float | None, reserve: int
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._reserve = reserve
        self._began = time.monotonic()
        self._bytes = 0
        self._checked_bytes = 0
        # The first bytes are checked too: `force` may have overridden the estimate.
        self._checked_at = -_FREE_CHECK_SECONDS
        self.reason: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the collection has ended."""
        return self.reason is not None

    @property
    def seconds(self) -> float:
        """Seconds since the capture was armed."""
        return time.monotonic() - self._began

    def begin(self) -> None:
        """Count the seconds from now on."""
        self._began = time.monotonic()

    def count(self, size: int) -> None:
        """Count bytes that are about to be written.

        Raises:
            LimitReached: a limit would be exceeded, or the disk has too little space left.
        """
        if self._max_bytes is not None and self._bytes + size > self._max_bytes:
            raise LimitReached(f"the byte cap of {self._max_bytes:.0f} was reached")
        self._bytes += size
        now = time.monotonic()
        if self._max_seconds is not None and now - self._began > self._max_seconds:
            raise LimitReached(f"the time cap of {self._max_seconds:g} s was reached")
        written = self._bytes - self._checked_bytes
        if written > _FREE_CHECK_BYTES or now - self._checked_at > _FREE_CHECK_SECONDS:
            self._checked_bytes, self._checked_at = self._bytes, now
            free = dump_paths.free_bytes(self._directory)
            if free is not None and free - size < self._reserve:
                raise LimitReached(
                    f"the disk has {free} bytes left, {self._reserve} are kept for the training"
                )


class MsprobeSession:
    """The process's one debugger; a capture lasts from `open` to `close`.

    Not thread-safe: its caller holds a lock from `open` to the end of `close`.
    """

    def __init__(self) -> None:
        self._class: Any = None
        self._debugger: Any = None
        self._signature: str | None = None
        self._constructor_patches: list[patches.ReplacedAttribute] = []
        self._start_patches: list[patches.ReplacedAttribute] = []
        self._models: list[torch.nn.Module] = []
        self._restore_compiling: Callable[[], None] | None = None
        self._warning_filter: object = None
        self._gc_was_on = True
        self.monitor: LimitMonitor | None = None

    def open(
        self,
        config: MsprobeConfig,
        *,
        dump_path: Path,
        model: Any,
        rank: int,
        monitor: LimitMonitor,
    ) -> None:
        """Start collecting into `dump_path/step0/rank{rank}`.

        Raises:
            CaptureError: msprobe is missing or refuses; the process is as it was before.
            Conflict: another PrecisionDebugger exists in this process.
        """
        self._class = patches.load_debugger_class()
        if self._class._instance is not None:
            raise Conflict(
                "another PrecisionDebugger is alive in this process",
                advice="turn the trainer's own precision debugger off, or leave captures to it",
            )
        self._gc_was_on = gc.isenabled()
        many = isinstance(model, list | tuple)
        self._models = [] if model is None else list(model) if many else [model]
        try:
            if not self._reuse(config):
                self._construct(config, dump_path)
            self._start(dump_path, model, rank, monitor)
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
                # A limit reached while asynchronous data were saved: the rest is still valid.
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

    def save(self, variable: object, name: str, save_backward: bool) -> None:
        """Save a value at level debug."""
        if self.monitor is not None and not self.monitor.ended:
            try:
                self._debugger.save(variable, name, save_backward)
            except Exception as error:
                self._end(self.monitor, error)

    def drop(self) -> None:
        """Discard the debugger; the process is restored already."""
        debugger, self._debugger = self._debugger, None
        self._signature, self._constructor_patches = None, []
        service = getattr(debugger, "service", None)
        if service is None:
            return
        collector = service.data_collector
        atexit.unregister(collector.write_json_at_exit)
        # The registry outlives its debugger: at L0 its wrapper of view_as would be installed again.
        for name in ("inner_used_ori_attr", "inner_used_wrapped_attr"):
            getattr(service.api_register, name, {}).clear()
        executor = getattr(collector.data_processor, "_crc_executor", None)
        if executor is not None:
            executor.shutdown(wait=False)

    def _reuse(self, config: MsprobeConfig) -> bool:
        """Reuse the earlier debugger if its configuration and wrapped functions are the same."""
        if self._debugger is None:
            return False
        fits = self._signature == config.signature
        # A function that a trainer patched since then must be wrapped again. Otherwise the
        # wrappers would call the old function, and the end would restore it.
        if not fits or not all(patch.applicable for patch in self._constructor_patches):
            self.drop()
            return False
        for patch in self._constructor_patches:
            patch.redo()
        self._debugger.service.api_register.all_api_registered = True
        patches.set_triton_wrappers(enabled=True)
        self._class._instance = self._debugger
        return True

    def _construct(self, config: MsprobeConfig, dump_path: Path) -> None:
        snapshot = patches.AttributeSnapshot(patches.constructor_owners())
        try:
            with temporary_config(config, dump_path) as path:
                self._debugger = self._class(config_path=path, dump_path=str(dump_path))
        finally:
            found = snapshot.patches()
            # Its wrapper of dynamo would install the others again at any later torch.compile.
            dynamo = [patch for patch in found if patch.name == "_compile"]
            for patch in dynamo:
                patch.undo()
            self._constructor_patches = [patch for patch in found if patch not in dynamo]
        self._signature = config.signature
        self._guard()

    def _start(self, dump_path: Path, model: object, rank: int, monitor: LimitMonitor) -> None:
        service = self._debugger.service
        service.reset_status()
        service.loop = service.init_step = 0
        service.should_stop_service = False
        service.current_step_first_debug_save = True
        # msprobe detects the rank at a first start and keeps it; with this flag it registers its
        # hooks each time.
        service.first_start = True
        service._get_current_rank = lambda: rank
        service.config.dump_path = str(dump_path)
        self._restore_compiling = patches.run_compiled_eagerly()
        self._warning_filter = patches.ignore_hook_warning()
        self.monitor = monitor
        snapshot = patches.AttributeSnapshot(patches.start_owners())
        try:
            with patches.hide_verl():
                self._debugger.start(model=model, rank_id=rank)
        finally:
            self._start_patches = snapshot.patches()
        # The import of msprobe, once in a process, takes seconds that no step costs again.
        monitor.begin()

    def _guard(self) -> None:
        """Catch what msprobe raises inside its hooks, and count what it writes."""
        service = self._debugger.service
        collector, manager = service.data_collector, service.hook_manager
        for name in _COLLECTOR_CALLS:
            if hasattr(collector, name):
                setattr(collector, name, self._guarded(getattr(collector, name), _JSON_BYTES))
        for name, fallback in (
            ("_register_backward_pre_hook", lambda arguments: arguments[-1]),
            ("_get_params_dict", lambda arguments: {}),
            ("_register_param_hook", lambda arguments: None),
            ("_register_forward_hook", lambda arguments: None),
            ("_maybe_update_dump_dir", lambda arguments: None),
        ):
            if hasattr(manager, name):
                setattr(manager, name, self._guarded(getattr(manager, name), 0, fallback))
        handler = getattr(collector.data_processor, "tensor_handler", None)
        if handler is not None:
            handler.save_tensor = self._guarded_save(handler.save_tensor)

    def _guarded(
        self,
        call: Callable[..., object],
        size: int,
        fallback: Callable[[tuple[object, ...]], object] = lambda arguments: None,
    ) -> Callable[..., object]:
        def guarded(*arguments: object, **keywords: object) -> object:
            monitor = self.monitor
            # A graph kept from an earlier stage may run its hooks at any time.
            if monitor is None or monitor.ended:
                return fallback(arguments)
            try:
                result = call(*arguments, **keywords)
                if size:
                    monitor.count(size)
            except Exception as error:
                self._end(monitor, error)
                return fallback(arguments)
            return result

        return guarded

    def _guarded_save(self, save: Callable[..., object]) -> Callable[..., object]:
        def guarded(tensor: torch.Tensor, path: str) -> None:
            monitor = self.monitor
            if monitor is None or monitor.ended:
                return
            monitor.count(int(tensor.numel()) * int(tensor.element_size()))
            save(tensor, path)

        return guarded

    def _end(self, monitor: LimitMonitor, error: Exception) -> None:
        """End the collection; the rest of the stage runs at full speed."""
        from msprobe.core.common.runtime import Runtime

        Runtime.is_running = False
        self._debugger.service.primitive_switch = False
        monitor.reason = _reason(error)
        for patch in self._constructor_patches:
            patch.undo()

    def _restore(self) -> None:
        """Restore the process; each part is restored even where another one fails."""
        self.monitor = None
        self._attempt(self._restore_service)
        for patch in (*self._start_patches, *self._constructor_patches):
            self._attempt(patch.undo)
        self._start_patches = []
        self._attempt(patches.remove_optimizer_hooks)
        self._attempt(lambda: patches.set_triton_wrappers(enabled=False))
        models, self._models = self._models, []
        self._attempt(lambda: patches.unhook(models))
        self._attempt(_forget_hooks)
        restore_compiling, self._restore_compiling = self._restore_compiling, None
        if restore_compiling is not None:
            self._attempt(restore_compiling)
        warning_filter, self._warning_filter = self._warning_filter, None
        if warning_filter is not None:
            self._attempt(lambda: patches.remove_warning_filter(warning_filter))
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
        # Otherwise the exit handler would write a failed dump again.
        writer.data_updated = False
        getattr(service.data_collector.data_processor, "_async_dump_cache", {}).clear()

    @staticmethod
    def _attempt(restore: Callable[[], None]) -> None:
        try:
            restore()
        except Exception:
            _log.warning("a change that msprobe made could not be undone", exc_info=True)


def _reason(error: BaseException) -> str:
    """Describe a failure and its causes: msprobe wraps a full disk in a bare RuntimeError."""
    if isinstance(error, LimitReached):
        return str(error)
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 5:
        chain.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    return "; caused by ".join(chain)[:2000]


def _forget_hooks() -> None:
    from msprobe.core.dump.hook_manager import BaseHookManager
    from msprobe.pytorch.dump.module_dump.module_processor import ModuleProcessor

    for handle in list(BaseHookManager.hook_handle_dict.values()):
        handle.remove()
    BaseHookManager.hook_handle_dict.clear()
    # msprobe 26.0 would number the gradients of the next capture on from these.
    BaseHookManager.grad_hook_call.clear()
    ModuleProcessor.module_with_backward_hook.clear()
