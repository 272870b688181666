"""The answer of the doctor: symptoms with the evidence for and against them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stagescope_service.fields import Number, Step
from stagescope_service.rules.parts import MismatchPart
from stagescope_service.views.models.common import Model, Page, RunHeading


class Symptom(Model):
    """A rule of the rulebook, and what was found."""

    model_config = ConfigDict(populate_by_name=True)

    rule: Annotated[str, Field(examples=["rank_apart"])]
    """The rule's name: its file in the rulebook."""
    family: Literal["service", "precision", "mismatch", "reward", "time", "settings"]
    """Area that the rule examines."""
    title: str
    """The symptom, as the rule names it."""
    sentence: Annotated[
        str,
        Field(examples=["On actor 1 the rollout log-probs are 1 token late, since step 6"]),
    ]
    """The symptom with its place, its steps, and how many of them show it."""
    verdict: Literal["found", "not found", "not measured"]
    """`not measured`: the run lacks what the rule needs; `record` and `waits` say what."""
    sure: Number
    """Share of the examined steps, ranks or samples that show the symptom, 0 to 1; for trends its
    strength."""
    shown: int | None
    """Number of examined items that show it, since it began; null: it is no share."""
    examined: int | None
    """Number of examined items."""
    unit: Annotated[str | None, Field(examples=["step"])]
    """What was examined: `step`, `sample` or `group`."""
    since_step: int | None
    """The first step that shows it; null: not found, or not a matter of steps."""
    last_step: int | None
    """The last step that shows it, where it ended; null: it lasts, or is not a matter of steps."""
    cause: Annotated[str | None, Field(examples=["streams_shifted"])]
    """The found rule that explains it and that nothing explains; null: it is a cause itself, or
    was not found."""
    explains: Annotated[list[str], Field(examples=[["mismatch_jump", "rank_apart"]])]
    """The found rules whose cause it is."""
    explained_by: Annotated[list[str], Field(examples=[["streams_shifted"]])]
    """The found rules that explain it: look at those first."""
    where: str | None
    """The rank, round, stage or operator; null: the whole step."""
    supports: Annotated[list[str], Field(alias="for", description="Evidence for it, in numbers.")]
    against: list[str]
    """Evidence against it, in numbers; or why it is not measured."""
    meaning: str
    """The meaning of the symptom."""
    next: list[str]
    """What to do. The first is the experiment that proves it; commands begin with `stagescope`."""
    figure: str | None
    """Path of a figure that shows it; null: there is none."""
    record: str | None
    """What to record, so that it is measured; null: it is, or nothing can be recorded."""
    waits: bool
    """Whether it is not measured because more steps are needed, and nothing else."""
    sources: list[str]
    """Where the field met it."""


class Note(Model):
    """A remark that is no symptom, but matters to a comparison of two runs."""

    rule: Annotated[str, Field(examples=["verl_settings"])]
    """The name of the rule that notes it."""
    text: str
    """What was noted."""
    meaning: str
    """Its meaning for a comparison."""


class Diagnosis(RunHeading, Page[Symptom]):
    """The symptoms of a run: causes first, the likeliest one first."""

    attempt: int | None
    """The requested attempt; null: the current attempts."""
    from_step: Step | None
    """The first step that was looked at; null: no step is closed."""
    to_step: Step | None
    """The last one; null: no step is closed."""
    steps: int
    """Number of closed steps that were looked at."""
    measured: int
    """Number of these that have numbers."""
    measured_step: Step | None
    """Number of the newest step with numbers, which `mismatch` is of; null: none."""
    healthy: bool | None
    """Whether no symptom lasts, and no warning or error stands that no rule explains; null: nothing
    is wrong yet, and no closed step was looked at."""
    text: str
    """How many causes were found in which run and attempt, and which findings no rule explains. It
    says why the requested step was not looked at, if it was not. Other symptoms follow that earlier
    attempts ended with, or showed in steps that are now replaced."""
    unexplained: Annotated[dict[str, int], Field(examples=[{"webhook_failed": 2}])]
    """Kind of finding -> number of warnings and errors that stand and that no rule judged."""
    notes: list[Note]
    """Remarks that are no symptom, but matter to a comparison of two runs."""
    mismatch: list[MismatchPart]
    """The mismatch by its parts; empty: no step has both streams, or they are equal."""
