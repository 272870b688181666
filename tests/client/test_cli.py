from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from tests.support.answering import METRICS, OPERATE, READ, RUN, Answering, unused_port
from tests.support.command_line import invoke

from stagescope import terminal
from stagescope.cli import common
from stagescope.link_text import RENAMED
from stagescope_wire.nonfinite import Json
from stagescope_wire.versions import install_command


def ask(service: Answering, *args: str, token: str = READ, width: int = 80) -> Result:
    env = {"STAGESCOPE_URL": service.url, "STAGESCOPE_TOKEN": token, "COLUMNS": str(width)}
    return invoke(*args, env=env)


def test_json_spells_what_is_not_finite(service: Answering) -> None:
    answer = json.loads(ask(service, "metrics", "5", "--json").stdout)
    assert answer["metrics"] == METRICS
    assert answer["run"] == RUN
    rounds = json.loads(ask(service, "rounds", "5", "--json").stdout)
    assert rounds["rows"][1]["abs_diff_mean"] == "nan"
    assert rounds["truncated"] is False


def test_metrics_by_name_and_of_the_latest_step(service: Answering) -> None:
    both = ask(service, "metrics", "--only", "per_round/*, rollout_corr/k3_kl", "--json")
    assert {*json.loads(both.stdout)["metrics"]} == {
        name for name in METRICS if "per_round" in name or name == "rollout_corr/k3_kl"
    }
    for only in ("nothing*", "per_round/*,nothing*"):
        missing = ask(service, "metrics", "--only", only)
        assert missing.exit_code == 4
        assert "'nothing*'" in missing.stderr
    assert f"and {len(METRICS) - 8} more" in missing.stderr
    similar = ask(service, "metrics", "--only", "*k3kl*")
    assert "did you mean rollout_corr/k3_kl" in similar.stderr


def test_exact_takes_one_run(service: Answering) -> None:
    refused = ask(service, "exact", "one", "--run", "two")
    assert refused.exit_code == 2
    assert "two runs are named: one and two" in refused.stderr


@pytest.mark.parametrize(
    "words",
    ["steps --run", "steps", "doctor --run", "doctor", "metrics 5 --run", "top", "report", "bundle",
     "captures --run", "devices --run", "triggers --run", "forward --to x --run",
     "import . --run"],
)  # fmt: skip
def test_an_empty_name_of_a_run_is_refused(service: Answering, words: str) -> None:
    refused = ask(service, *words.split(), "")
    assert refused.exit_code == 2
    assert "the name of the run is empty" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["metrics", "99"], 4, "a step from 0 to 5"),
        (["metrics", "newest"], 2, "neither a whole number from 0 nor 'latest'"),
        (["tokens", "-1"], 2, "'-1' is neither a whole number from 0 nor 'latest'"),
        (["tokens", "-12"], 2, "'-12' is neither"), (["pin", "-1"], 2, "'-1' is neither"),
        (["doctor", "--step", "-1"], 2, "x>=0"), (["series", "loss", "--from", "-1"], 2, "x>=0"),
        (["runs", "-1"], 2, "No such option"), (["nothing"], 2, "No such command"),
        (["capture"], 2, "`stagescope stages` lists"),
        (["capture", "--steps", "foo", "--stages", "all"], 2, "'next:K' or 'every:N[,K]'"),
        (["--url", "http://x", "runs"], 2, "--url stands after the command: stagescope COMMAND"),
        (["serv"], 2, "'serve'"), (["compar"], 2, "'compare'"),
        (["steps", "--attempt", "0"], 2, "--attempt"),
        (["steps", "--token", "secret"], 2, "No such option"),
        (["remove-capture", "c9"], 5, "read token"), (["attempts", "--run", ".."], 2, "not a name"),
    ],
)  # fmt: skip
def test_errors_are_a_line_or_two_and_a_code(
    service: Answering, args: list[str], code: int, message: str
) -> None:
    result = ask(service, *args)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_exit_code_3_without_a_known_service() -> None:
    result = invoke("status")
    assert result.exit_code == 3
    assert "stagescope serve" in result.stderr


def test_a_wrong_token_is_5(service: Answering, tmp_path: Path) -> None:
    assert ask(service, "runs", token="wrong").exit_code == 5
    assert ask(service, "runs", "--token-file", str(tmp_path / "none")).exit_code == 5
    (tmp_path / "token").write_text(READ)
    result = ask(service, "runs", "--token-file", str(tmp_path / "token"), token="wrong")
    assert result.exit_code == 0


@pytest.mark.parametrize("position", ["before", "after"])
def test_debug_shows_the_traceback(service: Answering, position: str) -> None:
    args = ["metrics", "99"]
    args = ["--debug", *args] if position == "before" else [*args, "--debug"]
    result = ask(service, *args)
    assert result.exit_code != 0
    assert type(result.exception).__name__ == "NotFound"


