"""Find what msprobe changes in a process, by comparison, and restore it.

Its constructor replaces functions of torch (from level L1 on), of torch.distributed, of autograd's
hooks and of dynamo. Its start adds hooks and an instance-level `forward` to every sub-module (L0,
mix), and hooks to every optimizer. Left in place they slow each later step, make `copy.deepcopy` of
the model compute with the original's weights and `pickle` fail. This module compares the owners'
dictionaries before and after, so it needs no list of names. It restores every replaced attribute
exactly: an attribute that was inherited before is deleted, not set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from stagescope_wire.errors import CaptureError

if TYPE_CHECKING:
    import torch

_MISSING: Final = object()
_DUMP_CODE: Final = ("msprobe.pytorch.dump", "msprobe.core.dump")


def load_debugger_class() -> Any:
    """Import msprobe and return its `PrecisionDebugger`, without the import's side effects.

    Its log level is set to silent unless the user chose one. Otherwise it prints 5 lines a stage
    and rank, which Ray forwards to the driver. msprobe also puts an empty `tensorflow` into
    `sys.modules`. It is removed again, so that a real one can still be imported.

    Raises:
        CaptureError: msprobe is not installed, or cannot be imported.
    """
    if "msprobe.pytorch" not in sys.modules:
        _import_quietly()
    try:
        from msprobe.pytorch import PrecisionDebugger
    except Exception as error:
        raise CaptureError(
            f"msprobe cannot be imported: {type(error).__name__}: {error}",
            expected="the package mindstudio-probe in the training environment",
            advice="pip install mindstudio-probe (the package named msprobe is an unrelated tool)",
        ) from error
    return PrecisionDebugger


def _import_quietly() -> None:
    names = ("tensorflow", "tensorflow.python")
    before = {name: sys.modules.get(name) for name in names}
    silence = "MSPROBE_LOG_LEVEL" not in os.environ
    if silence:
        os.environ["MSPROBE_LOG_LEVEL"] = "4"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # The caller's own import reports a failure.
            with contextlib.suppress(Exception):
                import msprobe.pytorch  # noqa: F401
    finally:
        if silence:
            os.environ.pop("MSPROBE_LOG_LEVEL", None)
        for name, module in before.items():
            found = sys.modules.get(name)
            if found is not None and found is not module:
                if module is not None:
                    sys.modules[name] = module
                elif "tensorflow_stub" in getattr(found, "__name__", ""):
                    del sys.modules[name]


def is_dump_code(value: object) -> bool:
    """Return whether a function, or one that it wraps, is code of msprobe's dump."""
    for _ in range(20):
        # By exact type: torch has objects that warn or raise when any attribute is read.
        if type(value) in (staticmethod, classmethod, types.MethodType):
            value = cast(types.MethodType, value).__func__
        elif type(value) is functools.partial:
            value = value.func
        if type(value) is not types.FunctionType:
            return False
        if str(value.__globals__.get("__name__", "")).startswith(_DUMP_CODE):
            return True
        value = vars(value).get("__wrapped__")
    return False


@dataclasses.dataclass(frozen=True, slots=True)
class ReplacedAttribute:
    """One attribute that msprobe replaced: its raw value before and after."""

    owner: object
    name: str
    before: object
    after: object

    def _current(self) -> object:
        return vars(self.owner).get(self.name, _MISSING)

    @property
    def applicable(self) -> bool:
        """Whether the attribute still has its original value."""
        return self._current() is self.before

    def redo(self) -> None:
        """Set msprobe's value again."""
        setattr(self.owner, self.name, self.after)

    def undo(self) -> None:
        """Restore the original, unless other code has replaced the attribute since."""
        if self._current() is not self.after:
            return
        if self.before is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class AttributeSnapshot:
    """A copy of the owners' dictionaries."""

    def __init__(self, owners: Iterable[object]) -> None:
        self._before = [(owner, dict(vars(owner))) for owner in owners]

    def patches(self) -> list[ReplacedAttribute]:
        """Return what msprobe has replaced since."""
        return [
            ReplacedAttribute(owner, name, before.get(name, _MISSING), value)
            for owner, before in self._before
            for name, value in list(vars(owner).items())
            if before.get(name, _MISSING) is not value and is_dump_code(value)
        ]


