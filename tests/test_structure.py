"""Imports follow the data, and nothing runs back up: docs/architecture.md has the order."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CLIENT: Final = ROOT / "client/stagescope"
WORKERS: Final = ROOT / "workers/stagescope_workers"
SERVICE: Final = ROOT / "service/stagescope_service"
ROOTS: Final = (CLIENT, WORKERS, SERVICE)

LAYERS: Final = (
    "settings", "figure_style", "statistics", "rows", "store", "dumps", "compare", "triggers",
    "diagnosis", "core", "ingest", "coordinator", "api",
)  # fmt: skip
"""Packages of the service, the lowest first: each may import itself and those before it."""
TOP: Final = (
    "serve", "clusters", "api_actor", "commands", "embedded", "ray_mapper", "service_file",
)  # fmt: skip

ONLY_IN: Final = {
    "ray": ("service/stagescope_service/coordinator/actor.py",
            "service/stagescope_service/ingest/actor.py",
            "service/stagescope_service/serve.py",
            "service/stagescope_service/clusters.py",
            "service/stagescope_service/api_actor.py",
            "service/stagescope_service/embedded.py",
            "service/stagescope_service/ray_mapper.py",
            "workers/stagescope_workers/transport/link.py"),
    "torch": ("service/stagescope_service/dumps/pickles/torch_file.py",
              "client/stagescope/batch/",
              "workers/stagescope_workers/payload.py",
              "workers/stagescope_workers/device.py",
              "workers/stagescope_workers/capture/msprobe_",
              "workers/stagescope_workers/integrations/",
              "workers/stagescope_workers/consistency/transformers_"),
    "transformers": ("workers/stagescope_workers/consistency/transformers_",
                     "workers/stagescope_workers/integrations/"),
    "ctranslate2": ("workers/stagescope_workers/consistency/ctranslate2_",),
    "tensordict": ("client/stagescope/batch/",
                   "workers/stagescope_workers/integrations/"),
    "verl": ("client/stagescope/batch/",
             "workers/stagescope_workers/integrations/"),
    "msprobe": ("workers/stagescope_workers/capture/msprobe_",
                "service/stagescope_service/compare/operators/msprobe_"),
    "sqlalchemy": ("service/stagescope_service/store/",),
    "alembic": ("service/stagescope_service/store/",),
    "fastapi": ("service/stagescope_service/api/",),
    "starlette": ("service/stagescope_service/api/",),
    "uvicorn": ("service/stagescope_service/api/",),
    "plotly": ("service/stagescope_service/figure_style.py",
               "service/stagescope_service/api/figures/",
               "client/stagescope/plotting.py",
               "service/stagescope_service/api/page.py",
               "service/stagescope_service/compare/figures.py",
               "service/stagescope_service/compare/report/html.py"),
    "numba": ("service/stagescope_service/statistics/",),
    "pandas": ("client/stagescope/convert.py",),
    "polars": ("client/stagescope/convert.py",),
    "pyarrow": ("client/stagescope/convert.py", "service/stagescope_service/dumps/"),
}  # fmt: skip


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Return every module that a file imports when it runs, inside functions too."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    blocks = [node for node in ast.walk(tree) if _is_for_types(node)]
    for_types = {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found
    return found


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


SOURCES: Final = [*files(CLIENT), *files(WORKERS), *files(SERVICE)]


def test_heavy_libraries_stay_in_their_packages() -> None:
    assert not [
        f"{name(path)} imports {module}"
        for path in SOURCES
        for module in imports(path)
        if (allowed := ONLY_IN.get(module.partition(".")[0])) is not None
        if not name(path).startswith(allowed)
    ]


def test_the_three_packages_import_what_they_may() -> None:
    """The client neither of the others, workers only the service's statistics."""
    others = {
        CLIENT: ("stagescope_service", "stagescope_workers"),
        WORKERS: ("stagescope_service",),
        SERVICE: ("stagescope_workers",),
    }
    assert not [
        f"{name(path)} imports {module}"
        for root, refused in others.items()
        for path in files(root)
        for module in imports(path)
        if module.startswith(refused)
        if root != WORKERS or not module.startswith("stagescope_service.statistics")
    ]


def test_the_service_is_built_from_the_ground_up() -> None:
    wrong = []
    for path in files(SERVICE):
        own = path.relative_to(SERVICE).parts[0].removesuffix(".py")
        for module in imports(path):
            package, _, rest = module.partition(".")
            imported = rest.partition(".")[0]
            if package != "stagescope_service" or own not in LAYERS:
                continue
            higher = imported in LAYERS and LAYERS.index(imported) > LAYERS.index(own)
            if higher or imported in TOP:
                wrong.append(f"{name(path)} imports {module}")
    assert not wrong


def test_workers_send_by_what_knows_nothing_of_the_probe() -> None:
    assert not [
        f"{name(path)} imports {module}"
        for path in files(WORKERS / "transport")
        for module in imports(path)
        if module.startswith(("stagescope_workers.probe", "stagescope_workers.capture"))
    ]


def test_no_two_files_import_each_other() -> None:
    """Imports inside functions and for types alone count, too."""
    modules = {_module(path, root.parent): path for root in ROOTS for path in files(root)}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found = (f"{node.module}.{alias.name}" for alias in node.names)
                graph[module] |= {each if each in modules else node.module for each in found}
            elif isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names}
        graph[module] &= modules.keys() - {module}
    for module in graph:
        assert module not in _reached(graph, module), f"{module} imports itself in a circle"


def _module(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += graph.get(module, ())
    return seen


def test_every_test_with_ray_lies_where_the_makefile_looks_for_it() -> None:
    marked = {
        path.relative_to(ROOT).parts[1]
        for path in ROOT.glob("tests/**/test_*.py")
        if path != Path(__file__) and "pytest.mark.ray" in path.read_text(encoding="utf-8")
    }
    assert marked == {"integration", "examples", "verl"}


def test_the_files_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    known = [path.relative_to(ROOT).as_posix() for path in SOURCES]
    named = set(re.findall(r"[\w/]+\.py", text.replace("…/", "")))
    assert len(named) > 40
    for name in named:
        tail = name.removeprefix("workers/").removeprefix("service/").removeprefix("client/")
        is_test = name.startswith("tests/") and (ROOT / name).is_file()
        assert is_test or any(path.endswith(f"/{tail}") for path in known), name


def test_the_functions_that_the_architecture_names_are_in_their_files() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", text, re.MULTILINE)
    assert len(rows) >= 20
    checked = 0
    for number, where in rows:
        root = "workers/stagescope_workers" if int(number) <= 8 else "service/stagescope_service"
        root = "client/stagescope" if number == rows[-1][0] else root
        code = ""
        for name in re.findall(r"`([^`]+)`", where):
            if name.endswith(".py"):
                code = (ROOT / root / name).read_text(encoding="utf-8")
            elif not name.endswith("/"):
                assert re.search(rf"def {name}\b", code), (number, name)
                checked += 1
    assert checked >= 12
