"""The report of a run and of a step: what it says, how it escapes, how large it is."""

from __future__ import annotations

import html.parser
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.api import Rank, Service, service
from tests.support.browser import Scheme, chromium, opened
from tests.support.command_line import invoke
from tests.support.measure import payload
from tests.support.runs.shown import BROKEN, RUN, keep_tensors, shown
from tests.support.runs.shown import payload as shown_payload

from stagescope_service.report import rendering as routes
from stagescope_service.report.parts import ReportSection
from stagescope_service.store.contract import Put
from stagescope_wire import schema

STEPS = 34
HOSTILE = "<script>window.hacked=1</script> | **b** [x](javascript:1) `c`\n# h @someone \x1b[31m"


NAME = HOSTILE.partition("\n")[0]
"""Of a stage or scalar, which must be printable."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A run with a restart, one rank apart, NaN and a capture."""
    with service(tmp_path_factory.mktemp("home")) as running:
        keep_tensors(running)
        training = shown(running, STEPS, rows=2, tokens=24)
        capture_id = training.capture()
        training.acknowledge(capture_id, range(8))
        yield running


def saved(live: Service, kind: str, **query: Any) -> str:
    response = live.read.get(f"/runs/{RUN}/report", params={"format": kind, **query})
    assert response.status_code == 200, response.text
    assert f'.{kind}"' in response.headers["content-disposition"]
    return response.text


def sections(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in report["sections"]}


def test_a_run_says_what_the_other_answers_say(live: Service) -> None:
    report = live.get(f"/runs/{RUN}/report")
    found = sections(report)
    assert (report["run"], report["attempt"], report["step"]) == (RUN, None, None)
    verdicts = {each["name"]: each for each in report["verdicts"]}
    # A step's numbers are those of /metrics, its ranks those of /ranks.
    metrics = live.get(f"/steps/{STEPS}/metrics", run=RUN)
    shown_numbers = {row["metric"]: row["value"] for row in found["metrics"]["table"]["rows"]}
    assert shown_numbers
    for name, value in shown_numbers.items():
        assert value == metrics["metrics"][name]
    assert verdicts["streams"]["verdict"] == metrics["comparable"]
    ranks = live.get(f"/steps/{STEPS}/ranks", run=RUN)["rows"]
    worst = max(ranks, key=lambda row: row["abs_diff_mean"])
    assert found["ranks"]["table"]["rows"][0]["rank"] == worst["rank"]
    rounds = live.get(f"/steps/{STEPS}/rounds", run=RUN)["rows"]
    largest = max(rounds, key=lambda row: row["abs_diff_mean"])["round"]
    assert verdicts["worst round"]["verdict"] == f"round {largest}"
    # The doctor's causes, findings and losses.
    diagnosis = live.get(f"/runs/{RUN}/diagnosis", limit=1000)["rows"]
    causes = [row for row in diagnosis if row["verdict"] == "found" and row["cause"] is None]
    titles = [each["title"] for each in found["doctor"]["items"]]
    assert titles == [row["sentence"] for row in causes]
    unknown = sum(row["verdict"] == "not measured" for row in diagnosis)
    assert len(found["doctor"]["gaps"]) == unknown
    groups = live.get("/losses/groups", run=RUN)["rows"]
    assert verdicts["lost data"]["verdict"] == str(sum(row["count"] for row in groups))
    assert found["attempts"]["table"]["rows"][0]["resumed_from_step"] == 20
    assert "attempt 2 resumed after 20" in verdicts["attempts"]["text"]
    changed = found["attempts"]["items"][0]["lines"]
    assert "config lr: 1e-06 -> 2e-06" in changed
    assert len(found["captures"]["table"]["rows"]) == 1
    # And the figures are those of /figures.
    drawn = {each["name"]: each for part in found.values() for each in part["figures"]}
    assert set(drawn) == {
        "overview", "rank-steps", "rounds", "distribution", "rank-rounds", "anatomy",
    }  # fmt: skip
    assert "offenders" in drawn or "prompt" in found["offenders"]["gaps"][0]
    assert drawn["overview"] == live.get("/figures/overview", run=RUN)


def test_the_course_is_a_line_of_bars(live: Service) -> None:
    rows = sections(live.get(f"/runs/{RUN}/report"))["course"]["table"]["rows"]
    by_name = {row["metric"]: row for row in rows}
    reward = by_name["reward"]
    # It rises by 0.005 a step from 0.4.
    assert reward["course"][0] == "▁"
    assert reward["course"].rstrip()[-1] == "█"  # the newest step is open: a gap
    assert reward["last"] == pytest.approx(0.4 + 0.005 * STEPS)
    assert "!" in by_name["loss"]["course"]  # NaN in step 33


