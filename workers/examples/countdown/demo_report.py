"""The demo's requests to the live service: each prints its answer and is a check.

A check passes only if the answer is complete and right; `Checks` collects them for the final list.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from stagescope.session import Session
from stagescope_wire import proxies

METRICS: Final = (
    "logprob_abs_diff/mean",
    "logprob_abs_diff/p99",
    "logprob_abs_diff/max",
    "training/rollout_probs_diff_mean",
    "training/rollout_actor_probs_pearson_corr",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/ppl_ratio",
    "token_mult_prob_error",
    "per_round/total_rounds",
    "per_round/max_round_diff",
    "per_round/max_diff_value",
    "counts/tokens",
    "counts/sequences",
)
"""The published numbers that the demo prints."""

_ROUND_COLUMNS: Final = ("round", "tokens", "abs_diff_mean", "abs_diff_max", "k3_kl")


class Checks:
    """The checks and their results."""

    def __init__(self) -> None:
        self.failed = 0
        self._lines: list[str] = []

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Count the check `name` as passed if the block ends without an error."""
        try:
            yield
        except Exception as error:
            self.failed += 1
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._lines += [f" ✗  {name}", f"      {reason:.200}"]
            print(f"   ✗ {reason:.800}", flush=True)
        else:
            self._lines.append(f" ✓  {name}")

    def lines(self) -> list[str]:
        """Return the list, with one or two lines per check."""
        return list(self._lines)


def require(condition: object, wrong: str) -> None:
    """Raise AssertionError with the message `wrong`, also under `python -O`."""
    if not condition:
        raise AssertionError(wrong)


def heading(text: str) -> None:
    """Print a heading."""
    print(f"\n── {text} {'─' * max(0, 75 - len(text))}", flush=True)


def show_metrics(session: Session, run: str, columns: Sequence[tuple[int, int]]) -> None:
    """Print the metrics of some (attempt, step) side by side; each must be a real mismatch."""
    found = [session.step(step, run=run, attempt=attempt).metrics() for attempt, step in columns]
    rows = {
        "": [f"attempt {attempt}" for attempt, _ in columns],
        " ": [f"step {step}" for _, step in columns],
        **{name: [f"{metrics[name]:.5g}" for metrics in found] for name in METRICS},
        "complete": [metrics.complete for metrics in found],
    }
    for name, values in rows.items():
        print(f"{name:41}" + "".join(f"{value:>13}" for value in values))
    print(f"all taken from stage {', '.join(sorted({str(metrics.stage) for metrics in found}))}")
    for (attempt, step), metrics in zip(columns, found, strict=True):
        where = f"attempt {attempt}, step {step}"
        require((metrics.attempt, metrics.step) == (attempt, step), f"{where} was not answered")
        require(metrics["counts/tokens"] > 100, f"{where} has too few tokens")
        mean = metrics["logprob_abs_diff/mean"]
        require(1e-5 < mean < 0.1, f"{where}: mean |d| {mean} is not that of int8 arithmetic")


def show_rounds(session: Session, run: str, step: int) -> None:
    """Print the rounds of a step; they must add up to its total."""
    table = session.step(step, run=run).rounds()
    print(table.select(*(name for name in _ROUND_COLUMNS if name in table.names)))
    total: Any = table.about["whole"]
    require(2 <= len(table) <= 4, f"{len(table)} rounds")
    tokens, difference = sum(table["tokens"]), sum(table["abs_diff_sum"])
    require(tokens == total["tokens"], f"rounds have {tokens} tokens, the step {total['tokens']}")
    distance = abs(difference - total["abs_diff_sum"])
    require(distance <= 1e-9 * total["abs_diff_sum"], f"the sums of |d| differ by {distance}")
    print(f"{tokens} tokens, sum of |d| {difference:.6f}: both equal to the step's")


def show_stages(session: Session, run: str, step: int, expected: set[str]) -> None:
    """Print the duration of each stage of a step; all stages of the algorithm must be present."""
    table = session.step(step, run=run).stages()
    names = dict.fromkeys(table["stage"])
    print(f"{'stage':26} {'parts':>6} {'ranks':>6} {'longest':>10}")
    for name in names:
        rows = table.where(stage=name)
        ranks = len(set(zip(rows["role"], rows["rank"], strict=True)))
        seconds = max((value for value in rows["seconds"] if value is not None), default=0.0)
        print(f"{name:26} {len(rows):6} {ranks:6} {seconds:8.3f} s")
    require(set(names) >= expected, f"missing: {', '.join(sorted(expected - set(names)))}")
    require(set(table["status"]) == {"ok"}, f"states: {', '.join(sorted(set(table['status'])))}")


