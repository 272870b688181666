"""Trainers' own CPU tests, without stagescope and with it: the outcomes must be the same.

    python tests/own_tests/compare.py NAME [--checkout DIRECTORY] [--installed] [tests/trainer ...]

The tests are the trainer's, and no part of stagescope. verl's come from the source distribution
of the verl that is installed; the others', and more of verl's, from a checkout of the repository,
where they try the package beside them, or with `--installed` the one that is installed. Without
targets those of TRAINERS run. What this Python lacks of what they need fails alike in each run.

verl's plugin is switched by its variable, the others are attached by `stagescope run --`, as in a
training. Printed are the outcomes of each run, what of stagescope was called in it, and what the
integration logged. Exits with 1 where an outcome differs, or where nothing was replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

PLUGINS: Final = Path(__file__).resolve().parent / "plugins"
PYTHON312: Final = str(PLUGINS.with_name("python312"))
UNSET: Final = ("VERL_USE_EXTERNAL_MODULES",)
BROKEN: Final = ("failure", "error", "skipped")
SECONDS: Final = 120
"""What one test may take."""


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Where a trainer's own tests are, and what they need.

    Attributes:
        tests: Patterns of files.
        left_out: Of these.
        with_ray: Patterns of files that run with `--with-ray` alone, for the time they take.
        plugins: Of pytest, from PLUGINS, beside `attached`.
        models: What TRL's plugin writes into a hub's cache.
        paths: Folders of the checkout, or others, that belong on PYTHONPATH.
        without: Expression for pytest's -k: what cannot run here.
        chosen: Expression for pytest's -k: what runs unless everything is to.
        environ: Variables of each run.
        attaches_itself: Its plugin is loaded without `stagescope run`.
    """

    tests: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    with_ray: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    without: str = ""
    chosen: str = ""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attaches_itself: bool = False

    def selection(self, everything: bool) -> list[str]:
        """Return the arguments of pytest that select tests."""
        parts = [self.without and f"not ({self.without})", "" if everything else self.chosen]
        expression = " and ".join(f"({part})" for part in parts if part)
        return ["-k", expression] if expression else []

    def targets(self, folder: Path, with_ray: bool) -> list[str]:
        """Return the files of `folder` that run."""

        def found(patterns: tuple[str, ...]) -> set[str]:
            paths = (path for pattern in patterns for path in folder.glob(pattern))
            return {str(path.relative_to(folder)) for path in paths}

        slow = set() if with_ray else found(self.with_ray)
        return sorted(found(self.tests) - found(self.left_out) - slow)


# What takes four minutes: a training of each kind that touches what is replaced.
_OF_TRL: Final = (
    "test_async_grpo_trainer or GMPO or RolloutDispatch or test_train_multiple_iterations or "
    "test_train_peft_config or with_None_output or test_train_beta_non_zero or "
    "test_train_with_off_policy_mask or test_train_sequence or test_train_scale_rewards or "
    "test_train_normalize or (test_train_loss_types and cispo) or test_train_with_sync_ref"
)

