"""Replaces functions of other packages where, and only where, their modules are imported.

Our code around such a function is guarded: an activity that fails is logged once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from stagescope_wire.errors import StagescopeError
from stagescope_workers.probe.decorator import within

if TYPE_CHECKING:
    from stagescope_workers.probe.stage import Stage

_log = logging.getLogger("stagescope.integrations")
_logged: Final[set[str]] = set()


def log_once(*lines: str) -> None:
    """Log each of these warnings the first time."""
    for line in lines:
        if line not in _logged:
            _logged.add(line)
            _log.warning("%s", line)


@contextlib.contextmanager
def guarded(activity: str, *, reraise: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Catch any exception except `reraise`; log a warning the first time for each `activity`."""
    try:
        yield
    except reraise:
        raise
    except Exception as error:
        level = logging.DEBUG if activity in _logged else logging.WARNING
        _logged.add(activity)
        _log.log(level, "%s was skipped: %r", activity, error, exc_info=True)


@contextlib.contextmanager
def ending(activity: str, end: Callable[[BaseException | None], None]) -> Iterator[None]:
    """Run the body; then call `end`, guarded as `activity`, with what the body raised, or None."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        with guarded(activity):
            end(error)


@contextlib.contextmanager
def running(stage: Stage | None) -> Iterator[None]:
    """Run the body as `stage`, where there is one.

    Raises:
        StagescopeError: a strict capture failed.
    """
    if stage is None:
        yield
        return
    with guarded("the beginning of a stage", reraise=StagescopeError):
        stage.begin()
    try:
        yield
    except BaseException as error:
        with guarded("the end of a stage"):
            stage.end(error)
        raise
    with guarded("the end of a stage", reraise=StagescopeError):
        stage.end()


Function = Callable[..., Any]
Wrap = Callable[[Function], Function]
"""Returns the replacement of a function; it must call the function."""
Remark = Callable[[ModuleType], str]
"""Returns the line about a package's version, empty where there is none."""

WAITING: Final = "waiting"
"""The module was not imported here."""
APPLIED: Final = "applied"
ABSENT: Final = "absent"
"""The module has no such function."""


def wrapper(call: Function) -> Wrap:
    """Return a `Wrap` whose replacement runs `call(function, *args, **kwargs)`.

    Args:
        call: Must call the function once, with the arguments that the trainer gave.
    """

    @functools.wraps(call)
    def wrap(function: Function) -> Function:
        def run(*args: object, **kwargs: object) -> object:
            return call(function, *args, **kwargs)

        async def run_async(*args: object, **kwargs: object) -> object:
            return await call(function, *args, **kwargs)

        is_async = inspect.iscoroutinefunction(call)
        return functools.wraps(function)(run_async if is_async else run)

    return wrap


