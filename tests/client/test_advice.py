"""The command line names its own commands where the service names paths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click import Context

from stagescope import cli
from stagescope.terminal import for_command_line

COMMANDS = cli.main.list_commands(Context(cli.main))
API = Path(__file__).parents[2] / "service" / "stagescope_service" / "api"


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


def test_every_path_that_the_service_advises_has_a_command() -> None:
    source = "\n".join(path.read_text() for path in API.rglob("*.py"))
    advised = re.findall(r'advice=\(?\s*f?"([^"]*see (?:GET )?/[^"]*)"', source)
    assert len(advised) >= 6
    for text in advised:
        made = for_command_line(re.sub(r"\{[^}]*\}", "x", text), COMMANDS)
        assert not re.search(r"(^|\s)/", made), made
