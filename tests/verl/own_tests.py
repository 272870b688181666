"""verl's own CPU tests, without stagescope and with it: the outcomes must be the same.

    python tests/verl/own_tests.py [--with-ray] [--checkout DIRECTORY] [tests/trainer ...]

The tests are verl's, and no part of stagescope: they come from the source distribution of the verl
that is installed, or from a checkout of its repository at that version, which has more of them.
Without targets every `test_*_on_cpu.py` runs but those of LEFT_OUT; `--with-ray` adds those of
`single_controller`, which start Ray's workers and take some minutes more. Needs pytest-asyncio, as
verl's tests do, without which the asynchronous ones fail alike in each run. Exits with 1 where an
outcome differs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

LEFT_OUT = (
    # Waits for three processors of a Ray cluster, and touches nothing that is patched.
    "tests/trainer/ppo/v1/test_replay_buffer_on_cpu.py",
)
STARTS_RAY = "tests/single_controller/"
UNSET = ("STAGESCOPE_URL", "STAGESCOPE_VERL", "VERL_USE_EXTERNAL_MODULES")
WITHOUT = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
BROKEN = ("failure", "error", "skipped")
SECONDS = 120
"""What one test may take."""


def outcomes(folder: Path, targets: list[str], more: Mapping[str, str]) -> dict[str, str]:
    """Run tests with more variables; return what became of each: passed, or one of BROKEN."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [
            sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors",
            "--tb=no", "--no-summary", "-p", "no:cacheprovider", f"--timeout={SECONDS}",
            f"--junitxml={report.name}", *targets,
        ]  # fmt: skip
        # No hub: what a test cannot load, it shall not wait for. No cluster but the tests' own.
        # No service but the tests' own: `folder` holds no service.json.
        alone = {"HF_HUB_OFFLINE": "1", "RAY_ADDRESS": "local", "STAGESCOPE_HOME": str(folder)}
        env = {**kept, **alone, **more}
        subprocess.run(command, cwd=folder, env=env, stdout=sys.stderr, check=False)
        cases = ET.parse(report.name).getroot().iter("testcase")
        return {
            f"{case.get('classname')}::{case.get('name')}": next(
                (child.tag for child in case if child.tag in BROKEN), "passed"
            )
            for case in cases
        }


@contextlib.contextmanager
def variants() -> Iterator[dict[str, dict[str, str]]]:
    """Yield the variables of each way in which stagescope may be there."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        yield {
            "off": {"STAGESCOPE_VERL": "off"},
            "on, no service": {"STAGESCOPE_VERL": "all"},
            "on, a service that never answers": {"STAGESCOPE_VERL": "all", "STAGESCOPE_URL": url},
        }


@contextlib.contextmanager
def published_tests() -> Iterator[Path]:
    """Yield a folder with the tests of the source distribution of the installed verl."""
    wanted = f"verl=={importlib.metadata.version('verl')}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--no-binary=:all:", f"--dest={folder}", wanted], check=True)
        [archive] = folder.glob("*.tar.gz")
        with tarfile.open(archive) as held:
            # Not verl itself: it is the installed one that is tried.
            tests = [m for m in held.getmembers() if m.name.split("/")[1:2] == ["tests"]]
            held.extractall(folder, members=tests, filter="data")
        [source] = (path for path in folder.iterdir() if path.is_dir())
        yield source


def on_cpu(folder: Path, with_ray: bool) -> list[str]:
    """Return verl's CPU tests, but those of LEFT_OUT."""
    found = {str(path.relative_to(folder)) for path in (folder / "tests").rglob("test_*_on_cpu.py")}
    if not with_ray:
        found = {path for path in found if not path.startswith(STARTS_RAY)}
    return sorted(found - set(LEFT_OUT))


def compare(folder: Path, targets: list[str]) -> bool:
    """Print what differs; return whether nothing does."""
    expected = outcomes(folder, targets, WITHOUT)
    click.echo(f"without stagescope: {dict(Counter(expected.values()))}")
    same = bool(expected)
    with variants() as ways:
        for way, env in ways.items():
            found = outcomes(folder, targets, env)
            click.echo(f"stagescope {way}: {dict(Counter(found.values()))}")
            for test in sorted(expected.keys() | found.keys()):
                before, after = expected.get(test, "absent"), found.get(test, "absent")
                if before != after:
                    same = False
                    click.echo(f"  {test}: {before} -> {after}")
    return same


@click.command()
@click.option("--checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--with-ray", is_flag=True)
@click.argument("targets", nargs=-1)
def main(checkout: Path | None, with_ray: bool, targets: tuple[str, ...]) -> None:
    """Compare the outcomes of verl's tests with stagescope to those without it."""
    with published_tests() if checkout is None else contextlib.nullcontext(checkout) as folder:
        same = compare(folder, list(targets) or on_cpu(folder, with_ray))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
