"""The text of /metrics: the state of the service, and the newest measured step of each run.

Cardinality is bounded: the newest runs, a fixed list of metrics, and labels with a fixed set of
values (role, kind, state). No label holds a rank, a step or an attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.queries.overview import Count, ListedRun, ListedStep
from stagescope_service.views.reading.completeness import verdicts
from stagescope_service.views.reading.step_summaries import StepSummaries
from stagescope_wire.errors import StagescopeError
from stagescope_wire.schema import ROLES, STAGES

log = logging.getLogger(__name__)

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

MAIN_METRICS: Final = (
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_std",
    "training/rollout_actor_probs_pearson_corr",
    "per_round/total_rounds",
    "per_round/max_round_diff",
    "per_round/max_diff_value",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/ppl_ratio",
    "rollout_corr/chi2_token",
    "train_rollout_logprob_abs_diff",
    "token_mult_prob_error",
    "calibration/ratio_mean",
    "calibration/z",
)
OTHER: Final = "other"
"""The label of values that jobs make up, whose number is unbounded."""


class _Gauge(NamedTuple):
    name: str
    help_text: str
    label: str | None
    """Label beside `run`."""


_COUNTS: Final[Mapping[str, _Gauge]] = {
    "attempts": _Gauge("attempts", "Attempts of a run.", None),
    "processes_live": _Gauge("processes_live", "Processes that hold their lease.", "role"),
    "stages_open": _Gauge("stages_open", "Stages begun and not ended.", "stage"),
    "steps_open": _Gauge("steps_open", "Steps that are not closed.", None),
    "payloads_announced": _Gauge(
        "payloads_announced", "Payloads announced and not yet settled: the lag.", None
    ),
    "losses": _Gauge("lost", "Lost data: announced and never arrived, or dropped.", "kind"),
    "findings": _Gauge("findings", "Findings.", "kind"),
    "dumps": _Gauge(
        "dumps", "Dumps by state; estimated: a rank said what a capture would cost.", "state"
    ),
}
_BYTES: Final[Mapping[str, Sequence[str]]] = {
    "payloads_announced": ("payload_bytes_announced", "Bytes of these payloads.", "run"),
    "files": ("file_bytes", "Bytes of tensors on disk: kept, ring.", "run", "kind"),
}
"""Counts with a size -> name, text and labels of the metric of the size."""
_LABEL_VALUES: Final[Mapping[str, frozenset[str]]] = {
    "role": frozenset(ROLES),
    "stage": frozenset(STAGES),
    "state": frozenset(
        {"estimated", "armed", "complete", "empty", "truncated", "failed", "missed", "skipped"}
    ),
}
_MAX_KINDS: Final = 40
_STEPS_SEARCHED: Final = 16
"""Newest steps of an attempt that are read at once; a measured one is mostly among them."""


class Counts:
    """The catalogue's counts. Counting takes longer as it grows, and a scrape never waits long.

    If the last count was slow, the next one runs in its own thread. Until it ends, the last counts
    are returned; `stagescope_counts_age_seconds` is their age.

    Args:
        catalogue: to count.
        patience: a count that took more seconds is slow.
    """

    def __init__(self, catalogue: Catalogue, *, patience: float = 0.2) -> None:
        self._catalogue = catalogue
        self._patience = patience
        self._lock = threading.Lock()
        self._counting: threading.Thread | None = None
        self._counts: dict[str, list[Count]] | None = None
        self._began = self._seconds = 0.0

    def read(self) -> tuple[dict[str, list[Count]], float]:
        """Return the counts and their age in seconds.

        Raises:
            CatalogueUnavailable: the catalogue cannot be read, and there are no earlier counts.
        """
        with self._lock:
            if self._counts is None or self._seconds <= self._patience:
                self._count()
            elif self._counting is None or not self._counting.is_alive():
                self._counting = threading.Thread(
                    target=self._count_again, name="prometheus-counts", daemon=True
                )
                self._counting.start()
            assert self._counts is not None
            return self._counts, time.monotonic() - self._began

    def _count(self) -> None:
        began = time.monotonic()
        self._counts = self._catalogue.counts()
        self._began, self._seconds = began, time.monotonic() - began

    def _count_again(self) -> None:
        try:
            self._count()
        except StagescopeError as error:
            log.warning("/metrics keeps its last counts: %s", error)


class Sources(NamedTuple):
    """Sources of the text."""

    catalogue: Catalogue
    counts: Counts
    step_summaries: StepSummaries
    max_runs: int
    """Newest runs that are included."""


def text(sources: Sources, now: float) -> bytes:
    """Return the exposition text at `now` (Unix seconds).

    Raises:
        CatalogueUnavailable: the catalogue cannot be read.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(list(_families(sources, now))))
    return generate_latest(registry)