def test_a_capture_by_its_options(service: Answering, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"task": "statistics"}')
    args = ["capture", "--steps", "5,7-9", "--stages", "actor_update,ref_compute_log_prob"]
    args += ["--ranks", "0", "--config", str(config), "--keep", "old_log_probs", "--json"]
    result = ask(service, *args, token=OPERATE)
    assert result.exit_code == 0, result.output
    capture = json.loads(result.stdout)
    assert service.captures[capture["capture_id"]] == {
        "capture_id": capture["capture_id"],
        "steps": [5, 7, 8, 9],
        "stages": ["actor_update", "ref_compute_log_prob"],
        "ranks": [0],
        "config": {"task": "statistics"},
        "keep": ["old_log_probs"],
    }
    assert "5, 7, 8, 9" in ask(service, "plan").stdout
    assert "5, 7, 8, 9" in ask(service, "plan", "--run", "another").stdout  # it is of every run
    removed = ask(service, "remove-capture", capture["capture_id"], token=OPERATE)
    assert removed.exit_code == 0
    assert not service.captures


@pytest.mark.parametrize("steps", ["x", "5-x", "-5", "0-99999999999"])
def test_steps_that_cannot_be_read(service: Answering, steps: str) -> None:
    result = ask(service, "capture", f"--steps={steps}", "--stages", "all", token=OPERATE)
    assert result.exit_code == 2
    assert not service.captures


def test_a_config_that_is_not_json(service: Answering, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    args = ["capture", "--steps", "5", "--stages", "all", "--config"]
    result = ask(service, *args, str(tmp_path / "config.json"), token=OPERATE)
    assert result.exit_code == 2
    assert "config.json" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["top", "--once", "--every=nan"], ["metrics", "5", "--timeout=inf"],
        ["report", "--wait=nan", "-o", "r.md"], ["top", "--once", "--every=1e300"],
    ],
)  # fmt: skip
def test_seconds_that_are_no_finite_number(service: Answering, args: list[str]) -> None:
    result = ask(service, *args)
    assert result.exit_code == 2
    assert re.search("is not a finite number|is larger than 1e", result.stderr)


def test_a_bundle_is_a_tar_gz(service: Answering, tmp_path: Path) -> None:
    result = ask(service, "bundle", RUN, "5", "-o", str(tmp_path / "x.zip"))
    assert result.exit_code == 2
    assert ".tar.gz or .tgz" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_narrow_terminal_is_kept_to(service: Answering) -> None:
    narrow = ask(service, "tokens", "5", "--limit", "3", width=40).stdout
    assert max(map(len, narrow.splitlines())) <= 40
    assert "truncated at 3 rows: the service has more (raise --limit;" in " ".join(narrow.split())


def test_help_lists_the_exit_codes_and_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for code, meaning in terminal.EXIT_CODES.items():
        assert f"{code}  {meaning}" in result.stdout
    for name in (*common.main.commands, "serve", "stop"):
        assert f"\n  {name} " in result.stdout
        assert invoke(name, "--help").exit_code == 0
    text = result.stdout
    assert text.index("What went wrong:") < text.index("findings") < text.index("Compare and keep:")
    assert "More:" not in text, "a command of no task: name one in common.TASKS"


def test_a_command_by_its_earlier_name(service: Answering) -> None:
    for earlier, name in RENAMED.items():
        assert f"\n  {earlier} " not in invoke("--help").stdout
        assert (
            invoke(earlier, "--help").stdout.split("\n", 1)[1]
            == (invoke(name, "--help").stdout.split("\n", 1)[1])
        )
    assert ask(service, "losses", "--json").stdout == ask(service, "lost", "--json").stdout


def test_help_says_what_else_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in pyproject for extra in common.EXTRAS)
    extras = {"service": ("json", "is here"), "notebook": ("not_here", "draws")}
    monkeypatch.setattr(common, "EXTRAS", extras)
    text = invoke("--help").stdout
    assert f"({install_command('NAME')})" in text
    assert re.search(r"^  notebook +draws$", text, re.M)
    assert "is here" not in text
    monkeypatch.setattr(common, "EXTRAS", {"service": extras["service"]})
    assert "Not installed" not in invoke("--help").stdout


class OtherPoint:
    """An entry point whose package lacks a library, as `metadata.EntryPoint` behaves then."""

    name = "serve"
    module = "stagescope_service.commands.serving"

    def load(self) -> None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")


@pytest.mark.parametrize("points", [{}, {"serve": OtherPoint()}], ids=["absent", "broken"])
def test_a_service_command_without_its_extra_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch, points: dict[str, Json]
) -> None:
    monkeypatch.setattr(common, "_entry_points", lambda: points)
    result = invoke("serve", "--port", "1")
    assert result.exit_code == 1
    assert install_command("service") in result.stderr
    assert invoke("--help").exit_code == 0


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stagescope", *args]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **env}, timeout=60, check=False
    )


def test_a_real_process_exits_with_the_codes(service: Answering) -> None:
    good = run("runs", "--json", STAGESCOPE_URL=service.url, STAGESCOPE_TOKEN=READ)
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["rows"][0]["run"] == RUN
    missing = run("metrics", "99", STAGESCOPE_URL=service.url, STAGESCOPE_TOKEN=READ)
    assert (missing.returncode, missing.stdout) == (4, "")
    away = run("status", STAGESCOPE_URL=f"http://127.0.0.1:{unused_port()}")
    assert (away.returncode, away.stdout, len(away.stderr.splitlines())) == (3, "", 2)
    assert "from STAGESCOPE_URL" in away.stderr
    assert "Traceback" not in missing.stderr + away.stderr
    wrong = run("metrics", "--nothing")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("Usage: python -m stagescope metrics")
