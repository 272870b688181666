"""The README and docs/: their commands and Python run against a service; what they name exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch

import stagescope
from stagescope import cli
from stagescope_workers import init
from tests.support.api import Service, service
from tests.support.command_line import invoke
from tests.support.runs.investigated import investigated
from tests.support.runs.shown import RUN
from tests.tools import prose

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
NOT_RUN: Final = {
    r"^(pip install|make) ": "its extras and targets are looked up instead",
    r"^stagescope (serve|stop)": "starts a Ray cluster: tests/integration/test_clusters.py",
    r"ssh ": "is of two machines",
    r"https://HOST/": "needs a proxy: tests/service/http/test_behind_a_proxy.py",
    r"^python train\.py$": "is the reader's training",
    r"verl|^(source|ray) |stages 1 ": "trains with verl: tests/verl",
    r"steps/1/metrics": "is of that training",
    r"^stagescope consistency ": "needs a model and an engine: tests/workers/consistency",
    r"^canary = probe\.canary\(": "needs an engine: tests/vllm/test_canary.py",
    r"^stagescope canary qwen-canary": "is of that engine: tests/vllm/test_canary.py",
    r"^stagescope routing 1": "needs a MoE: tests/service/views/steps/test_routing.py",
    r"routed_experts=|trainer_routes|routes_of": "needs such a model: tests/vllm/test_routing.py",
    r"stagescope\.engine\(": "needs an engine: tests/client/engines/test_commands.py",
    r"^stagescope bisect |bisect-qwen3-8b-6": "needs a model and an engine: tests/workers/bisect",
    r"^stagescope tensors ": "msprobe compares in a task of Ray: test_operators_over_ray.py",
    r"^stagescope weights 3": "is of the example: tests/service/views/test_weights.py",
    r"^stagescope triggers test rank-off": "calls a webhook: tests/client/test_triggers.py",
    r"^stagescope runs --(hide|delete) ": "changes the list: service/coordinator/test_deletion.py",
    r"^stagescope token ": "changes the service's home: tests/service/test_commands.py",
    r"stagescope mcp ": "serves until its agent ends: tests/client/agents",
    r"^stagescope attach ": "serves until it is interrupted: tests/service/report/bundle",
    r"stagescope run ": "runs a trainer: tests/workers/integrations",
    r"^python -m stagescope_workers\.integrations": "is of those that are installed: likewise",
    r"examples\.attach\.": "trains: tests/examples/attach",
    r"tests/own_tests/": "trains with a checkout of a trainer",
    r"(?i)nexrl|TRAIN_CONFIG|STAGESCOPE_TOKEN_FILE=/shared": "needs NexRL: test_nexrl.py",
    r"^stagescope (import|compare) (logs|outputs)/": "needs a trainer's files: tests/service/dumps",
    r"^stagescope collectives": "needs files of a recorder: tests/client/collectives/test_files.py",
    r"^stagescope forward .*(mlflow|trackio|swanlab|otlp):": "needs one: tests/client/forwarding",
    r"^stagescope divergence run=tp2": "needs two layouts: views/operators/test_layouts.py",
    r"ray\.get_actor": "needs a Ray cluster: tests/integration/test_conformance_over_ray.py",
}
"""Part of a command or of a Python block -> why it is not run here."""
PLACEHOLDERS: Final = {
    " [RUN]": "", "--run R ": f"--run {RUN} ", "run=npu": f"run={RUN}", "run=gpu": f"run={RUN}",
}  # fmt: skip
ENDS_WITH: Final = {"stagescope compare": 1, "stagescope capture": 1}
"""Exit statuses but 0: what is compared differs, and no rank is left to acknowledge."""


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    source: str


def blocks(language: str) -> Iterator[Block]:
    for page in PAGES:
        fenced = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        yield from (
            Block(page.name, found, source) for found, source in fenced if found == language
        )


def commands() -> list[tuple[str, str]]:
    """Pages with the commands after their prompts, without comments."""
    found = []
    for block in blocks("console"):
        if block.page == "tutorial.md":  # tests/examples/test_tutorial.py walks it
            continue
        prompts = re.findall(r"^\w*\$ (.*)", block.source, re.M)
        found += [(block.page, re.split(r"\s+# ", prompt)[0].strip()) for prompt in prompts]
    return found


def is_run(text: str) -> bool:
    return not any(re.search(part, text) for part in NOT_RUN)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The run that the documentation speaks of, with a capture of its step 33."""
    with service(tmp_path_factory.mktemp("home"), recorded=False) as running:
        investigated(running)
        yield running


