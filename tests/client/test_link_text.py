"""The command line names its own commands, and a session its methods, where JSON names paths."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from click import Context

from stagescope import cli
from stagescope.link_text import _OF_SESSION, command, session_call
from stagescope.session import Session
from stagescope.step import Step
from stagescope_service.rules.document import defaults
from stagescope_wire.links import (
    _OF_RUN,
    STEP_NOUNS,
    Link,
    links_from_json,
    reworded,
    with_links,
    without_links,
)

COMMANDS = cli.main.list_commands(Context(cli.main))
SERVICE = Path(__file__).parents[2] / "service" / "stagescope_service"


@pytest.mark.parametrize(
    ("link", "path", "as_command", "as_call"),
    [
        (Link("steps"), "/steps", "stagescope steps", "session.steps()"),
        (
            Link("attempts", run="a-1"), "/runs/a-1/attempts", "stagescope attempts --run a-1",
            'session.attempts("a-1")',
        ),
        (
            Link("metric_names", run="a"), "/runs/a/metrics", "stagescope series --run a",
            'session.metric_names(run="a")',
        ),
        (
            Link("losses", run="a"), "/losses?run=a", "stagescope lost --run a",
            'session.lost(run="a")',
        ),
        (
            Link("loss", 5), "/steps/5/loss", "stagescope gradient 5", "/steps/5/loss",
        ),
        (Link("captures"), "/captures", "stagescope captures", "session.captures()"),
        (
            Link("captures", name="3f0c"), "/captures/3f0c", "stagescope progress 3f0c",
            'session.progress("3f0c")',
        ),
        (
            Link("findings", name="ID"), "/findings/ID", "stagescope finding ID",
            'session.finding("ID")',
        ),
        (
            Link.to_step("metrics", None), "/steps/latest/metrics", "stagescope metrics latest",
            'session.step("latest").metrics()',
        ),
        (
            Link.to_step("tokens", 5, query={"kind": "nonfinite"}),
            "/steps/5/tokens?kind=nonfinite",
            "stagescope tokens 5 --kind nonfinite",
            'session.step(5).tokens(kind="nonfinite")',
        ),
        (
            Link("divergence"), "/operators/divergence", "stagescope divergence",
            "session.divergence(a, b)",
        ),
        (
            Link("stuck", 5, run="a-1"), "/steps/5/stuck?run=a-1", "stagescope stuck 5 --run a-1",
            'session.step(5, run="a-1").stuck()',
        ),
        (
            Link("tokens", 5, run="a", attempt=2, query={"kind": "worst"}),
            "/steps/5/tokens?kind=worst&run=a&attempt=2",
            "stagescope tokens 5 --kind worst --run a --attempt 2",
            'session.step(5, run="a", attempt=2).tokens(kind="worst")',
        ),
        (
            Link("findings", run="a", attempt=2), "/findings?run=a&attempt=2",
            "stagescope findings --run a --attempt 2", 'session.findings(run="a", attempt=2)',
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)  # fmt: skip
def test_a_link_is_a_path_a_command_and_a_call(
    link: Link, path: str, as_command: str, as_call: str
) -> None:
    assert link.path == path
    assert command(link, COMMANDS) == f"`{as_command}`"
    assert session_call(link) == as_call
    assert links_from_json([{**link.to_json(), "of a later version": 1}]) == (link,)


def test_a_link_without_a_command_or_a_method_is_its_path() -> None:
    assert command(Link("stages", 5), ["lost"]) == "/steps/5/stages"
    assert session_call(Link("example_firing", run="a")) == "/example_firing?run=a"


def test_advice_ends_with_its_links() -> None:
    links = (Link("stages", 5, shows="who has arrived"), Link("losses", shows="what was lost"))
    said = "see /steps/5/stages for who has arrived, /losses for what was lost"
    assert with_links("", links) == said
    assert with_links("did you mean it?", links) == f"did you mean it? {said}"
    assert with_links("wait", ()) == "wait"
    for advice in ("", "did you mean it?", "wait; then ask again"):
        text = with_links(advice, links)
        assert without_links(text, links) == advice
        assert reworded(text, links, session_call) == with_links(advice, links, session_call)


def test_the_advice_of_another_version_is_left_as_it_is() -> None:
    old = "see /steps/5/stages?run=a-1 for who has arrived"
    assert reworded(old, (), session_call) == old
    assert reworded(old, [Link("losses")], session_call) == old
    for unread in (None, "stages", [{"noun": 5}, "stages"], {"noun": "stages"}):
        assert links_from_json(unread) == ()


def test_links_name_run_and_attempt_where_the_answer_is_about_one() -> None:
    links = (
        Link("tokens", 5, query={"kind": "worst"}), Link("losses"), Link("devices"),
        Link("engines"), Link("stuck", 5, run="b", attempt=1),
    )  # fmt: skip
    assert [link.within("a", 3).path for link in links] == [
        "/steps/5/tokens?kind=worst&run=a&attempt=3",
        "/losses?run=a&attempt=3",
        "/devices?run=a",
        "/engines",
        "/steps/5/stuck?run=b&attempt=1",
    ]
    for options, nouns in {
        "run": _OF_RUN | STEP_NOUNS,
        "attempt": _OF_RUN - {"devices"} | STEP_NOUNS - {"stacks", "weights"},
    }.items():
        for noun in nouns:
            named = cli.main.get_command(Context(cli.main), noun)
            assert named is not None
            assert options in {each.name for each in named.params}, noun


def test_the_calls_exist() -> None:
    assert all(callable(getattr(Session, name)) for name in _OF_SESSION)
    assert all(callable(getattr(Step, name)) for name in STEP_NOUNS)


def test_every_link_of_the_service_has_a_command_and_a_call() -> None:
    links = [*_links_of_the_service()]
    assert len(links) >= 30
    findings = [rule.actions.finding for rule in defaults().rules]
    links += [Link(noun, 5) for each in findings if each is not None for noun in each.see]
    for link in links:
        assert command(link, COMMANDS).startswith("`stagescope "), link
        assert session_call(link).startswith("session."), link


def _links_of_the_service() -> Iterator[Link]:
    """Yield what is linked to in the service's code: its nouns, with a step or a name if so."""
    for path in SERVICE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called, noun = ast.unparse(node.func), node.args[0]
            if called not in ("Link", "Link.to_step") or not isinstance(noun, ast.Constant):
                continue
            assert isinstance(noun.value, str)
            is_of_step = called == "Link.to_step" or len(node.args) > 1
            given = {each.arg for each in node.keywords}
            one, run = ("r" if name in given else None for name in ("name", "run"))
            yield Link(noun.value, 5 if is_of_step else None, one, run)


def test_no_text_of_the_service_advises_a_path() -> None:
    """Every path in advice is a link, so that each reader is shown it in its words."""
    for path in SERVICE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg in ("advice", "expected"):
                for text in ast.walk(node.value):
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        words = text.value.replace("(", " ").split()
                        nouns = {f"/{noun}" for noun in (*_OF_SESSION, "runs", "operators")}
                        assert not [each for each in words if _root(each) in nouns], (path, text)


def _root(word: str) -> str:
    return f"/{word.split('/')[1].rstrip('.,;:')}" if word.startswith("/") else ""
