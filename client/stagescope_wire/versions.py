"""The supported versions of other packages, remarks about others, and how to install extras.

The workers and the service read these ranges. The ranges of trainers are in their integrations.
Installed versions come from the packages' metadata, so that no package is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from packaging.version import InvalidVersion, Version


@dataclasses.dataclass(frozen=True, slots=True)
class Supported:
    """The supported versions of one package.

    Attributes:
        package: its name for `pip install`; "python" is the interpreter.
        floor: the first supported version; the tests ran with it.
        tried: the newest version that tests ran with, those of its own environment included; None
            if none could be tested.
    """

    package: str
    floor: str
    tried: str | None


SUPPORTED: Final = (
    Supported("python", "3.10", "3.11"), Supported("torch", "2.4", "2.15"),
    Supported("torch_npu", "2.4", None), Supported("ray", "2.44", "2.60"),
    Supported("mindstudio-probe", "26", "26.2"),
)  # fmt: skip
ALL: Final = tuple(supported.package for supported in SUPPORTED)
SERVICE: Final = ("python", "ray")
"""The packages that the service itself needs."""
_CLONE: Final = "/path/to/clone"
"""Stands for a source that is not known; the documentation uses it, too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """The versions of a trainer with which its integration was tried.

    Attributes:
        oldest, newest: the first and the last of them, each with its patch releases.
    """

    oldest: str
    newest: str

    def __str__(self) -> str:
        return self.oldest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"

    def remark(self, package: str, version: str | None) -> str:
        """Return one line about a version that was not tried; empty where it was."""
        release = _release(version or "")
        known = f"{self} {'was' if self.oldest == self.newest else 'were'}"
        if not release:
            return f"the version of {package} is not known: {known} tried with stagescope"
        is_tried = release >= _release(self.oldest) and not self._is_after(version or "")
        return "" if is_tried else f"{package} {version} was not tried with stagescope: {known}"

    def _is_after(self, version: str) -> bool:
        newest = Version(self.newest)
        if newest.is_prerelease:  # the release of a version in development may differ from it
            return Version(Version(version.rstrip("+")).public) > newest
        return _is_newer(_release(version), newest.release)


@dataclasses.dataclass(frozen=True, slots=True)
class Remark:
    """An installed version outside of the tested range; `str()` gives one line of text."""

    supported: Supported
    found: str
    is_unsupported: bool
    """Whether it is older than the floor; else it is newer than the tested versions."""

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


def install_command(*extras: str) -> str:
    """Return the command that installs extras of stagescope.

    It names what stagescope was installed from (a clone, a wheel, a URL), because on package
    indexes the name is free or another project's.
    """
    from importlib import metadata

    written = None
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        written = metadata.distribution("stagescope").read_text("direct_url.json")
    names = f"[{','.join(extras)}]"
    return f"pip install '{_requirement(written or '', names)}'"


def _requirement(direct_url: str, extras: str) -> str:
    """Return what pip installs extras from.

    Args:
        direct_url: the text of direct_url.json (PEP 610); "" or unreadable: it is not known.
        extras: the names, in brackets.
    """
    try:
        fields = json.loads(direct_url)
        url = urlsplit(str(fields["url"]))
        control = fields.get("vcs_info", {})
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{_CLONE}{extras}"
    path = Path(unquote(url.path))
    if url.scheme == "file" and not control:
        is_there = path.is_file() or (path / "pyproject.toml").is_file()
        return f"{path if is_there else _CLONE}{extras}"
    address = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()  # without a password
    if url.scheme not in ("http", "https", "ssh", "file") or not isinstance(control, dict):
        return f"{_CLONE}{extras}"
    if control:
        address = f"{control.get('vcs', 'git')}+{address}"
        commit = control.get("commit_id")
        address += f"@{commit}" if commit else ""
    return f"stagescope{extras} @ {address}"


def remarks(packages: Iterable[str] = ALL) -> list[Remark]:
    """Return the remarks about installed versions of `packages`; absent packages have none."""
    wanted = set(packages)
    found: list[Remark] = []
    for supported in SUPPORTED:
        version = installed(supported.package) if supported.package in wanted else None
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
    from importlib import metadata

    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_newer(release: tuple[int, ...], tried: tuple[int, ...]) -> bool:
    # 2.13.1 is not newer than "2.13", which includes all of its patch releases.
    return release[: len(tried)] > tried


def _release(version: str) -> tuple[int, ...]:
    """Return the release of a version: (2, 4, 0) of "2.4.0a0+git1"; () where it is unreadable."""
    try:
        return Version(version.rstrip("+")).release  # "3.12.0+" is a Python from its repository
    except InvalidVersion:
        return ()