@pytest.fixture(autouse=True)
def user(live: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user of the service in a directory of their own, with the files that pages speak of."""
    assert live.tokens is not None
    home = tmp_path / "user"
    (home / ".stagescope").mkdir(parents=True)
    (home / ".stagescope/read.token").write_text(live.tokens.read)
    (rules,) = (block.source for block in blocks("yaml") if block.page == "triggers.md")
    (tmp_path / "rules.yaml").write_text(rules)
    (tmp_path / "stagescope.token").write_text(live.tokens.read + "\n")
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "HOME": str(home), "STAGESCOPE_URL": live.server.url,
        "STAGESCOPE_TOKEN": live.tokens.operate,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("page", "command"), [pytest.param(*each, id=each[1]) for each in commands() if is_run(each[1])]
)
def test_commands_do_what_the_pages_say(live: Service, page: str, command: str) -> None:
    for name, value in PLACEHOLDERS.items():
        command = command.replace(name, value)
    if command.startswith("curl "):
        address = live.server.url.removeprefix("http://")
        command = command.replace("localhost:8700", address).replace("curl ", "curl -sSf ")
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, env=os.environ, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f'"run":"{RUN}"' in done.stdout
        return
    words = shlex.split(command)
    assert words[0] == "stagescope", f"{page} has a command of which this test knows nothing"
    wanted = next((code for part, code in ENDS_WITH.items() if command.startswith(part)), 0)
    words += ["--wait-seconds", "1", "--force"] if words[1] == "capture" else []
    result = invoke(*words[1:])
    assert result.exit_code == wanted, f"{result.stdout}\n{result.stderr}"
    assert result.stdout.strip()


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{block.page}-{at}")
        for at, block in enumerate(blocks("python"))
        if is_run(block.source)
    ],
)
def test_python_does_what_the_pages_say(
    block: Block, live: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = block.source.replace("http://127.0.0.1:8700", live.server.url)
    if "probe" in source:
        run_in_training(source, tmp_path, monkeypatch)
        return
    with stagescope.attach() as session:
        scope: dict[str, Any] = {"session": session, "step": session.step(5)}
        scope |= {"stagescope": stagescope, "batch": session.step(5).batch()}
        scope["my_loss"] = lambda micro: {"rollout_is_weights": micro["rollout_is_weights"]}
        exec(compile(source, block.page, "exec"), scope)
        scope["session"].close()


def run_in_training(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what stands in a training process, beside a service of its own."""
    model = torch.nn.Linear(2, 2)
    random = np.random.default_rng(0)
    scope: dict[str, Any] = {
        name: -random.exponential(1.0, (1, 64)).astype(np.float32)
        for name in ("q", "advantages", "ratio", "losses")
    }
    noise = random.normal(0.0, 0.01, (1, 64))
    scope |= {
        "p": np.minimum(scope["q"] + noise, 0).astype(np.float32),
        "mask": np.ones((1, 64), np.int64), "ids": ["g0-0"],
        "rank": 0, "world_size": 1, "step": 5, "model": model,
        "new": scope["q"], "received": dict(model.named_parameters()), "e": 0, "m": 0, "b": 0,
        "loss": 0.1,
    }  # fmt: skip
    with service(tmp_path / "another", recorded=False) as running:
        assert running.tokens is not None
        monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
        monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.operate)
        probe = scope["probe"] = init(run="documented", rank=0, world_size=1, strict=True)
        try:
            exec(compile(source, "a page", "exec"), scope)
        finally:
            probe.close(timeout=30)
            scope["probe"].close(timeout=30)
        assert running.get("/runs")["rows"]
        errors = running.get("/findings", only="error")["rows"]
        assert [row["message"] for row in errors] == []


def test_what_is_installed_made_and_asked_for_exists() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = {each for found in re.findall(r"(?:clone|stagescope)\[([\w,]+)\]", text)
              for each in found.split(",")}  # fmt: skip
    assert "service" in extras
    for extra in extras:
        assert re.search(rf"^{extra} = \[", pyproject, re.M), extra
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"(?:`|\$ )make ([a-z][a-z-]*)\b", text):
        assert re.search(rf"^{target}:", makefile, re.M), target
    named = set(re.findall(r"`stagescope ([a-z][a-z-]+)", text))
    assert {"serve", "rounds"} <= named
    for name in named:
        assert cli.main.get_command(None, name) is not None, name  # type: ignore[arg-type]


def test_links_and_pictures_exist_and_the_readme_is_short() -> None:
    for page in {*PAGES, *ROOT.glob("*.md")}:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
    for picture in (ROOT / "docs/pictures").iterdir():
        assert picture.stat().st_size < 200_000, picture.name
    assert len(PAGES[0].read_text("utf-8").splitlines()) < 150


def test_the_words_that_the_page_explains_are_in_the_glossary() -> None:
    script = (ROOT / "service/stagescope_service/http/static/words.js").read_text("utf-8")
    words = re.findall(r'^  "?([^\s":]+)"?: "[A-Z]', script, re.M)
    assert len(words) >= 7
    names = ("glossary.md", "service-words.md", "field-words.md")
    pages = [(ROOT / "docs" / name).read_text("utf-8") for name in names]
    heads = ", ".join(re.findall(r"^### (.*)$", "\n".join(pages), re.M)).casefold().split(", ")
    assert {*words} <= {*heads}


def test_every_picture_is_shown_and_described() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    for picture in (ROOT / "docs/pictures").iterdir():
        markdown = rf"!\[[^\]]{{10,}}\]\([^)]*{picture.name}\)"
        assert re.search(rf'{markdown}|{picture.name}"[^>]* alt="[^"]{{10,}}"', text), picture.name


def test_every_exception_is_needed() -> None:
    texts = [command for _, command in commands()] + [block.source for block in blocks("python")]
    for part in NOT_RUN:
        assert any(re.search(part, text) for text in texts), part


def test_code_in_a_docstring_is_no_sentence() -> None:
    text = """Hide a run from lists.

    \b
    tool --hide RUN and the rest

    Usage::

        tool --show RUN and the rest

    Show it again in lists. `show` does that too.
    """
    assert [found for _, found in prose.sentences(text)] == [
        "Hide a run from lists.", "Show it again in lists.", "code does that too.",
    ]  # fmt: skip


def test_pages_and_docstrings_are_easy_to_read() -> None:
    totals, rows = prose.examine(prose.files([str(ROOT / name) for name in prose.PATHS]))
    for kind, (most_rows, most_long) in prose.LIMITS.items():
        assert totals[kind].words > 10_000
        assert totals[kind].rate <= most_rows, rows[:20]
        assert totals[kind].share <= most_long, rows[:20]
