"""Imports follow the data, and nothing runs back up: docs/architecture.md has the order."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tests import lanes

ROOT: Final = Path(__file__).resolve().parents[1]
WIRE: Final = ROOT / "client/stagescope_wire"
CLIENT: Final = ROOT / "client/stagescope"
WORKERS: Final = ROOT / "workers/stagescope_workers"
SERVICE: Final = ROOT / "service/stagescope_service"
ROOTS: Final = (WIRE, CLIENT, WORKERS, SERVICE)

LAYERS: Final = (
    "background", "priority", "settings", "service_file", "figure_style", "fields", "refusals",
    "redaction", "rows", "statistics", "store", "dumps", "compare", "rules", "core", "ingest",
    "coordinator", "views", "figures", "report", "http",
)  # fmt: skip
"""Packages of the service, the lowest first: each may import itself and those before it."""
TOP: Final = (
    "serve", "clusters", "api_actor", "commands", "embedded", "ray_mapper",
)  # fmt: skip

COMMANDS: Final = (
    "service/stagescope_service/commands/", "workers/stagescope_workers/consistency/",
    "workers/stagescope_workers/bisect/",
)  # fmt: skip
"""These show tables and comparisons as the client does."""

ONLY_IN: Final = {
    "ray": ("service/stagescope_service/coordinator/actor.py",
            "service/stagescope_service/ingest/actor.py",
            "service/stagescope_service/ingest/relay_actor.py",
            "service/stagescope_service/serve.py",
            "service/stagescope_service/clusters.py",
            "service/stagescope_service/api_actor.py",
            "service/stagescope_service/embedded.py",
            "service/stagescope_service/ray_mapper.py",
            "workers/stagescope_workers/transport/link.py"),
    "torch": ("service/stagescope_service/dumps/pickles/torch_file.py",
              "client/stagescope_wire/batch/",
              "workers/stagescope_workers/payload.py",
              "workers/stagescope_workers/device.py",
              "workers/stagescope_workers/canary/trainer_",
              "workers/stagescope_workers/capture/msprobe_",
              "workers/stagescope_workers/integrations/",
              "workers/stagescope_workers/consistency/transformers_",
              "workers/stagescope_workers/bisect/transformers_"),
    "transformers": ("workers/stagescope_workers/consistency/transformers_",
                     "workers/stagescope_workers/bisect/transformers_",
                     "workers/stagescope_workers/integrations/"),
    "ctranslate2": ("workers/stagescope_workers/consistency/ctranslate2_",),
    "tensordict": ("client/stagescope_wire/batch/",
                   "workers/stagescope_workers/integrations/"),
    "verl": ("client/stagescope_wire/batch/",
             "workers/stagescope_workers/integrations/"),
    "msprobe": ("workers/stagescope_workers/capture/msprobe_",
                "service/stagescope_service/compare/operators/msprobe_"),
    "sqlalchemy": ("service/stagescope_service/store/",),
    "fastapi": ("service/stagescope_service/http/",),
    "starlette": ("service/stagescope_service/http/", "client/stagescope/cli/agents/serving/"),
    "uvicorn": ("service/stagescope_service/http/", "client/stagescope/cli/agents/serving/"),
    "mcp": ("client/stagescope/cli/agents/serving/",),
    "plotly": ("service/stagescope_service/figure_style.py",
               "service/stagescope_service/figures/",
               "service/stagescope_service/report/",
               "client/stagescope/plotting.py",
               "service/stagescope_service/compare/report/figures.py",
               "service/stagescope_service/compare/report/html.py"),
    "numba": ("service/stagescope_service/statistics/",),
    # Of the extra `service`; elsewhere it is imported for types alone.
    "typing_extensions": tuple(
        f"service/stagescope_service/{part}"
        for part in (
            "fields", "store/", "compare/", "rules/", "core/", "coordinator/", "views/", "http/"
        )
    ),
    **dict.fromkeys(
        ("mlflow", "opentelemetry", "swanlab", "tensorboard", "trackio", "wandb"),
        ("client/stagescope/forwarding/",),
    ),
    "pandas": ("client/stagescope/convert.py",),
    "polars": ("client/stagescope/convert.py",),
    "pyarrow": ("client/stagescope/convert.py", "service/stagescope_service/dumps/"),
}  # fmt: skip


@functools.cache
def imports(path: Path, *, for_types: bool = False) -> tuple[str, ...]:
    """Return every module that a file imports when it runs, inside functions too.

    Args:
        path: of the file.
        for_types: also those that it imports for type checkers alone.
    """
    return tuple(_imports(path, skip=() if for_types else _blocks_for_types(path)))


def _blocks_for_types(path: Path) -> Iterator[ast.AST]:
    return filter(_is_for_types, ast.walk(_parsed(path)))


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path, skip: Iterable[ast.AST]) -> Iterator[str]:
    skipped = {id(node) for block in skip for node in ast.walk(block)}
    for node in ast.walk(_parsed(path)):
        if id(node) in skipped:
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


def _module(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES: Final = [*files(WIRE), *files(CLIENT), *files(WORKERS), *files(SERVICE)]
MODULES: Final = {_module(path, root.parent): path for root in ROOTS for path in files(root)}


def test_heavy_libraries_stay_in_their_packages() -> None:
    assert not [
        f"{name(path)} imports {module}"
        for path in SOURCES
        for module in imports(path)
        if (allowed := ONLY_IN.get(module.partition(".")[0])) is not None
        if not name(path).startswith(allowed)
    ]


def test_the_three_packages_import_what_they_may() -> None:
    """All import the vocabulary. Workers import the service's statistics.

    Commands of the service and of workers are commands of the client, too.
    """
    others = {
        WIRE: ("stagescope.", "stagescope_service", "stagescope_workers"),
        CLIENT: ("stagescope_service", "stagescope_workers"),
        WORKERS: ("stagescope.", "stagescope_service"),
        SERVICE: ("stagescope.", "stagescope_workers"),
    }
    assert not [
        f"{name(path)} imports {module}"
        for root, refused in others.items()
        for path in files(root)
        for module in imports(path)
        if f"{module}.".startswith(refused)
        if root != WORKERS or not module.startswith("stagescope_service.statistics")
        if not name(path).startswith(COMMANDS)
    ]


def test_the_service_is_built_from_the_ground_up() -> None:
    wrong = []
    for path in files(SERVICE):
        own = path.relative_to(SERVICE).parts[0].removesuffix(".py")
        for module in imports(path, for_types=True):
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
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for module, imported in _arrows():
        graph[module].add(imported)
    for module in graph:
        assert module not in _reached(graph, module), f"{module} imports itself in a circle"


def test_no_two_parts_of_a_folder_import_each_other() -> None:
    """The parts are its sub-folders, each as a whole, and its other files; types count, too."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for one, other in _arrows():
        path, imported = _parts(one), _parts(other)
        depth = next(i for i, (a, b) in enumerate(zip(path, imported, strict=False)) if a != b)
        if depth:
            graph = graphs.setdefault("/".join(path[:depth]), {})
            graph.setdefault(path[depth], set()).add(imported[depth])
    assert len(graphs) > 30
    for folder, graph in graphs.items():
        for part in graph:
            assert part not in _reached(graph, part), f"{folder}/{part} imports itself in a circle"


