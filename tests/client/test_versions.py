from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from stagescope_wire import versions


def have(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(package: str) -> str:
        if package in installed:
            return installed[package]
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(platform, "python_version", lambda: installed.get("python", "3.10.0"))


@pytest.mark.parametrize(
    ("package", "version", "line"),
    [
        *(("torch", version, "") for version in (
            "2.4.0", "2.4", "2.4.0a0+git1", "2.10.1", "2.13.0+cpu", "2.13.9", "unknown", "",
        )),
        ("torch", "2.3.1",
         "torch 2.3.1 is not supported, 2.4 and later are: pip install 'torch>=2.4'"),
        ("python", "3.9.18", "python 3.9.18 is not supported, 3.10 and later are: run it with "
         "Python 3.10 or later"),
        ("torch", "2.16.0", "torch 2.16.0 was not tried with stagescope: 2.4 to 2.15 were"),
        ("python", "3.12.0+", "python 3.12.0+ was not tried with stagescope: 3.10 to 3.11 were"),
        ("torch_npu", "2.13.0", "torch_npu 2.13.0 was not tried with stagescope"),
    ],
)  # fmt: skip
def test_a_line_says_what_was_found_what_is_expected_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, line: str
) -> None:
    have(monkeypatch, **{package: version})
    remarks = versions.remarks()
    assert [str(remark) for remark in remarks] == ([line] if line else [])
    assert [remark.is_unsupported for remark in remarks] == ["not supported" in line] * len(remarks)
    assert versions.remarks([]) == []


@pytest.mark.parametrize(
    ("written", "source"),
    [
        ('{{"dir_info": {{"editable": true}}, "url": "file://{}"}}', "{}"),
        (
            '{{"url": "file://{}/stagescope-0.1.0-py3-none-any.whl"}}',
            "{}/stagescope-0.1.0-py3-none-any.whl",
        ),
        ('{{"url": "file://{}/gone/stagescope-0.1.0-py3-none-any.whl"}}', "/path/to/clone"),
        ('{{"url": "file://{}/gone", "dir_info": {{}}}}', "/path/to/clone"),
        ("[]", "/path/to/clone"),
        ("no JSON", "/path/to/clone"),
        (None, "/path/to/clone"),
    ],
)
def test_extras_are_installed_from_the_source_and_from_no_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str | None, source: str
) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    (clone / "stagescope-0.1.0-py3-none-any.whl").touch()
    text = None if written is None else written.format(quote(str(clone)))

    class Installed:
        def read_text(self, name: str) -> str | None:
            return text if name == "direct_url.json" else None

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    expected = f"pip install '{source.format(clone)}[service,notebook]'"
    assert versions.install_command("service", "notebook") == expected


@pytest.mark.parametrize(
    ("fields", "requirement"),
    [
        (
            {"url": "https://me:secret@git.example.com/s.git",
             "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "stagescope[service] @ git+https://git.example.com/s.git@abc",
        ),
        (
            {"url": "https://example.com/stagescope-0.1.0-py3-none-any.whl", "archive_info": {}},
            "stagescope[service] @ https://example.com/stagescope-0.1.0-py3-none-any.whl",
        ),
    ],
)  # fmt: skip
def test_extras_are_installed_from_the_address_of_the_installation(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], requirement: str
) -> None:
    class Installed:
        def read_text(self, name: str) -> str:
            return json.dumps(fields)

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    assert versions.install_command("service") == f"pip install '{requirement}'"


def test_no_message_installs_stagescope_from_an_index() -> None:
    root = Path(__file__).parents[2]
    for folder in ("client", "workers", "service", "docs"):
        for file in (root / folder).rglob("*"):
            if file.suffix in (".py", ".md", ".js", ".ipynb"):
                assert not re.search(r"pip install '?stagescope\b", file.read_text()), file


@pytest.mark.parametrize(
    ("tried", "version", "line"),
    [
        (("0.11.0", "0.11.2"), "0.11.0", ""),
        (("0.11.0", "0.11.2"), "0.11.2.post1", ""),
        (("0.11.0", "0.11.2"), "0.11.3", "x 0.11.3 was not tried with stagescope: {} were"),
        (("0.11.0", "0.11.2"), "0.10.4", "x 0.10.4 was not tried with stagescope: {} were"),
        (("1.16", "1.16"), "1.16.3", ""),
        (("1.16", "1.16"), "1.17.0.dev0", "x 1.17.0.dev0 was not tried with stagescope: {} was"),
        (("0.7", "0.10.0.dev0"), "0.10.0.dev", ""),
        (("0.7", "0.10.0.dev0"), "0.10.0.dev0+git.1dda039", ""),
        # The release may differ from what was in development.
        (("0.7", "0.10.0.dev0"), "0.10.0", "x 0.10.0 was not tried with stagescope: {} were"),
        (("1.4.0", "1.4.0"), None, "the version of x is not known: {} was tried with stagescope"),
        (("1.4.0", "1.4.0"), "main", "the version of x is not known: {} was tried with stagescope"),
    ],
)
def test_a_trainers_version_outside_the_range_that_was_tried_is_said(
    tried: tuple[str, str], version: str | None, line: str
) -> None:
    known = tried[0] if tried[0] == tried[1] else " to ".join(tried)
    assert versions.Tried(*tried).remark("x", version) == line.format(known)