def show_dumps(session: Session, run: str, step: int, ranks: int) -> None:
    """Print the paths of msprobe's dumps; every rank's must be complete and readable."""
    table = session.step(step, run=run, attempt=1).dumps()
    require(len(table) >= ranks, f"{len(table)} dumps, expected {ranks}")
    for row in table:
        require(row["path"], f"rank {row['rank']}: {row['state']} {row['error']}")
        path = Path(row["path"])
        print(f"rank {row['rank']}  {row['stage']}  {row['state']}  {row['bytes']} bytes\n  {path}")
        require(row["state"] == "complete", f"rank {row['rank']}: {row['state']} {row['error']}")
        dumps = sorted(path.rglob("dump.json"))
        require(dumps, f"no dump.json under {path}")
        records = sum(len(json.loads(dump.read_text())["data"]) for dump in dumps)
        print(f"  {records} records in {dumps[0].relative_to(path)}")
        require(records > 10, f"only {records} records")
    require(set(table["rank"]) == set(range(ranks)), f"ranks {sorted(set(table['rank']))}")


def show_operators(session: Session, run: str, step: int, rank: int = 0) -> None:
    """Print the first operators that the capture recorded; none may be without numbers."""
    table = session.step(step, run=run, attempt=1).operators(rank=rank, limit=500)
    print("\n".join(table.lines()[:12]))
    require(len(table) > 100, f"only {len(table)} rows of operators")
    bad = session.step(step, run=run, attempt=1).non_finite()
    require(bad.about["earliest"] is None, f"not finite: {bad.about['earliest']}")


def show_lost(session: Session, run: str, step: int) -> None:
    """Print the stages that the kill left unfinished, and everything listed as lost."""
    stages = session.step(step, run=run, attempt=1).stages()
    unfinished = stages.where(status="unfinished")
    for row in unfinished:
        print(f"unfinished  {row['stage']}  {row['role']} rank {row['rank']}  part {row['part']}")
    losses = session.lost(run=run, attempt=1)
    for row in losses:
        where = f"{row['stage']}  {row['role']} rank {row['rank']}"
        print(f"lost        {where}  {row['kind']}: {row['reason']}")
    require(len(unfinished), "no stage is unfinished")
    require(len(losses), "nothing is listed as lost")
    require(step in losses["step"], f"nothing of step {step} is listed as lost")


def show_attempts(session: Session, run: str, resumed_from: int) -> None:
    """Print the attempts; the second must name the step that it continues."""
    attempts = session.attempts(run)
    columns = ("attempt", "state", "resumed_from_step", "first_step", "last_closed_step")
    print(attempts.select(*columns))
    second = attempts.where(attempt=2)
    require(len(second) == 1, "there is no second attempt")
    require(second[0]["resumed_from_step"] == resumed_from, f"resumed from {second[0]}")
    # Both attempts have this step: the newer one answers.
    newest = session.step(resumed_from + 1, run=run)
    require(newest.attempt == 2, f"step {resumed_from + 1} comes from attempt {newest.attempt}")
    older = session.steps(run, 1).where(step=resumed_from + 1)
    require(older["superseded_by"] == (2,), f"superseded by {older['superseded_by']}")
    print(f"step {resumed_from + 1} of attempt 1 is superseded by attempt 2")


def show_access(url: str, token_file: Path, step: int) -> None:
    """Print the service's URL and a request, which must succeed only with an access token."""
    print(f"url    {url}\ntoken  {token_file}\n")
    if not os.environ.get("KEEP"):
        print("(the service stops now; `KEEP=1 make demo` leaves it running)\n")
    direct = "--noproxy '*' " if proxies.unused_variable(url) else ""
    print(f'curl {direct}-H "Authorization: Bearer $(cat {token_file})" \\')
    print(f"     {url}/steps/{step}/metrics")
    mode = stat.S_IMODE(token_file.stat().st_mode)
    require(mode == 0o600, f"the token's file has mode {mode:o}")
    path = f"{url}/steps/{step}/metrics"
    # Not through the proxy of the environment: it would see the token.
    refused = httpx.get(path, trust_env=False).status_code
    require(refused == 401, f"without a token the answer is {refused}")
    token = {"Authorization": f"Bearer {token_file.read_text().strip()}"}
    answer = httpx.get(path, headers=token, trust_env=False)
    require(answer.status_code == 200, f"with the token the answer is {answer.status_code}")
    require(METRICS[3] in answer.json()["metrics"], "the metrics are not in the answer")
