"""Links to answers of the service, as data that each kind of client shows in its own words.

The service's JSON has the paths in the advice's text, and the links beside it. The command line
shows the same links as commands, a session shows them as calls of its methods.

Usage:
    >>> links = (Link("stages", step=5, shows="who has arrived"), Link("losses"))
    >>> with_links("ask again later", links)
    'ask again later; see /steps/5/stages for who has arrived, /losses'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, TypeAlias
from urllib.parse import quote, urlencode

from stagescope_wire.nonfinite import JsonObject

_OF_RUN: Final = frozenset(
    {"canary", "devices", "exact", "findings", "losses", "series", "stacks", "steps", "weights"}
)
"""Nouns whose answers are about one run, besides those about a step."""

STEP_NOUNS: Final = frozenset(
    {
        "dumps", "kept", "metrics", "operators", "ranks", "rounds", "samples", "scalars", "stacks",
        "stages", "stuck", "tokens", "weights",
    }
)  # fmt: skip
"""Nouns whose answers are of one step."""


def page_of_run(page: str, run: str) -> str:
    """Return the address of a run's page; `page` is the address under which the page opens."""
    return f"{page.rstrip('/')}/#/runs/{quote(run, safe='')}"


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """An answer of the service.

    Attributes:
        noun: the last word of the answer's path: `stages`, `losses`, `captures`.
        step: the step that it is about: a number, or `latest`.
        name: the id of one of them, such as of a capture.
        run: the run that it is about; None: the service's default.
        attempt: the number of the attempt; None: the newest.
        query: further arguments.
        shows: what the reader finds there, as in "see ... for the names".
    """

    noun: str
    step: int | Literal["latest"] | None = None
    name: str | None = None
    run: str | None = None
    attempt: int | None = None
    query: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shows: str = ""

    @classmethod
    def to_step(
        cls, noun: str, step: int | None, *, query: Mapping[str, str] | None = None, shows: str = ""
    ) -> Link:
        """Return a link to an answer about a step, None for the newest one."""
        return cls(noun, "latest" if step is None else step, query=query or {}, shows=shows)

    @property
    def path(self) -> str:
        """The path of the answer in the API."""
        arguments = self.arguments()
        if self.noun == "attempts":
            path = f"/runs/{quote(arguments.pop('run', ''), safe='')}/attempts"
        elif self.noun == "metric_names":
            path = f"/runs/{quote(arguments.pop('run', ''), safe='')}/metrics"
        elif self.noun == "divergence":
            path = "/operators/divergence"
        elif self.step is not None:
            path = f"/steps/{self.step}/{self.noun}"
        else:
            path = f"/{self.noun}" + (f"/{quote(self.name, safe='')}" if self.name else "")
        return path + (f"?{urlencode(arguments)}" if arguments else "")

    def arguments(self) -> dict[str, str]:
        """Return the query with run and attempt, where they are given."""
        run = {} if self.run is None else {"run": self.run}
        attempt = {} if self.attempt is None else {"attempt": str(self.attempt)}
        return {**self.query, **run, **attempt}

    def within(self, run: str | None, attempt: int | None = None) -> Link:
        """Return the link with a run and an attempt, if its answer needs one and names none."""
        if self.step is None and self.noun not in _OF_RUN:
            return self
        if self.step is None and self.noun == "devices":
            attempt = None
        own_run = run if self.run is None else self.run
        own_attempt = attempt if self.attempt is None else self.attempt
        return dataclasses.replace(self, run=own_run, attempt=own_attempt)

    def to_json(self) -> JsonObject:
        """Return the form that `links_from_json` reads."""
        return {"path": self.path, **dataclasses.asdict(self)}


LinkText: TypeAlias = Callable[[Link], str]
"""Returns the words in which a reader is shown a link."""


def path_of(link: Link) -> str:
    """Return the API's path of a link."""
    return link.path


def links_from_json(value: object) -> tuple[Link, ...]:
    """Return the links in JSON; what this version cannot read is left out."""
    names = {field.name for field in dataclasses.fields(Link)}
    return tuple(
        Link(**{name: item for name, item in each.items() if name in names})
        for each in (value if isinstance(value, list | tuple) else ())
        if isinstance(each, Mapping) and isinstance(each.get("noun"), str)
    )


def links_text(links: Iterable[Link], link_text: LinkText = path_of) -> str:
    """Return links as `see A for this, B for that`; empty if there are none."""
    parts = [f"{link_text(each)}{each.shows and f' for {each.shows}'}" for each in links]
    return f"see {', '.join(parts)}" if parts else ""


def with_links(advice: str, links: Iterable[Link], link_text: LinkText = path_of) -> str:
    """Return advice, followed by its links."""
    text = links_text(links, link_text)
    between = "" if not (advice and text) else " " if advice.endswith("?") else "; "
    return f"{advice}{between}{text}"


def without_links(text: str, links: Iterable[Link]) -> str | None:
    """Return the advice in the result of `with_links`; None if `text` does not end with `links`."""
    end = links_text(links)
    if not text.endswith(end):
        return None
    return text.removesuffix(end).removesuffix(" ").removesuffix(";") if end else text


def reworded(text: str, links: Iterable[Link], link_text: LinkText) -> str:
    """Return the result of `with_links` with the links in other words.

    A text that does not end with the links, such as of another version, is returned unchanged.
    """
    links = tuple(links)
    advice = without_links(text, links)
    return text if advice is None else with_links(advice, links, link_text)
