"""The versions that are supported are said in several places, and are the same everywhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.version import Version

from stagescope_wire.versions import SUPPORTED, Supported
from stagescope_workers.integrations.registry import INTEGRATIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT: Final = Path(__file__).resolve().parents[1]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: Final[dict[str, list[str]]] = PROJECT["optional-dependencies"]
WORKERS: Final = {"click", "httpx", "numpy", "packaging", "pyyaml", "ray"}
"""All that a training image gets: what the drop-in and the probe need, and what Ray brings."""

packages = pytest.mark.parametrize("supported", SUPPORTED, ids=lambda one: one.package)


def required(package: str) -> set[str]:
    """Every condition on a package: {">=2.44"}."""
    if package == "python":
        return {PROJECT["requires-python"]}
    everything = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
    return {line[len(name_of(line)) :] for line in everything if name_of(line) == package}


def name_of(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]*[A-Za-z0-9]", requirement)
    assert name is not None
    return name[0]


def pinned(constraints: str) -> dict[str, str]:
    lines = (ROOT / "deploy" / constraints).read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower(): version for name, version in pairs}


def stands_for(short: str, version: str) -> bool:
    """Say whether `version` is `short` or a patch release of it."""
    return f"{version}.".startswith(f"{short}.")


def is_within(supported: Supported, version: str) -> bool:
    """Say whether a version is in the range that was tried."""
    if supported.tried is None or stands_for(supported.tried, version):
        return True
    return Version(supported.floor) <= Version(version) <= Version(supported.tried)


@packages
def test_pyproject_asks_for_the_floor(supported: Supported) -> None:
    for condition in required(supported.package):
        if condition.startswith(">="):
            assert condition == f">={supported.floor}"
        else:  # an extra that is installed with exactly this version
            assert is_within(supported, condition.removeprefix("=="))


@packages
def test_the_documentation_has_the_same_ranges(supported: Supported) -> None:
    page = (ROOT / "docs/versions.md").read_text()
    newest = supported.tried or "none, for want of a device"
    assert f"\n| {supported.package} | {supported.floor} | {newest} |" in page


@packages
def test_the_floor_and_a_version_of_the_range_are_what_the_tests_run_with(
    supported: Supported,
) -> None:
    package, lowest = supported.package, pinned("constraints-lowest.txt")
    newest = pinned("constraints.txt")
    if package in lowest:
        assert stands_for(supported.floor, lowest[package])
    if package in newest:  # a newer one may have been tried in an environment of its own
        assert supported.tried is not None
        assert is_within(supported, newest[package])


def test_the_trainers_of_the_tests_are_versions_that_count_as_tried() -> None:
    tried = {each.distribution: each.tried for each in INTEGRATIONS if each.tried is not None}
    for package, constraints in (("verl", "constraints-verl.txt"), ("trl", "constraints.txt")):
        assert tried[package].remark(package, pinned(constraints)[package]) == ""
        for condition in required(package):
            assert tried[package].remark(package, condition.lstrip(">=")) == ""


def test_the_documentation_has_the_range_of_each_trainer() -> None:
    table = (ROOT / "docs/trainers.md").read_text().lower()
    for each in INTEGRATIONS:
        if each.tried is not None:
            assert f"\n| [{each.name}]({each.name}.md) | {each.tried} |" in table
            page = (ROOT / f"docs/{each.name}.md").read_text()
            assert f"{each.tried} " in page.partition("\n## Versions\n")[2]


def test_the_lowest_environment_has_the_floors_of_all_that_it_installs() -> None:
    lowest = pinned("constraints-lowest.txt")
    extras = ("service", "workers", "msprobe", "notebook")
    asked = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    for line in asked:
        name, floor = line.split(">=")
        assert stands_for(floor, lowest[name.lower()]), line


def test_a_training_image_gets_as_little_as_possible() -> None:
    asked = {name_of(line) for line in (*PROJECT["dependencies"], *EXTRAS["workers"])}
    assert asked == WORKERS
