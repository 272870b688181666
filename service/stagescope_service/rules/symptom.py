"""A symptom as data: a rule that is read from YAML.

A rule names a function of `EVIDENCE` with its parameters, and says what a symptom means. It also
says what it explains, what to do next, what to record if evidence is lacking, and where the field
met it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple

from stagescope_service.rules import fields
from stagescope_service.rules.evidence import Evidence
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.symptoms import (
    experiments,
    firings,
    mismatch,
    positions,
    prompts,
    reports,
    rewards,
    routing,
    scalars,
    silence,
    slopes,
    staleness,
    streams,
    tails,
    trends,
    turns,
    updates,
)
from stagescope_wire.errors import InvalidPlan

FAMILIES: Final = ("service", "precision", "mismatch", "reward", "time", "settings")
"""Subjects of the rules, in the order in which you must be able to trust them."""
EVIDENCE: Final[Mapping[str, Callable[..., Evidence]]] = {
    function.__name__: function
    for function in (
        trends.jump, trends.step_change, trends.growth, scalars.scalar_above,
        scalars.scalar_below,
        scalars.scalar_falls, scalars.scalar_rises, scalars.scalar_flat, scalars.scalar_spike,
        mismatch.rank_apart, mismatch.rounds_rise, mismatch.round_apart, mismatch.noise_floor,
        mismatch.engine_apart, staleness.stale, staleness.versions_ahead,
        positions.position_rises, tails.hidden_tails, tails.tokens_apart,
        streams.suspect, silence.stopped, silence.quiet, slopes.sampling, slopes.behind,
        streams.rounded, streams.edge_token, streams.lattice,
        routing.routes_wrong, routing.routes_explain,
        prompts.retokenised, turns.turn_stops, updates.current_differs, experiments.bisected,
        rewards.groups, rewards.truncated, firings.fired, reports.finding, reports.hangs,
        reports.lost, reports.scalars_not_finite, reports.failed, reports.partial,
        reports.unreported, reports.straggler, reports.settings, reports.stream_changes,
    )
}  # fmt: skip
"""Name in a rule -> the function."""


class Condition(NamedTuple):
    """A function of `EVIDENCE`, and its keyword arguments as the YAML has them."""

    function: str
    parameters: Mapping[str, Any]

    @classmethod
    def parse(cls, value: object, field: str) -> Condition:
        """Read `{function: name, parameter: value, ...}`.

        Raises:
            InvalidPlan: there is no such function, or a parameter is unknown or missing.
        """
        parameters = dict(value) if isinstance(value, Mapping) else {}
        function = fields.one_of(*sorted(EVIDENCE))(parameters.pop("function", None), field)
        try:
            inspect.signature(EVIDENCE[function]).bind(None, **parameters)
        except TypeError as error:
            raise InvalidPlan(f"{field}: {function}: {error}", expected="its parameters") from None
        return cls(function, parameters)

    def evaluate(self, history: RunHistory) -> Evidence:
        """Return the evidence in a history."""
        return EVIDENCE[self.function](history, **self.parameters)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SymptomRule(fields.Declared):
    """A symptom.

    Attributes:
        name: the name of its file.
        title: the symptom, as a sentence without a full stop.
        family: one of `FAMILIES`.
        evidence: how it is found.
        meaning: what the symptom means.
        next: what to do. The first is the experiment that proves it; commands begin with
            `stagescope`.
        sources: where the field met it; empty: only this service knows it.
        figure: the path of a figure, with {run}, {attempt} and {step}; None: there is none.
        record: what to record where it is not measured; None: nothing can be done.
        explains: names of rules, or patterns with `*`: if one is found, too, it follows from this.
        contradicted_by: names of facts (`causes.FACTS`) that speak against this as a cause.
        findings: kinds of findings that say the same as its evidence, which does not read them.
    """

    name: Annotated[str, fields.text()]
    title: Annotated[str, fields.text()]
    family: Annotated[str, fields.one_of(*FAMILIES)]
    evidence: Annotated[Condition, Condition.parse]
    meaning: Annotated[str, fields.text()]
    next: Annotated[tuple[str, ...], fields.texts]
    sources: Annotated[tuple[str, ...], fields.texts] = ()
    figure: Annotated[str | None, fields.text()] = None
    record: Annotated[str | None, fields.text()] = None
    explains: Annotated[tuple[str, ...], fields.texts] = ()
    contradicted_by: Annotated[tuple[str, ...], fields.texts] = ()
    findings: Annotated[tuple[str, ...], fields.texts] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of findings that the rule looks at, patterns with `*`."""
        of_causes = (f"streams_{cause}" for cause in self.causes)
        return (*self.evidence.parameters.get("kinds", ()), *of_causes, *self.findings)

    @property
    def causes(self) -> tuple[str, ...]:
        """The causes of a step's comparability that the rule answers for."""
        return tuple(self.evidence.parameters.get("checks", ()))


def read_symptom(name: str, text: str) -> SymptomRule:
    """Parse the content of a symptom's file, which ships with the service.

    Raises:
        InvalidPlan: names the file and the field that is wrong.
    """
    document = fields.load_own_yaml(text)
    return SymptomRule.parse(document | {"name": name}, f"rule {name}")