def test_a_step_in_detail_names_its_gaps(live: Service) -> None:
    report = live.get(f"/runs/{RUN}/report", step=BROKEN)
    assert (report["step"], report["attempt"]) == (BROKEN, 2)
    found = sections(report)
    assert found["rounds"]["table"]["rows"][1]["nonfinite"] == 3
    assert {row["kind"] for row in found["tokens"]["table"]["rows"]} == {"worst"}
    assert found["loss"]["table"]["rows"][0]["fate"] == "trained"
    assert "no operators" in found["operators"]["gaps"][0]
    loss_row = next(row for row in found["scalars"]["table"]["rows"] if row["name"] == "loss")
    assert loss_row["mean"] == "nan"
    drawn = [each["name"] for part in found.values() for each in part["figures"]]
    known = drawn.count("anatomy")
    assert known >= 5
    assert drawn == [
        "timeline", "rounds", "distribution", "rank-rounds", "distribution", "density",
        *["anatomy"] * known,
    ]  # fmt: skip
    assert len(found["anatomy"]["gaps"]) == 7 - known


def test_a_step_that_died_says_who_is_missing(live: Service) -> None:
    report = live.get(f"/runs/{RUN}/report", step=24, attempt=1)
    step = sections(report)["step"]
    assert any("actor ranks 0-7 in rollout_generate: unfinished" in text for text in step["gaps"])
    assert "no rank has handed over both streams" in " ".join(sections(report)["metrics"]["gaps"])


def test_a_run_without_any_step_is_reported(live: Service) -> None:
    Rank(live, run="empty", world_size=1)
    report = live.get("/runs/empty/report")
    assert "no step of run empty has numbers" in sections(report)["metrics"]["gaps"][0]
    for kind in ("html", "md"):
        assert live.read.get(f"/runs/empty/report?format={kind}").status_code == 200


def test_what_is_not_there_is_named(live: Service) -> None:
    assert "no run" in live.problem(404, "/runs/nobody/report")["wrong"]
    assert "no step 999" in live.problem(404, f"/runs/{RUN}/report", step=999)["wrong"]
    live.problem(422, f"/runs/{RUN}/report", format="pdf")


# --- escaping -------------------------------------------------------------------------------
class Tags(html.parser.HTMLParser):
    """The tags of a page, and its text outside of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self._quiet = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self._quiet = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._quiet = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._quiet else data


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Every name that a training may give is hostile."""
    with service(tmp_path_factory.mktemp("home")) as running:
        keep_tensors(running)
        rank = Rank(running, run="r", world_size=1, layout={"host": HOSTILE})
        handed = payload()
        handed["strings"]["sample_ids"] = [f"{row}{HOSTILE}" for row in range(4)]
        rank.stage("actor_compute_log_prob", 1, handed, scalars={NAME: 1.0, "reward": 1.0})
        rank.begin(NAME, 1)
        rank.end(NAME, 1, status="failed", error_type="E", error_message=HOSTILE)
        rank.begin("actor_update", 2)
        finding = {
            "finding_id": "f1", "run": "r", "attempt_id": 1, "step": 1, "severity": "error",
            "kind": HOSTILE, "message": HOSTILE, "advice": HOSTILE, "count": 1, "first_wall": 1.0,
            "last_wall": 2.0, "evidence": {},
        }  # fmt: skip
        lost = {"loss_id": "l1", "run": "r", "attempt_id": 1, "step": 1, "kind": "payload",
                "reason": HOSTILE, "wall": 1.0, "role": "actor", "rank": 0, "count": 1}  # fmt: skip
        running.store.submit([Put("findings", finding), Put("losses", lost)]).result(30)
        yield running


@pytest.mark.parametrize("query", ["", "&step=1"])
def test_hostile_names_are_text_in_html(hostile: Service, query: str) -> None:
    page = hostile.read.get(f"/runs/r/report?format=html{query}").text
    found = Tags()
    found.feed(page)
    # plotly, the script that draws, and the figures' data.
    assert found.tags.count("script") == 3
    assert "<script>window.hacked=1</script>" in found.text
    # plotly's own script, the longest one, may hold any character.
    longest = max(re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL), key=len)
    assert len(longest) > 500_000
    assert page.replace(longest, "").count("\x1b") == 0


