"""Modules of other people patched when they are imported, and whatever may be odd about them."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from stagescope_workers.integrations.patches import (
    ABSENT,
    APPLIED,
    WAITING,
    Function,
    Patch,
    Patches,
)
from stagescope_workers.integrations.verl import __main__ as listing
from stagescope_workers.integrations.verl import hooks, plugin
from stagescope_workers.integrations.verl.modes import VARIABLE, Mode, current_mode

NAME = "stagescope_other_people"
SOURCE = """
def function(value):
    return ["theirs", value]

async def later():
    return "theirs"

class Base:
    def method(self):
        return "theirs"

class Derived(Base):
    @staticmethod
    def static():
        return "theirs"

seen_loader = __spec__.loader, __loader__
"""

Write = Callable[[str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that writes the module; nothing of it is left behind."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("RANK", raising=False)

    def write(source: str) -> None:
        (tmp_path / f"{NAME}.py").write_text(source)
        importlib.invalidate_caches()

    write(SOURCE)
    yield write
    sys.modules.pop(NAME, None)


def ours(function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: object) -> list[object]:
        return ["ours", function(*args)]

    return run


def patch(path: str = "function", wrap: Any = ours) -> Patch:
    return Patch(NAME, path, wrap, "a purpose", frozenset({"all"}))


def install(*patches: Patch) -> Patches:
    installed = Patches(patches)
    installed.install()
    return installed


def imported() -> Any:
    return importlib.import_module(NAME)


def test_waits_for_the_import(write: Write) -> None:
    one = patch()
    install(one)
    assert (one.state, NAME in sys.modules) == (WAITING, False)
    assert imported().function(1) == ["ours", ["theirs", 1]]
    assert one.state == APPLIED


def test_a_module_that_is_there_is_patched_at_once(write: Write) -> None:
    module, one = imported(), patch()
    install(one)
    assert (one.state, module.function(1)) == (APPLIED, ["ours", ["theirs", 1]])


def test_a_module_that_is_being_imported_is_patched_at_its_end(write: Write) -> None:
    half = ModuleType(NAME)
    half.__spec__ = importlib.util.find_spec(NAME)
    assert half.__spec__ is not None
    half.__spec__._initializing = True  # type: ignore[attr-defined]
    sys.modules[NAME] = half
    one = patch()
    install(one)
    assert one.state == WAITING
    del sys.modules[NAME]
    assert imported().function(1)[0] == "ours"


def test_twice_is_once(write: Write) -> None:
    one = patch()
    install(one)
    module = imported()
    first = module.function
    one.apply(module)
    assert module.function is first


def test_a_reload_is_patched_again(write: Write) -> None:
    install(patch())
    module = importlib.reload(imported())
    assert module.function(1) == ["ours", ["theirs", 1]]
    sys.modules.pop(NAME)
    assert imported().function(1) == ["ours", ["theirs", 1]]


def test_the_module_keeps_its_own_loader(write: Write) -> None:
    expected = type(imported().seen_loader[0])
    sys.modules.pop(NAME)
    install(patch())
    module = imported()
    assert [type(loader) for loader in module.seen_loader] == [expected, expected]
    assert type(module.__spec__.loader) is expected


def test_other_modules_are_not_looked_at(write: Write) -> None:
    installed = install(patch())
    assert installed.find_spec("another_module") is None


@pytest.mark.parametrize(
    "path",
    [
        "gone",
        "Gone.method",
        "Derived.gone",
        "Derived.method",
        "Derived.static",
        "Base",
        "seen_loader",
    ],
)
def test_what_is_not_there_is_reported_and_left(
    path: str, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    found, absent = patch(), patch(path)
    install(found, absent)
    module = imported()
    assert (found.state, absent.state) == (APPLIED, ABSENT)
    assert (module.Derived().method(), module.Derived.static()) == ("theirs", "theirs")
    [record] = caplog.records
    assert record.getMessage() == (
        f"not reported with this version: a purpose ({NAME}: {path} is absent)"
    )


def test_all_of_a_module_is_logged_in_one_line_by_rank_0(
    write: Write, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    install(patch("gone"), patch("Gone.method"))
    imported()
    assert caplog.records == []
    monkeypatch.setenv("RANK", "0")
    importlib.reload(imported())
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "gone" in record.getMessage()
    assert "Gone.method" in record.getMessage()


def test_a_wrapper_that_cannot_be_made_leaves_the_function(write: Write) -> None:
    def fails(function: object) -> None:
        raise LookupError("another form")

    one, two = patch("function", fails), patch("later")
    install(one, two)
    module = imported()
    assert module.function(1) == ["theirs", 1]
    assert "another form" in one.state
    assert module.later.__module__ == NAME  # `ours` is synchronous: no stand-in for it
    assert not hasattr(module.later, "__wrapped__")
    assert "asynchronous" in two.state


def test_a_module_that_cannot_be_imported_raises_its_own_error(write: Write) -> None:
    write("raise KeyError('theirs')")
    one = patch()
    install(one)
    with pytest.raises(KeyError, match="theirs"):
        imported()
    assert one.state == WAITING


# --- which functions of verl's, and when -----------------------------------------------------


def test_each_mode_has_its_patches() -> None:
    by_mode = {
        mode: {(patch.module, patch.path) for patch in hooks.patches(Mode(mode))}
        for mode in ("off", "metrics", "stages", "all")
    }
    carried = ("verl.trainer.constants_ppo", "get_ppo_ray_runtime_env")
    assert by_mode["off"] == {carried}
    assert by_mode["all"] == by_mode["metrics"] | by_mode["stages"]
    workers = "verl.workers.engine_workers"
    with_stages = {
        (workers, "ActorRolloutRefWorker.compute_log_prob"),
        (workers, "TrainingWorker.infer_batch"),
        ("verl.experimental.agent_loop.agent_loop", "AgentLoopWorker.generate_sequences"),
    }
    with_metrics = {
        ("verl.utils.debug.metrics", "calculate_debug_metrics"),
        ("verl.workers.utils.losses", "ppo_loss"),
        ("verl.trainer.ppo.ray_trainer", "compute_advantage"),
    }
    both = {
        carried,
        (workers, "TrainingWorker.train_mini_batch"),
        ("verl.utils.tracking", "Tracking.log"),
    }
    assert by_mode["stages"] >= with_stages | both
    assert by_mode["metrics"] >= with_metrics | both
    assert not by_mode["stages"] & with_metrics
    assert not by_mode["metrics"] & with_stages


@pytest.mark.parametrize(
    ("reported", "name"),
    [(None, "all"), ("", "all"), ("off", "off"), (" Metrics ", "metrics"), ("stages", "stages")],
)
def test_the_variable_chooses(
    reported: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reported is not None:
        monkeypatch.setenv(VARIABLE, reported)
    mode = current_mode()
    assert mode.name == name
    assert (mode.metrics, mode.stages) == (
        name in ("metrics", "all"),
        name in ("stages", "all"),
    )


def test_an_unknown_mode_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "metricks")
    assert current_mode().name == "all"
    assert "metricks" in caplog.text


def test_nothing_that_fails_at_the_start_reaches_verl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(mode: Mode) -> None:
        raise OSError("no more files")

    monkeypatch.setattr(hooks, "patches", fails)
    assert plugin._install() is None
    assert "no more files" in caplog.text


@pytest.mark.parametrize(
    ("raised", "state"),
    [
        ("ModuleNotFoundError('m', name='flash_attn')", "needs flash_attn"),
        # As transformers raises it.
        (
            "ModuleNotFoundError('requirements?')",
            "not imported: ModuleNotFoundError('requirements?'",
        ),
        ("OSError('no')", "not imported: OSError('no')"),
    ],
)
def test_the_list_tells_why_a_module_is_not_imported(
    write: Write, monkeypatch: pytest.MonkeyPatch, raised: str, state: str
) -> None:
    write(f"raise {raised}")
    monkeypatch.setattr(plugin, "INSTALLED", install(patch()))
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.1")
    assert state in CliRunner().invoke(listing.main).output


def test_the_list_tells_what_became_of_each(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = install(patch(), patch("gone"), Patch("no_such", "f", ours, "more", frozenset()))
    monkeypatch.setattr(plugin, "INSTALLED", installed)
    monkeypatch.setitem(sys.modules, "verl", ModuleType("verl"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.1")
    monkeypatch.setenv(VARIABLE, "metrics")
    lines = CliRunner().invoke(listing.main).output.splitlines()
    assert lines == [
        f"{VARIABLE}=metrics",
        "verl 0.9.1",
        f"applied    {NAME}:function  (a purpose)",
        f"absent     {NAME}:gone  (a purpose)",
        "no module  no_such:f  (more)",
    ]