@functools.cache
def _arrows() -> frozenset[tuple[str, str]]:
    """Return (module, one of our modules that it imports), imports for types too."""
    found = set()
    for module, path in MODULES.items():
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                found |= {(module, each if each in MODULES else node.module) for each in names}
            elif isinstance(node, ast.Import):
                found |= {(module, alias.name) for alias in node.names}
    return frozenset(each for each in found if each[1] in MODULES and each[0] != each[1])


def _parts(module: str) -> tuple[str, ...]:
    own = MODULES[module].name == "__init__.py"
    return (*module.split("."), *(["__init__"] if own else []))


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


def test_lanes_name_what_exists_and_clusters_stay_apart() -> None:
    """But the story, which is the cluster of `make test`."""
    named = {*lanes.LANE_OF, *lanes.LOWEST_RAY, *lanes.NOT_LOWEST}
    for each in named:
        path, _, test = each.partition("::")
        assert (ROOT / path).exists(), each
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), each
    with_ray = {
        name(path)
        for path in ROOT.glob("tests/**/test_*.py")
        if path != Path(__file__) and "pytest.mark.ray" in path.read_text(encoding="utf-8")
    }
    in_test = {each for each in with_ray if lanes.has("test", each)}
    assert in_test == {"tests/integration/test_story.py"}


def test_no_file_is_longer_than_500_lines() -> None:
    """A longer one holds a second idea: give that a file of its own."""
    lines = {name(path): path.read_text(encoding="utf-8").count("\n") for path in SOURCES}
    assert not [f"{path}: {count}" for path, count in lines.items() if count > 500]


def test_a_newline_alone_ends_a_line() -> None:
    r"""`str.splitlines` also cuts at U+0085, U+2028 and others, which may stand in any text."""
    found = [
        path.relative_to(ROOT).as_posix()
        for root in ("client", "service", "workers")
        for path in (ROOT / root).rglob("*.py")
        if ".splitlines(" in path.read_text(encoding="utf-8")
    ]
    assert found == [], 'use split("\\n")'


def test_the_files_that_the_architecture_names_are_there() -> None:
    pages = ("architecture.md", "architecture-captures.md", "extend.md")
    text = "\n".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages)
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


def test_a_payload_can_be_followed_in_under_48_files() -> None:
    """The table of docs/architecture.md names them; of the two links a payload takes one."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    way = text[text.index("## The way of one payload") :]
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", way, re.MULTILINE)
    named: set[tuple[str, str]] = set()
    for number, row in rows:
        part = "workers" if int(number) <= 8 else "service"
        part = "client" if number == rows[-1][0] else part
        named |= {(part, name) for name in re.findall(r"`([\w/]+(?:\.py|/))`", row)}
    assert ("service", "store/queries/") in named
    assert ("workers", "transport/http_link.py") in named
    everywhere = {"stagescope_wire/schema.py", "core/instructions.py", "core/entities.py"}
    assert all(f"`{name}`" in way for name in everywhere)
    assert len(named) - 1 + len(everywhere) < 48


ALIKE: Final = {
    ("EngineRequest", "RegisteredEngine"): "a request leaves out what the registry adds",
    ("Layout", "LayoutRow"): "what is not reported is absent in an answer, and null in a column",
    ("Link", "Link"): "the wire's class makes paths, the other is the object that is sent",
    ("PairReport", "PairResult"): "the report's JSON has texts for enumerations",
    ("Rule", "Rule"): "`for` is no name in Python",
    ("When", "When"): "`>` is no name in Python",
}
"""Pairs of classes that declare the same fields -> why."""


def test_no_two_classes_declare_the_same_fields() -> None:
    """Of six fields or more not four fifths, inherited ones aside."""
    declared: dict[tuple[str, str], set[str]] = {}
    for path in SOURCES:
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ClassDef):
                fields = {
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                }
                if len(fields) >= 5:
                    declared[name(path), node.name] = fields
    alike = {
        tuple(sorted((one[1], other[1])))
        for (one, a), (other, b) in itertools.combinations(declared.items(), 2)
        if max(len(a), len(b)) >= 6 and len(a & b) >= 0.8 * max(len(a), len(b))
    }
    assert alike == {tuple(sorted(pair)) for pair in ALIKE}