class _Families(Collector):
    """Collects metrics that are computed already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self._families


def _families(sources: Sources, now: float) -> Iterator[Metric]:
    runs = sources.catalogue.runs(limit=sources.max_runs)
    names = {row["run"] for row in runs}
    counts, seconds = sources.counts.read()
    age = _gauge("counts_age_seconds", "Age of the counts of attempts, stages, findings, ...")
    age.add_metric([], seconds)
    yield age
    for key, rows in counts.items():
        if key in _COUNTS:
            yield _count_metric(_COUNTS[key], rows, names)
        if key in _BYTES:
            name, text, *labels = _BYTES[key]
            family = _gauge(name, text, *labels)
            for row in rows:
                if row["run"] in names:
                    values = [str(row.get(label)) for label in labels]
                    family.add_metric(values, float(row.get("bytes") or 0))
            yield family
    size = sources.catalogue.bytes_on_disk()
    if size is not None:
        family = _gauge("catalogue_bytes", "Bytes of the catalogue's files.")
        family.add_metric([], float(size))
        yield family
    yield from _run_families(sources, runs, now)


def _run_families(sources: Sources, runs: list[ListedRun], now: float) -> Iterator[Metric]:
    live = _gauge("run_live", "1 where a process of the run holds its lease.", "run")
    silence = _gauge("run_silent_seconds", "Time since a process of the run was heard.", "run")
    newest = _gauge("run_newest_step", "Newest step of the run's newest attempt.", "run")
    lag = _gauge("run_step_lag", "Steps between the newest and the newest measured one.", "run")
    number = _gauge("run_attempt", "Number of the run's newest attempt.", "run")
    step = _gauge("step", "The measured step that the metrics are of.", "run")
    comparable = _gauge(
        "step_comparable",
        "1 where that step's streams can be compared, 0 where not, with verdict and cause.",
        "run", "verdict", "cause",
    )  # fmt: skip
    complete = _gauge(
        "step_complete",
        "1 where all that was expected of the newest closed step arrived, 0 where not.",
        "run", "completeness",
    )  # fmt: skip
    metric = _gauge("step_metric", "Main metrics of that step.", "run", "metric")
    for row in runs:
        run = row["run"]
        live.add_metric([run], float(bool(row["live"])))
        if row["last_wall"] is not None:
            silence.add_metric([run], max(now - row["last_wall"], 0.0))
        if row["attempt_id"] is None:
            continue
        number.add_metric([run], float(row["attempt"] or 0))
        steps = sources.catalogue.steps(row["attempt_id"], limit=_STEPS_SEARCHED)
        measured = _measured(sources.catalogue, row["attempt_id"], run, steps)
        if steps:
            newest.add_metric([run], float(steps[0]["step"]))
        closed_steps = [item for item in steps if item["completeness"]][:1]
        for closed in verdicts(sources.catalogue, run, closed_steps):
            complete.add_metric([run, closed], float(closed == "complete"))
        if measured is not None:
            step.add_metric([run], float(measured["step"]))
            lag.add_metric([run], float(steps[0]["step"] - measured["step"]))
            comparability = sources.step_summaries.comparable(row["attempt_id"], measured)
            if comparability is not None:
                verdict = comparability.verdict
                labels = [run, verdict, comparability.cause or ""]
                comparable.add_metric(labels, float(verdict in ("comparable", "exact")))
            published = sources.step_summaries.published(row["attempt_id"], measured["step"])
            for name in MAIN_METRICS:
                if name in published:
                    metric.add_metric([run, name], float(published[name]))
    yield from (live, silence, newest, lag, number, step, comparable, complete, metric)


def _measured(
    catalogue: Catalogue, attempt_id: int, run: str, newest: list[ListedStep]
) -> ListedStep | None:
    """Return the newest measured step of a run's newest attempt, whose newest steps are given."""
    found = next((step for step in newest if step["has_summary"]), None)
    if found is not None or len(newest) < _STEPS_SEARCHED:
        return found
    earlier = catalogue.newest_summary(run)
    if earlier is None or earlier["attempt_id"] != attempt_id:
        return None
    return next(iter(catalogue.steps(attempt_id, before=earlier["step"] + 1, limit=1)), None)


def _count_metric(gauge: _Gauge, rows: list[Count], runs: set[str]) -> Metric:
    """Return the counts of some runs as a metric."""
    label = gauge.label
    labels = ("run",) if label is None else ("run", label)
    sums: dict[tuple[str, ...], float] = {}
    kinds: set[str] = set()
    for row in rows:
        if row["run"] not in runs:
            continue
        key = [str(row["run"])]
        if label is not None:
            key.append(_label_value(label, str(row.get(label)), kinds))
        sums[tuple(key)] = sums.get(tuple(key), 0.0) + float(row["count"] or 0)
    family = _gauge(gauge.name, gauge.help_text, *labels)
    for values, value in sorted(sums.items()):
        family.add_metric(list(values), value)
    return family


def _label_value(label: str, value: str, kinds: set[str]) -> str:
    """Return `value`, or OTHER where the label has too many; `kinds` collects those of kinds."""
    allowed = _LABEL_VALUES.get(label)
    if allowed is not None:
        return value if value in allowed else OTHER
    if value not in kinds and len(kinds) >= _MAX_KINDS:
        return OTHER
    kinds.add(value)
    return value


def _gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"stagescope_{name}", help_text, labels=labels)