def before(activity: str) -> Callable[[Function], Wrap]:
    """Return a decorator of `act(*args, **kwargs)`, which runs guarded before the function."""

    def decorate(act: Function) -> Wrap:
        @functools.wraps(act)
        def call(function: Function, *args: object, **kwargs: object) -> object:
            with guarded(activity):
                act(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapper(call)

    return decorate


def after(activity: str) -> Callable[[Function], Wrap]:
    """Return a decorator of `act(result, *args, **kwargs)`: it runs guarded after the function."""

    def decorate(act: Function) -> Wrap:
        @functools.wraps(act)
        def call(function: Function, *args: object, **kwargs: object) -> object:
            result = function(*args, **kwargs)
            with guarded(activity):
                act(result, *args, **kwargs)
            return result

        return wrapper(call)

    return decorate


def staged(activity: str) -> Callable[[Callable[..., Stage | None]], Wrap]:
    """Return a decorator of `make(*args, **kwargs)`: the function runs as the stage it returns."""

    def decorate(make: Callable[..., Stage | None]) -> Wrap:
        def enter(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
            stage: Stage | None = None
            with guarded(activity):
                stage = make(*args, **kwargs)
            return running(stage)

        @functools.wraps(make)
        def wrap(function: Function) -> Function:
            return within(function, enter)

        return wrap

    return decorate


@dataclasses.dataclass
class Patch:
    """One function to replace.

    Attributes:
        module: The module that holds it.
        path: Where in the module: `function` or `Class.method`.
        wrap: Returns the replacement of the original; it must call the original.
        purpose: The data that is not reported where the function cannot be found.
        modes: The modes that apply it, of an integration that has modes (STAGESCOPE_VERL).
        since: The trainer's first version with this function, '' where it is older than any that is
            supported.
        state: WAITING, APPLIED, ABSENT, or why it failed.
        replacement: The function that replaced the original.
    """

    module: str
    path: str
    wrap: Wrap
    purpose: str
    modes: frozenset[str] = frozenset({"all"})
    since: str = ""
    state: str = WAITING
    replacement: Function | None = None

    @property
    def is_missing(self) -> bool:
        """Whether the module was imported and the function could not be replaced."""
        return self.state not in (WAITING, APPLIED)

    def __str__(self) -> str:
        return f"{self.purpose} ({self.module}: {self.path} is {self.state})"

    def apply(self, module: ModuleType) -> None:
        """Replace the function in `module`; an error is kept as `state`."""
        *holders, name = self.path.split(".")
        holder: object = module
        for inner in holders:
            holder = vars(holder).get(inner)
            if not isinstance(holder, type):
                self.state = ABSENT
                return
        # vars: an inherited method is replaced in the class that defines it.
        original = vars(holder).get(name)
        if original is not None and original is self.replacement:
            return
        if not callable(original) or isinstance(original, staticmethod | type):
            self.state = ABSENT
            return
        try:
            self._replace(holder, name, original)
        except Exception as error:
            self.state = f"failed: {error!r:.200}"

    def _replace(self, holder: object, name: str, original: Function) -> None:
        replacement = self.wrap(original)
        if inspect.iscoroutinefunction(replacement) != inspect.iscoroutinefunction(original):
            raise LookupError("one of it and its replacement is asynchronous, the other is not")
        setattr(holder, name, replacement)
        self.replacement, self.state = replacement, APPLIED


class Patches:
    """Applies patches to modules that are imported already, and to others when they are.

    Args:
        patches: The patches.
        package: Logged is what it lacks, as soon as it is imported; None: the caller logs that.
        remark: Returns the line about a version of the imported `package` that was not tried.
    """

    def __init__(
        self, patches: Iterable[Patch], package: str | None = None, remark: Remark | None = None
    ) -> None:
        self._package, self._remark = package, remark
        self._by_module: dict[str, list[Patch]] = {} if package is None else {package: []}
        for patch in patches:
            self._by_module.setdefault(patch.module, []).append(patch)

    @property
    def package(self) -> str | None:
        """The package that is patched, where its first import logs what it lacks."""
        return self._package

    def __iter__(self) -> Iterator[Patch]:
        return (patch for patches in self._by_module.values() for patch in patches)

    def install(self) -> None:
        """Apply the patches of imported modules, and wait for the imports of the others."""
        sys.meta_path.insert(0, self)
        for name in self._by_module:
            module = sys.modules.get(name)
            if module is not None and not _is_loading(module):
                self._apply(name, module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module by the other finders; its patches are applied after it was executed."""
        if fullname not in self._by_module:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is None:
                continue
            if hasattr(spec.loader, "exec_module"):
                loader: Any = _PatchingLoader(
                    spec.loader, lambda module: self._apply(fullname, module)
                )
                spec.loader = loader
            return spec
        return None

    def _apply(self, name: str, module: ModuleType) -> None:
        patches = self._by_module[name]
        for patch in patches:
            patch.apply(module)
        missing = [patch for patch in patches if patch.is_missing]
        # Every rank finds the same: rank 0 logs it.
        if missing and os.environ.get("RANK", "0") == "0":
            _log.warning("not reported with this version: %s", "; ".join(map(str, missing)))
        if name == self._package:
            log_version(self, name, self._remark)


class _PatchingLoader:
    """Executes one module with its own loader, then calls `then`; the module keeps that loader.

    A loader may load many modules (a zip file has one for all), so it is not changed itself.
    """

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute `module`, whose `__spec__` has its own loader again, and patch it."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)


def _is_loading(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def log_version(patches: Iterable[Patch], package: str, remark: Remark | None = None) -> None:
    """Log what is not reported with the version of `package` that is imported here.

    One line says that the version was not tried, and one which of its modules are missing.
    """
    module = sys.modules.get(package)
    # Every rank finds the same: rank 0 logs it.
    if module is None or os.environ.get("RANK", "0") != "0":
        return
    if remark is not None and (line := remark(module)):
        _log.warning("%s", line)
    version = str(getattr(module, "__version__", "of unknown version"))
    missing = missing_hooks(patches, module)
    if missing:
        _log.warning("not reported with %s %s: %s", package, version, "; ".join(missing))


def missing_hooks(patches: Iterable[Patch], package: ModuleType) -> list[str]:
    """Return the purposes for which this version of `package` has no module.

    A purpose with several modules (verl has two trainers, and had two kinds of workers) needs one
    of them.
    """
    folders = [Path(folder) for folder in package.__path__]
    served: dict[str, bool] = {}
    for patch in patches:
        is_served = served.get(patch.purpose, False)
        served[patch.purpose] = is_served or _has_file(folders, patch.module)
    return [purpose for purpose, is_served in served.items() if not is_served]


def _has_file(folders: list[Path], module: str) -> bool:
    parts = module.split(".")[1:]
    paths = [folder.joinpath(*parts) for folder in folders]
    # Packages outside of folders (in a zip file) cannot be checked.
    return any(path.is_dir() or path.with_suffix(".py").exists() for path in paths) or not any(
        folder.is_dir() for folder in folders
    )
