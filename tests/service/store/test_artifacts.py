"""Paths: what lies where, and what never leaves its directory."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagescope_service.store.artifacts import (
    attempt_directory,
    confine,
    kept_path,
    ring_directory,
    step_directory,
)
from stagescope_wire.errors import Forbidden
from stagescope_wire.names import safe_name
from stagescope_wire.schema import DUMP_MARKER, Part
from stagescope_workers.capture import dump_paths

ROOT = Path("/data")


@given(st.text(), st.text(), st.none() | st.integers(0, 9), st.text(min_size=1))
def test_directories_are_those_of_the_dumps_and_never_climb(
    run: str, key: str, step: int | None, stage: str
) -> None:
    part = Part(occurrence=1, microbatch=2)
    ours = step_directory(ROOT, run, key, step, stage, part)
    attempt = dump_paths.attempt_directory(ROOT, run=run, attempt_key=key, verl=False)
    assert ours == dump_paths.stage_directory(attempt, step, stage, part)
    assert ours.parent == step_directory(ROOT, run, key, step, stage, Part())
    assert len(ours.relative_to(ROOT).parts) == 5
    assert ".." not in ours.parts
    assert all(len(name.encode()) <= 150 for name in ours.parts)


def test_directories_read_as_the_design_says() -> None:
    found = step_directory(ROOT, "r", "session_5/01000000", 5, "actor_update")
    assert found == Path("/data/r/session_5_01000000/step_5/actor_update")
    assert attempt_directory(ROOT, "r", "..") == Path("/data/r/__")
    assert ring_directory(ROOT, "a/b") == Path("/data/ring/a_b")
    assert safe_name("") == "_"


def test_kept_files_of_attempts_with_like_keys_do_not_meet() -> None:
    one = kept_path(attempt_directory(ROOT, "r", "a/b"), "actor", 0, "incarnation-1", 5)
    other = kept_path(attempt_directory(ROOT, "r", "a_b"), "actor", 0, "incarnation-2", 5)
    assert one.parent == other.parent
    assert one != other
    assert kept_path(ROOT, "../x", 0, "\ud800/..", 1).parent == ROOT


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    for name in ("a/sub", "b", "outside", "a-not"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a" / "out").symlink_to(tmp_path / "outside")
    (tmp_path / "a" / "in").symlink_to(tmp_path / "b")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a" / "loop")
    return [tmp_path / "a", tmp_path / "b"]


@pytest.mark.parametrize("path", ["", "sub", "sub/new/file", "in/file", "{b}", "{b}/x", "./sub/.."])
def test_paths_inside(roots: list[Path], path: str) -> None:
    found = confine(path.format(b=roots[1]), roots)
    assert found.is_absolute()
    assert any(found.is_relative_to(root.resolve()) for root in roots)


@pytest.mark.parametrize(
    "path",
    [
        "..", "../outside", "sub/../../outside", "out", "out/file", "{a}-not", "{a}-not/x", "/",
        "/etc/passwd", "{b}/../outside", "a\0b", "in/../outside",
    ],
)  # fmt: skip
def test_paths_outside(roots: list[Path], path: str) -> None:
    with pytest.raises(Forbidden):
        confine(path.format(a=roots[0], b=roots[1]), roots)


def test_what_a_capture_wrote_is_read_wherever_it_lies(roots: list[Path], tmp_path: Path) -> None:
    _, files = dump_paths.claim_rank_directory(tmp_path / "outside" / "step_1", 0)
    (files / "dump_tensor_data").mkdir()
    (files / "leads_out").symlink_to("/etc")
    for path in (files, files / "dump.json", files / "dump_tensor_data" / "x.pt"):
        assert confine(path, roots) == path.resolve()
    for path in (files.parent, files / "leads_out" / "passwd", files / ".." / ".." / "other"):
        with pytest.raises(Forbidden):
            confine(path, roots)
    marker = files / DUMP_MARKER
    marker.unlink()
    marker.symlink_to("/etc/passwd")  # no proof of who may write here
    with pytest.raises(Forbidden):
        confine(files, roots)


def test_no_root_allows_nothing_and_a_loop_leads_nowhere(roots: list[Path]) -> None:
    with pytest.raises(Forbidden):
        confine("sub", [])
    with contextlib.suppress(Forbidden):  # what a loop resolves to is Python's own affair
        assert confine("loop/x", roots).is_relative_to(roots[0].resolve())


def test_a_root_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert confine("x", [tmp_path / "link"]) == (tmp_path / "real" / "x").resolve()