TRAINERS: Final = {
    "verl": Trainer(
        tests=("tests/**/test_*_on_cpu.py",),
        # Waits for three processors of a Ray cluster, and touches nothing that is patched.
        left_out=("tests/trainer/ppo/v1/test_replay_buffer_on_cpu.py",),
        with_ray=("tests/single_controller/**/*.py",),
        attaches_itself=True,
    ),
    "trl": Trainer(
        tests=(
            "tests/test_grpo_trainer.py",
            "tests/experimental/test_async_grpo_trainer.py",
            "tests/experimental/test_gmpo_trainer.py",
        ),
        plugins=("trl_offline",),
        models=(
            "tiny-Cohere2ForCausalLM", "tiny-Gemma2ForCausalLM", "tiny-Glm4MoeForCausalLM",
            "tiny-GptOssForCausalLM", "tiny-LlamaForCausalLM-3.2",
            "tiny-LlamaForSequenceClassification-3.2", "tiny-MistralForCausalLM-0.2",
            "tiny-Qwen2ForCausalLM-2.5", "tiny-Qwen2ForSequenceClassification-2.5",
            "tiny-Qwen3ForCausalLM", "small-Qwen3ForCausalLM", "tiny-Qwen3MoeForCausalLM",
            "tiny-Qwen3ForSequenceClassification",
        ),
        # Images are left out: the models that see them, and their inputs, are not made here.
        without="VLM or multimodal or liger or vllm",
        chosen=_OF_TRL,
        environ={"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"},
    ),
    "slime": Trainer(
        tests=(
            "tests/plugin_contracts/test_*.py",
            "tests/observability/test_*.py",
            "tests/test_train_data_utils.py",
            "tests/test_metric_report.py",
        ),
    ),
    "SkyRL": Trainer(
        tests=(
            "tests/train/test_rl_callbacks.py",
            "tests/train/test_trainer.py",
            "tests/train/test_fully_async_trainer.py",
            "tests/train/test_generator_postprocess.py",
            "tests/train/algorithms/test_skip_fwd_logprobs.py",
            "tests/backends/skyrl_train/utils/test_profiler.py",
        ),
        paths=("skyrl-gym", PYTHON312),
    ),
    # Needs vLLM and torch 2.10, as AReaL does.
    "AReaL": Trainer(
        tests=(
            "tests/test_functional.py",
            "tests/test_perf_tracer.py",
            "tests/test_ppo_stats.py",
            "tests/test_prox_approx.py",
            "tests/test_trackio_backend.py",
            "tests/infra/data_service/test_trainer_compat.py",
        ),
    ),
    # Needs a transformers of 5.8: NeMo-RL names what later ones lack.
    "RL": Trainer(
        tests=("tests/unit/algorithms/test_grpo.py", "tests/unit/utils/test_logger.py"),
        paths=(PYTHON312,),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Way:
    """One of the ways in which stagescope may be there: in front of the command, and variables."""

    name: str
    launcher: tuple[str, ...] = ()
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Run:
    """What became of the tests.

    Attributes:
        outcomes: By test: passed, or one of BROKEN.
        attached: What the plugin `attached` wrote.
        seconds: That they took.
    """

    outcomes: Mapping[str, str]
    attached: Mapping[str, Any]
    seconds: float

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {what}" for what, n in Counter(self.outcomes.values()).items())
        called = self.attached["calls"]
        return (
            f"{counts}; {self.attached['tests']} of the tests call {len(called)} of "
            f"{len(self.attached['applied'])} replaced functions, {sum(called.values())} times; "
            f"{self.seconds:.0f} s"
        )


@contextlib.contextmanager
def ways(trainer: Trainer) -> Iterator[list[Way]]:
    """Yield the ways, the first of which is without stagescope."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never answers
        service = {"STAGESCOPE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        never = "a service that never answers"
        if trainer.attaches_itself:
            everything = {"STAGESCOPE_VERL": "all"}
            yield [
                Way("without stagescope", environ={"VERL_USE_EXTERNAL_PLUGINS": "none"}),
                Way("stagescope off", environ={"STAGESCOPE_VERL": "off"}),
                Way("stagescope on, no service", environ=everything),
                Way(f"stagescope on, {never}", environ={**everything, **service}),
            ]
            return
        launcher = (sys.executable, "-m", "stagescope", "run", "--")
        yield [
            Way("without stagescope"),
            Way("stagescope run, no service", launcher),
            Way(f"stagescope run, {never}", launcher, service),
        ]


def run(trainer: Trainer, folder: Path, arguments: list[str], way: Way, home: Path) -> Run:
    """Run tests in one way.

    Args:
        trainer: Whose.
        folder: In which they run.
        arguments: Of pytest: which tests.
        way: Whether and how stagescope is there.
        home: An empty folder, but for a hub's cache.
    """
    report, attached = home / "report.xml", home / "attached.json"
    plugins = [word for name in ("attached", *trainer.plugins) for word in ("-p", name)]
    command = [
        *way.launcher, sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors",
        "--tb=no", "--no-summary", "-p", "no:cacheprovider", f"--timeout={SECONDS}", "--maxfail=0",
        f"--junitxml={report}", *plugins, *arguments,
    ]  # fmt: skip
    begun = time.monotonic()
    env = {
        **_environ(trainer, folder, home),
        "STAGESCOPE_OWN_TESTS_REPORT": str(attached),
        **way.environ,
    }
    subprocess.run(command, cwd=folder, env=env, stdout=sys.stderr, check=False)
    cases = ET.parse(report).getroot().iter("testcase")
    outcomes = {
        f"{case.get('classname')}::{case.get('name')}": next(
            (child.tag for child in case if child.tag in BROKEN), "passed"
        )
        for case in cases
    }
    return Run(outcomes, json.loads(attached.read_text()), time.monotonic() - begun)


def _environ(trainer: Trainer, folder: Path, home: Path) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in UNSET and not name.startswith("STAGESCOPE_")
    }
    # No hub: what a test cannot load, it shall not wait for. No cluster but the tests' own.
    # No service but the tests' own: `home` holds no service.json.
    alone = {"HF_HUB_OFFLINE": "1", "RAY_ADDRESS": "local", "STAGESCOPE_HOME": str(home)}
    further = [str(folder / path) for path in trainer.paths]
    paths = os.pathsep.join([str(PLUGINS), *further, *filter(None, [kept.get("PYTHONPATH")])])
    hub = {"HF_HOME": str(home / "hf")} if trainer.models else {}
    return {**kept, **alone, **hub, "PYTHONPATH": paths, **trainer.environ}


@contextlib.contextmanager
def published(name: str) -> Iterator[Path]:
    """Yield a folder with the tests of the source distribution of an installed trainer."""
    wanted = f"{name}=={importlib.metadata.version(name)}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--no-binary=:all:", f"--dest={folder}", wanted], check=True)
        [archive] = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as held:
            # Not the trainer itself: it is the installed one that is tried.
            tests = [m for m in held.getmembers() if m.name.split("/")[1:2] == ["tests"]]
            held.extractall(folder, members=tests, filter="data")
        [source] = (path for path in Path(folder).iterdir() if path.is_dir())
        yield source


@contextlib.contextmanager
def tests_alone(checkout: Path) -> Iterator[Path]:
    """Yield a folder with the tests of a checkout, without the package."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(checkout / "tests", Path(folder, "tests"))
        shutil.copy(checkout / "pyproject.toml", folder)
        yield Path(folder)


def compare(trainer: Trainer, folder: Path, arguments: list[str]) -> bool:
    """Print what differs; return whether nothing does."""
    runs: list[Run] = []
    same = True
    with tempfile.TemporaryDirectory() as name, ways(trainer) as all_ways:
        home = Path(name)
        if trainer.models:
            command = [sys.executable, "-m", "trl_offline", *trainer.models]
            subprocess.run(command, cwd=folder, env=_environ(trainer, folder, home), check=True)
        for way in all_ways:
            found = run(trainer, folder, arguments, way, home)
            click.echo(f"{way.name}: {found}")
            for line in found.attached["logged"]:
                click.echo(f"  logged in {line}")
            runs.append(found)
            same = _same(runs[0].outcomes, found.outcomes) and same
        for name, count in sorted(runs[-1].attached["calls"].items()):
            click.echo(f"  {name} was called {count} times")
        return same and bool(runs[0].outcomes) and bool(runs[-1].attached["applied"])


def _same(expected: Mapping[str, str], found: Mapping[str, str]) -> bool:
    changed = [
        (test, expected.get(test, "absent"), found.get(test, "absent"))
        for test in sorted(expected.keys() | found.keys())
        if expected.get(test) != found.get(test)
    ]
    for test, before, after in changed:
        click.echo(f"  {test}: {before} -> {after}")
    return not changed


@click.command()
@click.argument("name", type=click.Choice(list(TRAINERS)))
@click.option("--checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--installed", is_flag=True, help="Try the installed package by a checkout's tests.")
@click.option("--with-ray", is_flag=True, help="Also the tests that start Ray's workers for long.")
@click.option("--everything", is_flag=True, help="Also tests like others, for the time they take.")
@click.argument("targets", nargs=-1)
def main(
    name: str,
    checkout: Path | None,
    installed: bool,
    with_ray: bool,
    everything: bool,
    targets: tuple[str, ...],
) -> None:
    """Compare the outcomes of a trainer's own tests with stagescope to those without it."""
    trainer = TRAINERS[name]
    if checkout is None:
        source: contextlib.AbstractContextManager[Path] = published(name)
    else:
        source = tests_alone(checkout) if installed else contextlib.nullcontext(checkout)
    with source as folder:
        chosen = list(targets) or trainer.targets(folder, with_ray)
        assert chosen, f"{folder} has none of {trainer.tests}"
        same = compare(trainer, folder, [*trainer.selection(everything), *chosen])
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