@pytest.mark.parametrize("query", ["", "&step=1"])
def test_hostile_names_are_text_in_markdown(hostile: Service, query: str) -> None:
    document = hostile.read.get(f"/runs/r/report?format=md{query}").text
    assert "window.hacked" in document
    for line in document.splitlines():
        plain = re.sub(r"\\.", "", re.sub(r"`[^`]*`", "", line))
        assert "<" not in plain.replace("<sub>", "").replace("</sub>", ""), line
        assert "@" not in plain, line
        assert "](" not in plain, line
        assert not line.startswith("# "), line
        if "hacked" in line and line.startswith("| "):
            # As many cells as the table has columns: no pipe of a name divides one.
            assert re.sub(r"\\.", "", line).count("|") in range(4, 14)
    rows = [re.sub(r"\\.", "", line) for line in document.splitlines() if line.startswith("|")]
    for before, after in itertools.pairwise(rows):
        if after.startswith("| ---") or before.startswith("| ---"):
            assert before.count("|") == after.count("|")


def test_hostile_names_run_nothing(hostile: Service, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(hostile.read.get("/runs/r/report?format=html&step=1").content)
    with chromium() as browser, opened(browser, path) as shown_page:
        assert shown_page.look["hacked"] is None
        assert shown_page.requests == [path.as_uri()]
        assert shown_page.messages == []


# --- as a reader sees it --------------------------------------------------------------------
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
@pytest.mark.parametrize("step", [None, BROKEN])
def test_it_can_be_read_without_network(
    live: Service, tmp_path: Path, width: int, scheme: Scheme, step: int | None
) -> None:
    path = tmp_path / "report.html"
    query = {} if step is None else {"step": step}
    path.write_text(saved(live, "html", **query), "utf-8")
    with chromium() as browser, opened(browser, path, width=width, scheme=scheme) as page:
        look = page.look
        assert page.requests == [path.as_uri()]
        assert page.messages == []
        assert page.problems() == []
        # With the keyboard: the first stop is the first table, then the links to the sections.
        stops = []
        for _ in range(4):
            page.page.keyboard.press("Tab")
            stops.append(page.page.evaluate("document.activeElement.tagName"))
        assert "A" in stops
        bars = page.page.evaluate(
            "[...document.querySelectorAll('.legend .scrollbar')]"
            ".map(each => each.getBoundingClientRect().height)"
        )
        assert not any(bars)  # no entry of a legend is hidden
    assert look["scrolled"] <= look["width"]
    assert look["outside"] == 0
    assert [each for each in look["contrasts"] if each[1] < 4.5] == []
    assert len(look["figures"]) >= (5 if step is None else 6) + 5  # and those of the anatomy
    for figure in look["figures"]:
        assert figure["caption"]
        assert figure["marks"] > 0 or "log-probs" in figure["caption"], figure["caption"]


# --- size -----------------------------------------------------------------------------------
def test_a_long_run_of_many_ranks_stays_below_5_megabytes(tmp_path: Path) -> None:
    steps, ranks = 10_000, 1024
    with service(tmp_path / "home", recorded=False) as running:
        actors = [
            Rank(
                running, rank=rank, world_size=ranks, layout={"host": f"n{rank // 8}"}, greets=False
            )
            for rank in range(ranks)
        ]
        running.engine.take_together([actor.hello for actor in actors])
        for step in (steps - 1, steps):
            running.engine.take_together([
                actor.draft_stage(
                    "actor_compute_log_prob", step,
                    shown_payload(step, rank, rows=1, rounds=16, tokens=16),
                )
                for rank, actor in enumerate(actors)
            ])  # fmt: skip
        running.engine.take_together([
            actor.draft(schema.BEGIN, stage="actor_compute_log_prob", step=steps + 1)
            for actor in actors
        ])  # fmt: skip
        fill(running, range(1, steps - 1))
        overview = running.get("/steps", run="r", limit=1000)
        assert len(overview["rows"]) == 1000
        for query in ("", f"&step={steps}"):
            answer = running.read.get(f"/runs/r/report?format=html{query}", timeout=120)
            assert answer.status_code == 200
            assert len(answer.content) < 5_000_000
            assert len(re.findall("<figure>", answer.text)) >= 5
        course = sections(running.get("/runs/r/report"))["course"]["table"]["rows"]
        assert {row["steps"] for row in course if row["metric"] == "rollout_corr/k3_kl"} == {steps}


def fill(running: Service, steps: range) -> None:
    """Write closed steps whose numbers are stored, as those of a long run are."""
    from stagescope_service.statistics.step_metrics import VERSION

    random = np.random.default_rng(3)
    puts = []
    for step in steps:
        wall = 100.0 + step
        puts.append(Put("steps", {
            "attempt_id": 1, "step": step, "opened_wall": wall, "closed_wall": wall + 0.5,
            "completeness": "complete", "summary_wall": wall, "rows_removed": True,
        }))  # fmt: skip
        values = random.exponential(0.001, 4).tolist()
        names = ("rollout_corr/k3_kl", "logprob_abs_diff/mean", "logprob_abs_diff/p99",
                 "training/rollout_actor_probs_pearson_corr")  # fmt: skip
        puts.append(Put("step_metrics", {
            "attempt_id": 1, "step": step, "version": VERSION, "summary_wall": wall,
            "stage": "actor_compute_log_prob", "verdict": "comparable", "suspects": [],
            "metrics": dict(zip(names, values, strict=True)), "slices": None,
            "tokens": 100, "masked_tokens": 100, "unequal_tokens": 100,
        }))  # fmt: skip
    running.store.submit(puts).result(120)


def test_what_is_sent_holds_no_secret(tmp_path: Path) -> None:
    secrets = ("hf_" + "a1B2" * 6, "hunter2hunter2", "user:pa55w0rd")
    with service(tmp_path / "home") as live:
        rank = Rank(live, run="r", world_size=1, settings={"wandb": {"api_key": secrets[1]}})
        rank.begin("actor_update", 1)
        rank.end(
            "actor_update", 1, status="failed", error_type="ValueError",
            error_message=f"{secrets[0]} password={secrets[1]} https://{secrets[2]}@host/x",
        )  # fmt: skip
        for kind in ("html", "md", "json"):
            text = live.read.get(f"/runs/r/report?format={kind}", timeout=60).text
            assert "ValueError" in text
            assert "[redacted" in text.replace("\\", "")
            assert not [secret for secret in secrets if secret in text], kind


def test_figures_that_do_not_fit_are_named() -> None:
    figure: dict[str, object] = {
        "name": "overview",
        "title": "t",
        "note": None,
        "figure": {"data": ["x" * 1000]},
    }
    small: dict[str, object] = {**figure, "name": "rounds", "figure": {"data": []}}
    parts = [ReportSection("a", "A", figures=[figure, small])]
    (found,) = routes._within(parts, 500)
    assert [each["name"] for each in found.figures] == ["rounds"]
    assert "figure overview has" in found.gaps[0]
    assert "GET /figures/overview" in found.gaps[0]
    assert routes._within(parts, 5000)[0].gaps == []


# --- the command ----------------------------------------------------------------------------
def test_the_command_saves_each_format(live: Service, tmp_path: Path) -> None:
    where = ["--url", live.server.url]
    env = {"STAGESCOPE_TOKEN": live.tokens.read}
    for kind, begin in (("html", "<!DOCTYPE html>"), ("md", "## stagescope"), ("json", "{")):
        path = tmp_path / f"r.{kind}"
        result = invoke("report", RUN, "-o", str(path), *where, "--json", env=env)
        assert (result.exit_code, result.stderr) == (0, "")
        assert json.loads(result.stdout)["bytes"] == path.stat().st_size
        assert path.read_text("utf-8").startswith(begin)
    path = tmp_path / "step.md"
    result = invoke("report", RUN, "--step", "33", "-o", str(path), *where, env=env)
    assert "step 33" in path.read_text("utf-8").splitlines()[0]
    result = invoke("report", RUN, "-o", str(tmp_path / "r.pdf"), *where, env=env)
    assert result.exit_code == 2
    assert ".html, .json or .md" in result.stderr
    # The format may be named beside the ending, not against it.
    result = invoke(
        "report", RUN, "-o", str(tmp_path / "r.md"), "--format", "md", *where, "--json", env=env
    )
    assert json.loads(result.stdout)["format"] == "md"
    result = invoke(
        "report", RUN, "-o", str(tmp_path / "r.md"), "--format", "json", *where, env=env
    )
    assert result.exit_code == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "r.html",
        "r.json",
        "r.md",
        "step.md",
    ]


def test_the_command_without_a_file_names_one_itself_and_says_where(
    live: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--url", live.server.url]
    env = {"STAGESCOPE_TOKEN": live.tokens.read}
    monkeypatch.chdir(tmp_path)
    for arguments, name in (
        ([], f"{RUN}.html"),
        (["--step", "33"], f"{RUN}-step33.html"),
        (["--step", "33", "--format", "md"], f"{RUN}-step33.md"),
    ):
        result = invoke("report", RUN, *arguments, *where, env=env)
        assert result.exit_code == 0
        assert name in result.stdout
        assert (tmp_path / name).is_file()
    assert len([*tmp_path.iterdir()]) == 3
    printed = invoke("report", RUN, "-o", "-", *where, env=env)
    assert (printed.exit_code, printed.stderr) == (0, "")
    assert printed.stdout.startswith(f"## stagescope: {RUN}")
    printed = invoke("report", RUN, "-o", "-", "--format", "json", *where, env=env)
    assert json.loads(printed.stdout)["run"] == RUN
    assert len([*tmp_path.iterdir()]) == 3
