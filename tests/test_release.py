"""What `make dist` builds: both archives are whole, install into an empty environment, and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from packaging.requirements import Requirement

from stagescope import __version__
from stagescope.cli.common import EXTRAS

pytest.importorskip("hatchling", reason="the backend that builds the archives")

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = {"stagescope_wire": "client", "stagescope": "client",
                   "stagescope_workers": "workers", "stagescope_service": "service"}  # fmt: skip
SUFFIXES: Final = {".py", ".typed", ".js", ".mjs", ".css", ".html", ".svg", ".json", ".yaml",
                   ".mako", ".md", ".png", ".webp", ".txt"}  # fmt: skip
"""Of code and of data that it reads: no catalogue, no token, nothing that a run left behind."""
CORE: Final = ("click", "httpx", "numpy", "packaging")
SERVICE: Final = """
import json, tempfile
from pathlib import Path
import stagescope, stagescope_service, stagescope_workers
from starlette.testclient import TestClient
from stagescope_service.http.app import make_app
from stagescope_service.rules.doctor import rulebook
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.sql import SqlStore
settings = Settings(home=Path(tempfile.mkdtemp()), auth=False)
store = SqlStore(settings.catalogue_url)
store.open()
catalogue = Catalogue(settings.catalogue_url)
app = make_app(catalogue=catalogue, commands=None, settings=settings, tokens=None)
client = TestClient(app, base_url="http://127.0.0.1")
asked = ("/", "/docs", "/static/app.js", "/v1/runs", "/triggers/defaults", "/openapi.json")
print(json.dumps({
    "files": [each.__file__ for each in (stagescope, stagescope_service, stagescope_workers)],
    "answers": {path: client.get(path).status_code for path in asked},
    "version": client.get("/healthz").json()["version"],
    "rules": len(rulebook()),
}))
"""


class Built(NamedTuple):
    """The two archives."""

    wheel: Path
    sdist: Path


def run(*command: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A command as a user has it: nothing of this environment's leads to the source tree."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PIP_", "STAGESCOPE_", "RAY_"))
    }
    environment |= {"HOME": str(cwd), "PIP_CONFIG_FILE": os.devnull, "COLUMNS": "200"}
    return subprocess.run(
        [str(each) for each in command], cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def succeed(*command: object, cwd: Path = ROOT) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def build(source: Path, into: Path, *options: str) -> None:
    succeed(sys.executable, "-m", "hatchling", "build", "-d", into, *options, cwd=source)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


def environment(folder: Path, wheel: Path) -> Path:
    """An environment with the wheel and nothing else; returns its folder of programs."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    options = ("--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    succeed(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    return folder / "bin"


def site_of(programs: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return programs.parent / "lib" / version / "site-packages"


@pytest.fixture(scope="module")
def client(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment with what the package asks for without an extra, no more."""
    programs = environment(tmp_path_factory.mktemp("client"), built.wheel)
    site = site_of(programs)
    for name in sorted(needed(CORE)):
        for top in {file.parts[0] for file in metadata.files(name) or ()} - {".."}:
            source = Path(str(metadata.distribution(name).locate_file(top)))
            if top != "__pycache__" and source.exists():
                (site / top).symlink_to(source)
    return programs


def needed(names: tuple[str, ...]) -> set[str]:
    """Distributions with those that they need without an extra."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            lines = map(Requirement, metadata.requires(name) or ())
            waiting += [
                line.name
                for line in lines
                if not line.marker or line.marker.evaluate({"extra": ""})
            ]
    return found


def tree() -> set[str]:
    """Every file of the three packages, as the wheel has them."""
    return {
        file.relative_to(ROOT / parent).as_posix()
        for package, parent in PACKAGES.items()
        for file in (ROOT / parent / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_the_wheel_has_every_file_of_the_packages_and_no_other(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    about = f"stagescope-{__version__}.dist-info/"
    own = {name for name in names if not name.startswith(about)}
    assert own == tree()
    assert {Path(name).suffix for name in own} <= SUFFIXES
    for part in ("http/static/index.html", "rules/defaults.yaml",
                 "rules/symptoms/mismatch_jump.yaml",
                 "compare/report/comparison.schema.json", "templates/report.md"):  # fmt: skip
        assert f"stagescope_service/{part}" in own
    licenses = {name.rpartition("/")[2] for name in names if name.startswith(f"{about}licenses/")}
    assert licenses == {"LICENSE", "plotly.LICENSE.txt", "preact.LICENSE.txt"}
    assert f"{about}entry_points.txt" in names


def test_the_metadata_names_the_license_and_asks_for_little(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        text = archive.read(f"stagescope-{__version__}.dist-info/METADATA").decode()
    lines = text.partition("\n\n")[0].splitlines()
    assert "License-Expression: Apache-2.0 AND MIT" in lines
    required = [Requirement(line.partition(": ")[2]) for line in lines if "Requires-Dist" in line]
    assert sorted(each.name for each in required if each.marker is None) == sorted(CORE)
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert f"\n## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_source_archive_builds_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "Makefile",
                 "tests/test_release.py", "deploy/constraints.txt", "docs/api.md",
                 "mkdocs.yml"):  # fmt: skip
        assert (source / name).is_file(), name
    assert not [*source.rglob("*.token"), *source.rglob("*.sqlite*"), *source.rglob("*.db")]
    build(source, tmp_path / "again", "-t", "wheel")
    assert (tmp_path / "again" / built.wheel.name).read_bytes() == built.wheel.read_bytes()


def test_without_extras_there_is_the_client_alone(client: Path, tmp_path: Path) -> None:
    program = (
        "import importlib, pkgutil, stagescope\n"
        "for each in pkgutil.walk_packages(stagescope.__path__, 'stagescope.'):\n"
        "    alone = not any(part in each.name for part in ('__main__', 'agents.serving.'))\n"
        "    alone and importlib.import_module(each.name)\n"
        "import stagescope_workers; stagescope_workers.init\n"
        "print(stagescope.__file__, stagescope_workers.__file__)"
    )
    files = succeed(client / "python", "-c", program, cwd=tmp_path).split()
    assert all(file.startswith(str(site_of(client))) for file in files)
    assert __version__ in succeed(client / "stagescope", "--version", cwd=tmp_path)
    text = succeed(client / "stagescope", "--help", cwd=tmp_path)
    for extra in EXTRAS:
        assert f"\n  {extra} " in text
    done = succeed(client / "stagescope", "run", "--", "echo", "trained", cwd=tmp_path)
    assert done == "trained\n"


@pytest.mark.parametrize(
    "command",
    ["serve", "stop", "attach file", "compare folder folder", "import folder", "export folder out"],
)
def test_what_needs_an_extra_names_it(
    client: Path, built: Built, tmp_path: Path, command: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    done = run(client / "stagescope", *command.split(), cwd=tmp_path)
    assert done.returncode == (2 if command.startswith("compare") else 1)  # its 1 is "different"
    assert f"pip install '{built.wheel}[service]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_service_runs_from_the_wheel(built: Built, tmp_path: Path) -> None:
    """Beside what this environment has: an editable installation of it is left out there."""
    programs = environment(tmp_path / "service", built.wheel)
    site = site_of(programs)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    answer = json.loads(succeed(programs / "python", "-c", SERVICE, cwd=tmp_path))
    assert all(file.startswith(str(site)) for file in answer["files"])
    assert set(answer["answers"].values()) == {200}, answer["answers"]
    assert answer["version"] == __version__
    assert answer["rules"] == len([*ROOT.glob("service/stagescope_service/rules/symptoms/*.yaml")])
    assert "--data-dir" in succeed(programs / "stagescope", "serve", "--help", cwd=tmp_path)
