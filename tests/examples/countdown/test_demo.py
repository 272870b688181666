"""The demo says what it waited for, how long, and what a slow machine may do about it."""

from __future__ import annotations

import re
import sys

import pytest

from examples.countdown import demo


def test_a_wait_that_was_too_short_says_how_to_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATIENCE", "3")
    with pytest.raises(AssertionError) as caught:
        demo.wait_for("the warm-up", lambda: None, seconds=0.1, progress=lambda: "step 2 came last")
    pattern = (
        "waited 0 s for the warm-up, .* slow machine: `PATIENCE=6 make demo` .*step 2 came last"
    )
    assert re.fullmatch(pattern, str(caught.value))
    monkeypatch.setenv("PATIENCE", "much")
    assert demo.patience() == 1.0


def test_a_training_that_takes_too_long_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(demo, "ROOT", tmp_path_factory.mktemp("demo"))
    monkeypatch.setattr(sys, "executable", "/bin/echo")  # prints its arguments, and ends well
    training = demo.Training("address", 1)
    training.wait(20.0)
    assert "--run countdown" in training.last_line()
    assert str(training.log) in training.last_line()
