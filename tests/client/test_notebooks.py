"""What a notebook's user meets first: what is shown of each answer, examples, whole notebooks."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tests.support.api import Rank, Service, service
from tests.support.runs.investigated import BROKEN_OPERATOR, STEPS, investigated
from tests.support.runs.shown import HOT_RANK, NAN_RANK, RUN, ShownRun, keep_tensors, payload

import stagescope
from stagescope import Metrics, Session, Step, Table
from stagescope.findings import Diagnosis, FindingRows
from stagescope.operators import NonFiniteOperators, Operators
from stagescope.plotting import BarTable, PlottedTable
from stagescope.series import Series
from stagescope.step_answers import SampleTokens

NOTEBOOKS: Final = Path(stagescope.__file__).parents[1] / "notebooks"


pytestmark = pytest.mark.usefixtures("found")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home"), recorded=False) as running:
        investigated(running)
        yield running


def test_each_answer_shows_itself_as_text_and_as_html(session: Session) -> None:
    step = session.step(STEPS)
    uid = step.samples()[0]["sample_uid"]
    shown: list[tuple[Any, str, str]] = [  # an answer, part of its text, part of its HTML
        (session, "stagescope.Session", RUN),
        (step, f"Step {STEPS} of run {RUN}", "rollout_corr/k3_kl"),
        (step.metrics(), "logprob_abs_diff/mean", "<svg"),
        (step.rounds(), "abs_diff_mean", "<svg"),
        (step.ranks(), "abs_diff_mean", "<svg"),
        (step.samples(), uid[:8], "<svg"),
        (step.tokens(), "abs_diff", "<svg"),
        (step.loss(), "share_of_mismatch", "<table"),
        (step.sample(uid), "position", "rgba("),
        (session.findings(), "nonfinite_log_probs", "border-left"),
        (session.doctor(), "One rank", "<details open>"),
        (session.step("captured").non_finite(), BROKEN_OPERATOR, BROKEN_OPERATOR),
        (session.step("captured").operators(rank=0), "Module.", "<table"),
    ]
    for answer, in_text, in_html in shown:
        text, page = repr(answer), answer._repr_html_()
        assert in_text in text, type(answer)
        assert in_html in page, type(answer)
        lines = text.splitlines()  # commands are on one line, to be pasted
        is_command = ("  -> stagescope ", "  prove it: stagescope ", "Ended: ")  # or a headline
        whole = {row["sentence"] for row in getattr(answer, "causes", ())}
        wrapped = [each for each in lines if each not in whole and not each.startswith(is_command)]
        assert [each for each in wrapped if len(each) > 100] == []
        assert "<script" not in page


def test_a_step_without_numbers_says_so(session: Session) -> None:
    page = session.step(STEPS + 1)._repr_html_()
    assert "no numbers" in page
    assert "<table" not in page


def test_the_rounds_of_metrics_are_bars_in_their_order() -> None:
    values = {f"per_round/round_{at}_abs_diff_mean": float(at + 1) for at in (10, 2, 0, 1)}
    page = Metrics(values, {})._repr_html_()
    bars = re.findall(r"<title>round (\d+): (\d+)</title>", page)
    assert bars == [("0", "1"), ("1", "2"), ("2", "3"), ("10", "11")]


def test_the_tokens_of_a_sample_are_shaded_by_their_mismatch() -> None:
    answer = {
        "sample_uid": "s", "positions": [0, 1, 2, 3], "texts": ["a", "<b>", "c", "d"],
        "token_ids": [1, 2, 3, 4], "mask": [1, 1, 0, 1], "round": [0, 0, None, 1],
        "d": [0.0, -0.25, None, "nan"], "p": [-1.0, -1.25, None, "nan"],
        "q": [-1.0, -1.0, None, -1.0], "fate": ["trained", "clipped low", "environment", "trained"],
    }  # fmt: skip
    page = SampleTokens.of_answer(answer)._repr_html_()
    spans = re.findall(r'<span style="([^"]*)"(?: title="([^"]*)")?>([^<]*)</span>', page)
    assert [text for _, _, text in spans] == ["a", "&lt;b&gt;", "c", "d"]
    assert [style for style, _, _ in spans] == [
        "background:rgba(213,94,0,0.00)",
        "background:rgba(213,94,0,0.40)",  # half of the |d| from which on it is full, of 0.8
        "opacity:.5",
        "background:rgba(204,0,160,0.80)",
    ]
    assert "clipped low" in spans[1][1]
    unknown = {**answer, "texts": [None] * 4, "token_ids": [None] * 4}
    page = SampleTokens.of_answer(unknown)._repr_html_()
    assert ">None" not in page.partition("<details>")[0]
    assert page.count(">· </span>") == 4


EXAMPLES: Final = (
    Session, Step, Step.samples, Step.sample, Step.loss, Step.rounds, Step.ranks, Step.figure,
    Step.anatomy, Step.save_trace, Session.doctor, Session.figures, Session.figure, Session.plot,
    Table, Metrics, FindingRows, Diagnosis, SampleTokens, Operators, NonFiniteOperators, BarTable,
    PlottedTable, Series,
)  # fmt: skip


@pytest.mark.parametrize("holder", EXAMPLES, ids=lambda each: each.__qualname__)
def test_examples_of_docstrings_run(
    session: Session, holder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (found,) = doctest.DocTestFinder(recurse=False).find(holder, holder.__qualname__)
    assert found.examples
    scope: dict[str, object] = {"session": session}
    for example in found.examples:
        exec(example.source, scope)


# --- in a real kernel ---------------------------------------------------------------------------
def executed(notebook: object, directory: Path, messages: list[Any] | None = None) -> Any:
    """Run a notebook in a kernel of its own; return it with its outputs.

    `messages` gets what widgets sent to the browser.
    """
    client = pytest.importorskip("nbclient", reason="the extra dev is not installed")
    pytest.importorskip("ipykernel")
    kernel = client.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(directory)}}
    )
    process = kernel.process_message

    def keep(message: Any, *rest: object) -> object:
        if messages is not None and message["header"]["msg_type"] == "comm_msg":
            messages.append(message)
        return process(message, *rest)

    kernel.process_message = keep
    return kernel.execute()


def outputs(notebook: Any, kind: str = "text/html") -> str:
    return "\n".join(
        str(output["data"].get(kind, ""))
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "data" in output
    )


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("jump_at_the_restart", [f"actor {HOT_RANK}", "attempt 2", "rgba(213,94,0"]),
        ("nan_in_one_operator", [f"rank {NAN_RANK}", BROKEN_OPERATOR, "old_nan", "acknowledged"]),
    ],
)
def test_an_investigation_finds_its_cause(name: str, cause: list[str], tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    written = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(written)
    assert not any(cell.get("outputs") for cell in written.cells)
    done = executed(written, tmp_path)
    shown = outputs(done) + outputs(done, "text/plain")
    for text in cause:
        assert text in shown, text
    kinds = {kind for cell in done.cells for out in cell.get("outputs", ()) for kind in out["data"]}
    assert "application/vnd.plotly.v1+json" in kinds


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_the_investigation_of_a_jump_runs_on_a_run_with_one_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    written = nbformat.read(NOTEBOOKS / "jump_at_the_restart.ipynb", as_version=4)
    with service(tmp_path / "another", recorded=False) as running:
        assert running.tokens is not None
        monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
        monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.operate)
        keep_tensors(running)
        ShownRun(running, ranks=2, steps=6).train(1, 6)
        shown = outputs(executed(written, tmp_path), "text/plain")
    assert re.search(r"\{'actor 0': \d\.\d+, 'actor 1': \d\.\d+\}", shown)
    assert "one attempt: nothing to compare" in shown


NO_NUMBERS: Final = "has numbers; the latest: step 3 has no numbers"
NO_NAN: Final = "no log-prob of this run is NaN or infinite"


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "run", "said"),
    [
        ("jump_at_the_restart", "greets", "has no step yet"),
        ("jump_at_the_restart", "scalars", NO_NUMBERS),
        ("jump_at_the_restart", "one round", "{'actor 0': 1.0}"),
        ("nan_in_one_operator", "scalars", NO_NAN),
        ("nan_in_one_operator", "not finite", "has no operators; request a capture"),
    ],
)
def test_an_investigation_runs_on_a_run_that_reports_little(
    name: str, run: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attempt of one rank: without steps, without streams, or without rounds and samples."""
    nbformat = pytest.importorskip("nbformat")
    written = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    with service(tmp_path / "another", recorded=False) as running:
        monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
        monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.operate)
        rank = Rank(running, run="bare", world_size=1)
        for step in range(1, 4) if run != "greets" else ():
            streams = payload(1, 0, rounds=1)
            streams["strings"] = {}  # no sample_ids
            if run == "not finite" and step == 2:
                streams["tensors"]["old_log_probs"][2][0, 3] = np.nan
            handed = None if run == "scalars" else streams
            rank.stage("actor_compute_log_prob", step, handed, scalars={"loss": 0.5})
        done = executed(written, tmp_path)
    printed = [out.text for cell in done.cells for out in cell.get("outputs", ()) if "text" in out]
    assert said in outputs(done, "text/plain") + "".join(printed)


