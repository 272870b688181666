"""Figures of the doctor: the place of the right cause, and false alarms."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.service.rules.benchmark.healthy import HEALTHY
from tests.service.rules.benchmark.play import Bench, Fault, Row, play

ASKED_EVERY: Final = 5
"""Steps of a healthy run between two questions to the doctor."""


class Result(NamedTuple):
    """The doctor's answer to a fault."""

    fault: Fault
    named: tuple[str, ...]
    """The rules of the causes, in their order, with their places."""
    position: int | None
    """Of the right cause, from 1; None: it is not among them."""
    second: int | None
    """Of the other cause of two faults."""

    @property
    def is_first(self) -> bool:
        """Whether the first cause is right."""
        return self.position == 1 or (bool(self.fault.second) and self.second == 1)

    @property
    def is_among_three(self) -> bool:
        """Whether the right causes are among the first three."""
        places = [self.position, self.second] if self.fault.second else [self.position]
        return all(place is not None and place <= 3 for place in places)


class Alarm(NamedTuple):
    """A symptom that a healthy run does not have."""

    run: str
    step: int
    rule: str
    text: str


def causes_of(found: Sequence[Row]) -> list[tuple[str, str]]:
    """Return rule and place of the causes of an answer, the likeliest first."""
    return [(row["rule"], row["where"] or "") for row in found if not row["explained_by"]]


def judge(bench: Bench, fault: Fault, run: str) -> Result:
    """Play a fault and compare the doctor's answer with what it should name."""
    play(bench, run, fault)
    causes = [each for each in causes_of(bench.found(run)) if each[0] not in fault.true]
    return Result(
        fault,
        tuple(f"{rule} ({where})" if where else rule for rule, where in causes),
        _place(causes, fault.causes, fault.where),
        _place(causes, fault.second, ""),
    )


def _place(causes: Iterable[tuple[str, str]], rules: Iterable[str], where: str) -> int | None:
    places = (
        at for at, (rule, place) in enumerate(causes, 1) if rule in {*rules} and where in place
    )
    return next(places, None)


def alarms_of(bench: Bench, fault: Fault, run: str) -> list[Alarm]:
    """Play a healthy run; return what the doctor finds at any of its steps, each rule once."""
    play(bench, run, fault)
    alarms: dict[str, Alarm] = {}
    for step in range(ASKED_EVERY, fault.scene.steps + 1, ASKED_EVERY):
        for row in bench.found(run, step):
            if row["rule"] not in fault.true:
                text = "; ".join(row["for"])
                alarms.setdefault(row["rule"], Alarm(fault.name, step, row["rule"], text))
    return [*alarms.values()]


class Figures(NamedTuple):
    """The published figures of some faults."""

    faults: int
    kinds: int
    first: int
    """Faults with the right cause first."""
    among_three: int
    """Faults with the right causes among the first three."""

    @classmethod
    def of(cls, results: Sequence[Result]) -> Figures:
        """Return the figures of judged faults."""
        return cls(
            len(results),
            len({each.fault.kind for each in results}),
            sum(each.is_first for each in results),
            sum(each.is_among_three for each in results),
        )

    @property
    def row(self) -> str:
        """The row of a table in Markdown."""
        shares = (f"{each} ({each / self.faults:.1%})" for each in (self.first, self.among_three))
        return " | ".join((f"{self.faults} of {self.kinds} kinds", *shares))


def table(results: Sequence[Result], held_out: Collection[str], alarms: Sequence[Alarm]) -> str:
    """Return the figures as Markdown: of all faults and of those held out, and false alarms."""
    held = [each for each in results if each.fault.name in held_out] or results
    steps = sum(each.scene.steps for each in HEALTHY)
    return "\n".join((
        "| planted faults | right cause first | among the first three |",
        "| --- | --- | --- |",
        f"| all: {Figures.of(results).row} |",
        f"| held out while the rules were tuned: {Figures.of(held).row} |",
        "",
        f"False alarms in {steps} healthy steps of {len(HEALTHY)} runs: {len(alarms)}.",
    ))  # fmt: skip


def measure(
    faults: Sequence[Fault], healthy: Sequence[Fault], processes: int = 2
) -> tuple[list[Result], list[Alarm]]:
    """Judge faults and healthy runs, in several processes."""
    work = [(each, False) for each in faults] + [(each, True) for each in healthy]
    # Healthy runs are the longest: they begin first.
    order = sorted(range(len(work)), key=lambda at: -work[at][0].scene.steps)
    shares = [[work[at] for at in order[first::processes]] for first in range(processes)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        answers = [*itertools.chain.from_iterable(pool.map(_names, _numbered(shares)))]
    by_name = {each.name: each for each, _ in work}
    results = {name: Result(by_name[name], *rest) for name, rest, _ in answers if rest is not None}
    alarms = [alarm for _, rest, alarms in answers if rest is None for alarm in alarms]
    return [results[each.name] for each in faults], alarms


def _numbered(shares: Sequence[Sequence[tuple[Fault, bool]]]) -> list[list[tuple[str, bool]]]:
    return [[(fault.name, is_healthy) for fault, is_healthy in share] for share in shares]


_Answer = tuple[str, tuple[tuple[str, ...], int | None, int | None] | None, list[Alarm]]


def _names(share: Sequence[tuple[str, bool]]) -> list[_Answer]:
    """Judge runs by their names: faults hold functions, which do not travel."""
    from tests.service.rules.benchmark.faults import FAULTS

    by_name = {each.name: each for each in (*FAULTS, *HEALTHY)}
    found: list[_Answer] = []
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as home:
        bench = Bench(Path(home) / "home")
        try:
            for at, (name, is_healthy) in enumerate(share):
                run = f"run-{at}"
                if is_healthy:
                    found.append((name, None, alarms_of(bench, by_name[name], run)))
                else:
                    result = judge(bench, by_name[name], run)
                    found.append((name, result[1:], []))
        finally:
            bench.close()
    return found


def _fast_folder() -> str | None:
    """Return a folder in memory, so that no commit waits for a disk; None: the usual one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
