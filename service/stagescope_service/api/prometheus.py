"""The text of /metrics: the service's own state, and each run's newest measured step.

Cardinality is bounded: the newest runs of the settings, a fixed list of metrics, and labels that
the project names itself (role, kind, state); never a rank, a step or an attempt in a label.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from stagescope.wire.errors import StagescopeError
from stagescope.wire.schema import ROLES, STAGES
from stagescope_service.api.step_summaries import StepSummaries
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue

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
"""The label of a name that jobs made up: their number is not ours to bound."""

_COUNTS: Final[Mapping[str, tuple[str, str, str | None]]] = {
    "attempts": ("attempts", "Attempts of a run.", None),
    "processes_live": ("processes_live", "Processes that hold their lease.", "role"),
    "stages_open": ("stages_open", "Stages begun and not ended.", "stage"),
    "steps_open": ("steps_open", "Steps that are not closed.", None),
    "payloads_announced": (
        "payloads_announced", "Payloads announced and not yet settled: the lag.", None
    ),
    "losses": ("lost", "What was announced and never arrived, or was dropped.", "kind"),
    "findings": ("findings", "Findings.", "kind"),
    "dumps": ("dumps", "Dumps by state.", "state"),
}  # fmt: skip
_KNOWN: Final[Mapping[str, frozenset[str]]] = {
    "role": frozenset(ROLES),
    "stage": frozenset(STAGES),
    "state": frozenset({"armed", "complete", "truncated", "failed", "missed", "skipped"}),
}
_MAX_KINDS: Final = 40


class Counts:
    """The catalogue's counts, which grow dearer with it: a scrape never waits for slow ones.

    What took long to count is counted in a thread of its own, and meanwhile the counts before
    stand; `stagescope_counts_age_seconds` says how old they are.

    Args:
        catalogue: what is counted.
        patience: seconds of counting that a scrape waits for.
    """

    def __init__(self, catalogue: Catalogue, *, patience: float = 0.2) -> None:
        self._catalogue = catalogue
        self._patience = patience
        self._lock = threading.Lock()
        self._counting: threading.Thread | None = None
        self._found: dict[str, list[dict[str, Any]]] | None = None
        self._taken = self._took = 0.0

    def read(self) -> tuple[dict[str, list[dict[str, Any]]], float]:
        """Return the counts and their age in seconds.

        Raises:
            CatalogueUnavailable: the catalogue cannot be read now, and never was.
        """
        with self._lock:
            if self._found is None or self._took <= self._patience:
                self._count()
            elif self._counting is None or not self._counting.is_alive():
                self._counting = threading.Thread(
                    target=self._count_again, name="prometheus-counts", daemon=True
                )
                self._counting.start()
            assert self._found is not None
            return self._found, time.monotonic() - self._taken

    def _count(self) -> None:
        began = time.monotonic()
        self._found = self._catalogue.counts()
        self._taken, self._took = began, time.monotonic() - began

    def _count_again(self) -> None:
        try:
            self._count()
        except StagescopeError as error:
            log.warning("the counts of /metrics stay as they were: %s", error)


def text(
    catalogue: Catalogue, counts: Counts, measures: StepSummaries, settings: Settings, now: float
) -> bytes:
    """Return the exposition text.

    Raises:
        CatalogueUnavailable: the catalogue cannot be read now.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(list(_families(catalogue, counts, measures, settings, now))))
    return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield what was gathered."""
        yield from self._families


def _families(
    catalogue: Catalogue, counts: Counts, measures: StepSummaries, settings: Settings, now: float
) -> Iterator[Metric]:
    runs = catalogue.runs(limit=settings.prometheus_runs)
    names = {str(row["run"]) for row in runs}
    found, seconds = counts.read()
    age = _gauge("counts_age_seconds", "Age of the counts of attempts, stages, findings, ...")
    age.add_metric([], seconds)
    yield age
    for key, rows in found.items():
        if key in _COUNTS:
            yield _count(*_COUNTS[key], rows, names)
        if key == "payloads_announced":
            family = _gauge("payload_bytes_announced", "Bytes of these payloads.", "run")
            for row in rows:
                if row["run"] in names:
                    family.add_metric([row["run"]], float(row["bytes"] or 0))
            yield family
    size = catalogue.bytes_on_disk()
    if size is not None:
        family = _gauge("catalogue_bytes", "Bytes of the catalogue's files.")
        family.add_metric([], float(size))
        yield family
    yield from _run_families(catalogue, measures, runs, now)


def _run_families(
    catalogue: Catalogue, measures: StepSummaries, runs: list[dict[str, Any]], now: float
) -> Iterator[Metric]:
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
    metric = _gauge("step_metric", "Main metrics of that step.", "run", "metric")
    for row in runs:
        run = str(row["run"])
        live.add_metric([run], float(bool(row["live"])))
        if row["last_wall"] is not None:
            silence.add_metric([run], max(now - row["last_wall"], 0.0))
        if row["attempt_id"] is None:
            continue
        number.add_metric([run], float(row["attempt"]))
        steps = catalogue.steps(row["attempt_id"], limit=_LOOK_BACK)
        measured = next((item for item in steps if item["has_whole"]), None)
        if steps:
            newest.add_metric([run], float(steps[0]["step"]))
        if measured is not None:
            step.add_metric([run], float(measured["step"]))
            lag.add_metric([run], float(steps[0]["step"] - measured["step"]))
            judged = measures.comparable(row["attempt_id"], measured)
            if judged is not None:
                labels = [run, judged.verdict, judged.cause or ""]
                comparable.add_metric(labels, float(judged.verdict in ("comparable", "exact")))
            found = measures.published(row["attempt_id"], measured["step"])
            for name in MAIN_METRICS:
                if name in found:
                    metric.add_metric([run, name], float(found[name]))
    yield from (live, silence, newest, lag, number, step, comparable, metric)


_LOOK_BACK: Final = 16
"""Newest steps of an attempt among which the newest measured one is looked for."""


def _count(
    name: str, help_text: str, label: str | None, rows: list[dict[str, Any]], runs: set[str]
) -> Metric:
    labels = ("run",) if label is None else ("run", label)
    sums: dict[tuple[str, ...], float] = {}
    kinds: set[str] = set()
    for row in rows:
        if row["run"] not in runs:
            continue
        key = [str(row["run"])]
        if label is not None:
            key.append(_bounded(label, str(row[label]), kinds))
        sums[tuple(key)] = sums.get(tuple(key), 0.0) + float(row["count"] or 0)
    family = _gauge(name, help_text, *labels)
    for values, value in sorted(sums.items()):
        family.add_metric(list(values), value)
    return family


def _bounded(label: str, value: str, kinds: set[str]) -> str:
    known = _KNOWN.get(label)
    if known is not None:
        return value if value in known else OTHER
    if value not in kinds and len(kinds) >= _MAX_KINDS:
        return OTHER
    kinds.add(value)
    return value


def _gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"stagescope_{name}", help_text, labels=labels)