def constructor_owners() -> list[object]:
    """Return the modules and classes whose attributes msprobe's constructor may replace."""
    import torch
    import torch._dynamo.convert_frame
    from msprobe.pytorch.dump.api_dump import api_register
    from torch.nn.modules._functions import BackwardHookFunction
    from torch.utils.hooks import BackwardHook

    owners: list[object] = [
        torch.linalg, torch.fft, torch.special, torch.jit, torch._dynamo.convert_frame,
        BackwardHook, BackwardHookFunction, *start_owners(),
    ]  # fmt: skip
    if hasattr(torch.distributed, "Work"):
        owners.append(torch.distributed.Work)
    for groups in api_register._api_types.values():
        for _, targets in groups.values():
            owners.extend(targets)
    # Megatron keeps its own references to collectives and pipeline functions.
    owners.extend(
        module
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.") and isinstance(module, types.ModuleType)
    )
    return list({id(owner): owner for owner in owners}.values())


def start_owners() -> list[object]:
    """Return the owners whose attributes msprobe's start may replace (level mix)."""
    import torch

    owners: list[object] = [torch.nn.utils]
    megatron = sys.modules.get("megatron.core.optimizer")
    optimizer = getattr(megatron, "MegatronOptimizer", None)
    if optimizer is not None:
        owners.append(optimizer)
    return owners


def remove_optimizer_hooks() -> None:
    """Remove msprobe's hooks on every optimizer's step."""
    import torch.optim.optimizer as optimizer

    for hooks in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):
        for key in [key for key, hook in hooks.items() if is_dump_code(hook)]:
            del hooks[key]


def set_triton_wrappers(*, enabled: bool) -> None:
    """Let msprobe wrap Triton's kernel launches, or remove the wrappers."""
    from msprobe.pytorch.dump.api_dump import script_wrapper

    name = "patch_triton_jitfunction_run" if enabled else "unpatch_triton_jitfunction_run"
    if "triton" in sys.modules and hasattr(script_wrapper, name):
        getattr(script_wrapper, name)()


@contextlib.contextmanager
def hide_verl() -> Iterator[None]:
    """Hide verl from msprobe's hooking alone: it skips lm_head where verl is imported."""
    from msprobe.pytorch.dump.module_dump import module_processor

    if "verl" not in sys.modules or not hasattr(module_processor, "sys"):
        yield
        return
    modules = {name: module for name, module in list(sys.modules.items()) if name != "verl"}
    real = module_processor.sys
    module_processor.sys = types.SimpleNamespace(modules=modules)
    try:
        yield
    finally:
        module_processor.sys = real


def run_compiled_eagerly() -> Callable[[], None]:
    """Make compiled functions run eagerly: visible to msprobe, and no FakeTensor in the dump.

    Returns a function that restores compilation.
    """
    import torch

    set_stance = getattr(torch.compiler, "set_stance", None)
    if set_stance is not None:
        stance = set_stance("force_eager")
        return lambda: cast(None, stance.__exit__(None, None, None))
    # Before torch 2.6: every compiled function installs its compiler through this name.
    from torch._dynamo import eval_frame

    module: Any = eval_frame
    original = module.set_eval_frame
    module.set_eval_frame = lambda _: original(None)

    def restore() -> None:
        module.set_eval_frame = original

    return restore


def ignore_hook_warning() -> object:
    """Ignore torch's warning about full backward hooks, which are msprobe's; return the filter.

    A training that turns warnings into errors would fail on it in the middle of its backward pass.
    """
    warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
    return warnings.filters[0]


def remove_warning_filter(warning_filter: object) -> None:
    """Remove the filter of `ignore_hook_warning`."""
    filters = cast("list[object]", warnings.filters)
    with contextlib.suppress(ValueError):
        filters.remove(warning_filter)


def unhook(models: Iterable[torch.nn.Module]) -> None:
    """Remove msprobe's hooks, instance-level `forward` and markers from every sub-module."""
    for model in models:
        for module in model.modules():
            _unhook_module(module)


def _unhook_module(module: torch.nn.Module) -> None:
    for hooks, with_kwargs in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if is_dump_code(hook)]:
            del hooks[key]
            with_kwargs.pop(key, None)
    attributes = vars(module)
    forward = attributes.get("forward")
    if forward is not None and is_dump_code(forward):
        cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
        original = cells["original_forward"].cell_contents
        # Before, it was a method of the class, unless the user had set one on the instance.
        if getattr(original, "__func__", None) is getattr(type(module), "forward", None):
            del attributes["forward"]
        else:
            attributes["forward"] = original
    for name in (
        "msprobe_hook", "msprobe_forward_hook", "msprobe_module_dump", "msprobe_input_kwargs",
    ):  # fmt: skip
        attributes.pop(name, None)
