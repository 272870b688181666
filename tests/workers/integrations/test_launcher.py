"""`stagescope run`: commands run as they are, and each of their processes knows of stagescope."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from stagescope_workers.integrations import registry
from stagescope_workers.integrations.launcher import attempt_key

LAUNCH = "from stagescope.cli import main; main()"
"""`stagescope`, with the installed entry points: `run` is one of them."""
NONE: Mapping[str, str] = {}


def launch(
    *command: str,
    environ: Mapping[str, str] = NONE,
    options: Sequence[str] = (),
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a command under `stagescope run`, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, "run", *options, "--", *command],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", textwrap.dedent(code), *arguments)


def test_a_command_runs_as_it_is() -> None:
    done = launch(
        *python("import sys; print(sys.argv[1:]); sys.exit(37)", "--run", "x", "--", "-h")
    )
    assert (done.returncode, done.stdout) == (37, "['--run', 'x', '--', '-h']\n")
    [line] = done.stderr.splitlines()
    assert line.startswith("stagescope run: no service is known here, nothing is reported")


def _with_interrupts() -> None:
    """A shell's background commands ignore SIGINT, and what they start does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_command(number: signal.Signals) -> None:
    code = "import signal, sys; print('up', flush=True); signal.pause()"
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "run", "--", *python(code)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_with_interrupts,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        process.communicate(timeout=60)
    plain = subprocess.Popen(
        [*python(code)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_with_interrupts,
    )  # fmt: skip
    with plain:
        assert plain.stdout is not None
        plain.stdout.readline()
        plain.send_signal(number)
        plain.communicate(timeout=60)
    assert process.returncode == plain.returncode


def test_a_command_that_cannot_run_has_a_shells_status(tmp_path: Path) -> None:
    gone = launch("no-such-command")
    assert (gone.returncode, gone.stderr.splitlines()[-1]) == (
        127, "stagescope run: no-such-command: command not found",
    )  # fmt: skip
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x00\x01")
    broken.chmod(0o755)
    assert launch(str(broken)).returncode == 126


def test_names_reach_every_process_as_they_were_given() -> None:
    code = """
    import os, subprocess, sys
    show = "import os; print(os.environ['STAGESCOPE_RUN'], os.environ['STAGESCOPE_ATTEMPT'])"
    print(subprocess.run([sys.executable, "-c", show], capture_output=True, text=True).stdout)
    """
    done = launch(*python(code), options=("--run", "mine", "--attempt", "k1"))
    assert done.stdout.split() == ["mine", "k1"]
    odd = launch(*python(code), options=("--run", "qwen3/grpo 1", "--attempt", "k1"))
    assert odd.stdout.split() == ["qwen3/grpo", "1", "k1"]  # each probe normalises it
    assert (
        odd.stderr.count("'qwen3/grpo 1': people see it so, and it is stored as qwen3-grpo-1-") == 1
    )


def test_the_line_says_where_a_service_is_expected_and_does_not_answer() -> None:
    environ = {"STAGESCOPE_URL": "http://127.0.0.1:9"}
    done = launch(*python("print('ran')"), environ=environ)
    assert done.stdout == "ran\n"
    assert "the service at http://127.0.0.1:9 (STAGESCOPE_URL) does not answer" in done.stderr
    # It is reached through the proxy, which must answer then.
    environ = {"STAGESCOPE_URL": "http://head:8700", "STAGESCOPE_PROXY": "http://127.0.0.1:9"}
    done = launch(*python("print('ran')"), environ=environ)
    assert done.stdout == "ran\n"
    way = (
        "http://head:8700 (STAGESCOPE_URL) through the proxy http://127.0.0.1:9 (STAGESCOPE_PROXY)"
    )
    assert f"the service at {way} does not answer: [Errno 111]" in done.stderr


def test_nothing_of_stagescope_is_imported_without_a_trainer() -> None:
    code = "import sys; print([name for name in sys.modules if name.startswith('stagescope')])"
    assert launch(*python(code)).stdout == "[]\n"


def test_the_users_own_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.theirs = __file__\n")
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    code = "import sitecustomize; print(theirs); print(sitecustomize.__file__)"
    expected = str(tmp_path / "sitecustomize.py")
    assert launch(*python(code), environ=environ).stdout.split() == [expected, expected]


def test_an_error_in_the_users_sitecustomize_is_shown_as_without_us(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = launch(*python("print('ran')"), environ=environ)
    assert (done.stdout, "ValueError: theirs" in done.stderr) == ("ran\n", True)


TRAINER = "def train(value):\n    return value\n"
INTEGRATION = """
from stagescope_workers.integrations.patches import Patch

def patches():
    wrap = lambda function: lambda value: ("seen", function(value))
    return [Patch("other_trainer.loop", "train", wrap, "steps")]
"""


@pytest.fixture
def trainer(tmp_path: Path) -> dict[str, str]:
    """A trainer, and an integration of it: the variables by which a process finds both."""
    package = tmp_path / "other_trainer"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1'\n")
    (package / "loop.py").write_text(TRAINER)
    (tmp_path / "other_hooks.py").write_text(INTEGRATION)
    path = os.pathsep.join(
        [str(registry.BOOTSTRAP), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    )
    return {"PYTHONPATH": path, registry.VARIABLE: "other_trainer=other_hooks"}


def run_with(environ: Mapping[str, str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python(code)], env={**os.environ, **environ},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_trainer_is_patched_when_it_is_imported(trainer: dict[str, str]) -> None:
    code = "from other_trainer.loop import train; print(train(1))"
    done = run_with(trainer, code)
    assert (done.stdout, done.stderr) == ("('seen', 1)\n", "")
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    assert run_with(trainer, nested).stdout == "('seen', 1)\n"


def test_a_function_that_is_missing_is_said_in_one_line(trainer: dict[str, str]) -> None:
    loop = Path(trainer["PYTHONPATH"].split(os.pathsep)[1]) / "other_trainer/loop.py"
    loop.write_text("def other():\n    return 1\n")
    done = run_with(trainer, "import other_trainer.loop; print('ran')")
    assert done.stdout == "ran\n"
    [line] = done.stderr.splitlines()
    assert line == "not reported with this version: steps (other_trainer.loop: train is absent)"
    loop.unlink()
    done = run_with(trainer, "import other_trainer; print('ran')")
    assert done.stderr.splitlines() == ["not reported with other_trainer 1: steps"]


def test_a_version_that_was_not_tried_is_said_in_one_line(tmp_path: Path) -> None:
    """Of each trainer: a package of its name, of a version that nobody tried."""
    for each in registry.INTEGRATIONS:
        if each.tried is None or each.attaches_itself:
            continue
        package = tmp_path / each.package
        package.mkdir()
        (package / "__init__.py").write_text("__version__ = '99.0'\n")
    (tmp_path / "no_hooks.py").write_text("def patches():\n    return []\n")
    path = os.pathsep.join(
        [str(registry.BOOTSTRAP), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    )
    table = ",".join(f"{each.package}=no_hooks" for each in registry.INTEGRATIONS[1:])
    code = (
        "import importlib.metadata as m\nm.version = m.metadata = lambda name: m.distribution('-')"
    )
    code += "".join(
        f"\nimport {each.package}"
        for each in registry.INTEGRATIONS
        if each.tried is not None and not each.attaches_itself
    )
    done = run_with({"PYTHONPATH": path, registry.VARIABLE: table}, code)
    assert done.returncode == 0, done.stderr
    expected = [
        f"{each.name} 99.0 was not tried with stagescope: {each.tried}"
        if each.states_version
        else f"the version of {each.name} is not known: {each.tried}"
        for each in registry.INTEGRATIONS
        if each.tried is not None and not each.attaches_itself
    ]
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))


def test_an_integration_that_fails_ends_nothing(trainer: dict[str, str]) -> None:
    hooks = Path(trainer["PYTHONPATH"].split(os.pathsep)[1]) / "other_hooks.py"
    hooks.write_text("raise RuntimeError('ours')\n")
    done = run_with(trainer, "from other_trainer.loop import train; print(train(1))")
    assert done.stdout == "1\n"
    [line] = done.stderr.splitlines()
    assert line.startswith("nothing of other_trainer is reported: stagescope cannot be loaded by")


def test_an_interpreter_without_stagescope_says_so_in_one_line(trainer: dict[str, str]) -> None:
    folder = trainer["PYTHONPATH"].split(os.pathsep)[1]
    environ = {**trainer, "PYTHONPATH": os.pathsep.join([str(registry.BOOTSTRAP), folder])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import sitecustomize, other_trainer; print('ran')"],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "ran\n"
    [line] = done.stderr.splitlines()
    assert "No module named 'stagescope_workers'" in line


def test_children_of_torchrun_are_patched(trainer: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text("from other_trainer.loop import train; print(train('rank'))\n")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--master-port", "0", str(script)],
        env={**os.environ, **trainer}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout.count("('seen', 'rank')") == 2, done.stderr


@pytest.mark.parametrize(
    ("environ", "command", "expected"),
    [
        ({"STAGESCOPE_ATTEMPT": "mine", "SLURM_JOB_ID": "7"}, (), "mine"),
        ({"SLURM_JOB_ID": "7"}, (), "slurm-7.0"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, (), "slurm-7.2"),
        # Another launcher starts the same on other nodes: no key that only this one knows.
        ({}, ("torchrun", "--nnodes=2", "train.py"), None),
        ({}, ("torchrun", "--nnodes", "2", "train.py"), None),
        ({"PET_NNODES": "2"}, ("torchrun", "train.py"), None),
        ({"MASTER_ADDR": "head", "WORLD_SIZE": "2"}, ("python", "train.py"), None),
    ],
)
def test_a_start_has_one_key_on_all_its_nodes(
    environ: dict[str, str], command: tuple[str, ...], expected: str | None
) -> None:
    assert attempt_key(command, environ) == expected


def test_two_starts_on_one_node_have_keys_of_their_own() -> None:
    code = "import os; print(os.environ['STAGESCOPE_ATTEMPT'])"
    keys = {launch(*python(code)).stdout for _ in range(2)}
    assert (len(keys), "" in keys) == (2, False)


def test_a_trainer_that_nobody_knows_is_named() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "stagescope_workers.integrations"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    names = [line.split()[0] for line in listed.stdout.splitlines()]
    assert names == [each.name for each in registry.INTEGRATIONS]
    refused = subprocess.run(
        [sys.executable, "-m", "stagescope_workers.integrations", "nobody"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "'nobody' is none of verl" in refused.stderr