_REPORT: Final = """
from stagescope import NotFound
from stagescope_workers import init

probe = init(run="watched", rank=0, world_size=1, strict=True)

def steps():
    try:
        return session.series("loss", run="watched")["step"]
    except NotFound:
        return ()

def train(step):
    with probe.stage("actor_update", step=step) as stage:
        stage.log(loss=float(step))
    deadline = time.monotonic() + 30
    while step not in steps():
        assert time.monotonic() < deadline
"""
_WAIT: Final = """
def last():
    lines = [trace for trace in live.widget.data if trace.name == "value"]
    return max((max(line.x) for line in lines), default=0)
train(3)
deadline = time.monotonic() + 30
while last() < 3 and time.monotonic() < deadline:
    time.sleep(0.05)
live.stop()
last(), live
"""


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_a_live_cell_follows_the_run_in_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("anywidget")
    cells = [
        "import time, stagescope\nsession = stagescope.attach()", _REPORT, "train(1)\ntrain(2)",
        "live = session.watch('loss', run='watched', seconds=0.1)\nlive", _WAIT,
    ]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    with service(tmp_path / "another", recorded=False) as running:
        assert running.tokens is not None
        monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
        monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.operate)
        messages: list[Any] = []
        done = executed(notebook, tmp_path, messages)
    data = [out["data"] for cell in done.cells for out in cell.outputs if "data" in out]
    assert "application/vnd.jupyter.widget-view+json" in data[0]
    assert data[-1]["text/plain"].startswith("(3, <stagescope.Watch stopped")
    # What a browser was sent while the next cell ran.
    sent = [message["content"]["data"].get("state", {}) for message in messages]
    updates = [state["_py2js_update"] for state in sent if state.get("_py2js_update")]
    assert [1, 2, 3] in [x for update in updates for x in update["style_data"]["x"]]
