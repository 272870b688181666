"""The command line names its own commands where the service names paths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click import Context

from stagescope import advice, cli
from stagescope.advice import for_command_line, for_session, of_attempt, of_run
from stagescope.session import Session
from stagescope.step import Step

COMMANDS = cli.main.list_commands(Context(cli.main))
SERVICE = Path(__file__).parents[2] / "service" / "stagescope_service"


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("see /steps", "see `stagescope steps`"),
        ("see /runs/a-1/attempts", "see `stagescope attempts --run a-1`"),
        ("see /captures for all of them", "see `stagescope captures` for all of them"),
        ("see /captures/3f0c for who", "see `stagescope progress 3f0c` for who"),
        ("see GET /engines", "see `stagescope engines`"),
        (
            "see /steps/5/stages for who has arrived, /losses for what was lost",
            "see `stagescope stages 5` for who has arrived, `stagescope losses` for what was lost",
        ),
        ("look at /tmp/steps or /home", "look at /tmp/steps or /home"),
        ("leave out --ray", "leave out --ray"),
        ("a step/rank of it; http://head:8700/steps", "a step/rank of it; http://head:8700/steps"),
    ],
)
def test_paths_become_commands(said: str, meant: str) -> None:
    assert for_command_line(said, COMMANDS) == meant


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("see /steps", "see session.steps()"),
        ("see /runs/a-1/attempts", 'see session.attempts("a-1")'),
        ("see /captures for all of them", "see session.captures() for all of them"),
        ("see /captures/3f0c for who", 'see session.progress("3f0c") for who'),
        ("see GET /engines", "see session.engines()"),
        (
            "see /steps/5/stages for who has arrived, /losses for what was lost",
            "see session.step(5).stages() for who has arrived, session.losses() for what was lost",
        ),
        ("in /steps/latest/metrics.", 'in session.step("latest").metrics().'),
        ("/steps/5/tokens?kind=nonfinite", 'session.step(5).tokens(kind="nonfinite")'),
        ("compared by /operators/divergence", "compared by session.divergence(a, b)"),
        ("/steps/5/stuck?run=a-1 names", 'session.step(5, run="a-1").stuck() names'),
        ("/exact?run=a-1 says", 'session.exact(run="a-1") says'),
        (
            "/steps/5/tokens?kind=worst&run=a&attempt=2",
            'session.step(5, run="a", attempt=2).tokens(kind="worst")',
        ),
        ("/findings?run=a&attempt=2", 'session.findings(run="a", attempt=2)'),
        ("look at /tmp/steps or /home", "look at /tmp/steps or /home"),
    ],
)
def test_paths_become_calls_of_a_session(said: str, meant: str) -> None:
    assert for_session(said) == meant


def test_paths_name_their_run() -> None:
    text = of_run("see /steps/5/tokens?kind=worst, /losses, /engines, /steps/5/stuck?run=b", "a-1")
    assert text == (
        "see /steps/5/tokens?kind=worst&run=a-1, /losses?run=a-1, /engines, /steps/5/stuck?run=b"
    )
    assert for_session(text).startswith('see session.step(5, run="a-1").tokens(kind="worst")')
    commands = {name: cli.main.get_command(Context(cli.main), name) for name in advice._OF_RUN}
    for name, command in commands.items():
        assert command is not None
        assert "run" in {each.name for each in command.params}, name


def test_paths_name_their_attempt() -> None:
    text = of_run(
        "see /steps/5/tokens?kind=worst, /losses, /devices, /steps/5/stuck?attempt=1", "a"
    )
    text = of_attempt(text, 3)
    assert text == (
        "see /steps/5/tokens?kind=worst&run=a&attempt=3, /losses?run=a&attempt=3, /devices?run=a, "
        "/steps/5/stuck?attempt=1&run=a"
    )
    assert for_command_line(text, COMMANDS) == (
        "see `stagescope tokens 5 --kind worst --run a --attempt 3`, "
        "`stagescope losses --run a --attempt 3`, `stagescope devices --run a`, "
        "`stagescope stuck 5 --attempt 1 --run a`"
    )
    nouns = {*(advice._OF_RUN - {"devices"}), *(advice._OF_STEP - {"stacks", "weights"})}
    for name in nouns:
        command = cli.main.get_command(Context(cli.main), name)
        assert command is not None
        assert "attempt" in {each.name for each in command.params}, name


def test_the_calls_exist() -> None:
    assert all(callable(getattr(Session, name)) for name in advice._OF_SESSION)
    assert all(callable(getattr(Step, name)) for name in advice._OF_STEP)


def test_every_path_that_the_service_advises_has_a_command() -> None:
    source = "\n".join(path.read_text() for path in SERVICE.rglob("*.py"))
    advised = re.findall(r'(?:advice=\(?\s*f?|\+ )"([^"]*[( ](?:GET )?/[a-z][^"]*)"', source)
    advised += re.findall(r"advice: ([^:]*)\n", (SERVICE / "triggers/defaults.yaml").read_text())
    assert len(advised) >= 15
    for text in advised:
        filled = re.sub(r"\{[^}]*\}", "5", text)
        for made in (for_command_line(filled, COMMANDS), for_session(filled)):
            assert not re.search(r"(^|[\s(])/", made), made
