"""The versions of other packages that stagescope works with, and a word about those it may not.

Here alone: the training side, the service and verl's integration read the same ranges. Installed
versions are read from the packages' metadata, so that nothing is imported for it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import re
from collections.abc import Iterable
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True)
class Supported:
    """The versions of one package that stagescope works with.

    Attributes:
        package: as `pip install` calls it; "python" is the interpreter.
        floor: the first version that is supported; the tests ran with it.
        tried: the newest version that the tests ran with; None where none could be tried.
    """

    package: str
    floor: str
    tried: str | None


SUPPORTED: Final = (
    Supported("python", "3.10", "3.11"),
    Supported("torch", "2.4", "2.13"),
    Supported("torch_npu", "2.4", None),
    Supported("ray", "2.44", "2.60"),
    Supported("mindstudio-probe", "26", "26.2"),
    Supported("verl", "0.7", "0.9.1"),
)
ALL: Final = tuple(supported.package for supported in SUPPORTED)
SERVICE: Final = ("python", "ray")
"""What the service itself needs of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Remark:
    """An installed version outside of what was tried; as a str, one line that says so."""

    supported: Supported
    found: str
    is_unsupported: bool
    """Older than the floor; else it was only never tried."""

    def __str__(self) -> str:
        package, floor = self.supported.package, self.supported.floor
        if not self.is_unsupported:
            tried = self.supported.tried
            known = f": {floor} to {tried} were" if tried else ""
            return f"{package} {self.found} was not tried with stagescope{known}"
        advice = (
            f"run it with Python {floor} or later"
            if package == "python"
            else f"pip install '{package}>={floor}'"
        )
        return f"{package} {self.found} is not supported, {floor} and later are: {advice}"


def remarks(packages: Iterable[str] = ALL) -> list[Remark]:
    """Return what is to be said of the installed versions; nothing of packages that are absent."""
    asked = set(packages)
    found: list[Remark] = []
    for supported in SUPPORTED:
        version = installed(supported.package) if supported.package in asked else None
        release = _release(version or "")
        if version is None or not release:
            continue
        if release < _release(supported.floor):
            found.append(Remark(supported, version, is_unsupported=True))
        elif supported.tried is None or _is_newer(release, _release(supported.tried)):
            found.append(Remark(supported, version, is_unsupported=False))
    return found


def installed(package: str) -> str | None:
    """Return the version of a package that is installed, or None."""
    if package == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_newer(release: tuple[int, ...], tried: tuple[int, ...]) -> bool:
    # 2.13.1 is no newer than "2.13", which stands for all of its patch releases.
    return release[: len(tried)] > tried


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (2, 4, 0) of "2.4.0a0+git1"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
