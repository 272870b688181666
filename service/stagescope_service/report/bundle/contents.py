"""Writes a bundle: the run's rows, the step's files and its report, redacted and listed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import stagescope_wire
from stagescope_service.redaction import SECRET_NAME, Redactor
from stagescope_service.store.artifacts import confine, file_checksum
from stagescope_service.store.copying import PlacedFile, copy_run, place_files
from stagescope_service.store.tensorfile import disk_errors
from stagescope_service.views.encoding import JsonObject, encode
from stagescope_service.views.kept import local_file, payload_artifacts
from stagescope_service.views.operators.tables import is_digested, tables_of
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_service.views.reading.tokenizers import BUNDLED, tokenizer_path
from stagescope_wire.errors import Forbidden, InvalidInput, StagescopeError
from stagescope_wire.names import safe_name
from stagescope_wire.tensorfile import read_header

SCHEMA: Final = 1
MANIFEST: Final = "manifest.json"
CATALOGUE: Final = "data/catalogue.db"
ROOT: Final = "bundle:"
"""Prefix of the paths in a bundle's own catalogue; the rest is relative to the bundle."""
MAX_FILE_BYTES: Final = 64 << 20
"""Most bytes of a log or a dump's JSON; only the end of a longer one is copied."""
TOKENIZER: Final = "tokenizer.json"
MAX_TOKENIZER_BYTES: Final = 32 << 20
"""Most bytes of the tokenizer; it goes with the tensors, so that their texts can be read."""
MAX_LOGS: Final = 64
LOG_PATHS: Final[Mapping[str, str]] = {
    "ASCEND_PROCESS_LOG_PATH": "plog of Ascend",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "flight recorder",
    "TORCH_FR_DUMP_TEMP_FILE": "flight recorder",
}
"""Variable of the training -> what its path, or the paths that begin with it, hold."""
_DUMP_FILES: Final = ("dump.json", "debug.json", "stack.json", "construct.json")
_CHUNK: Final = 1 << 20


_NAME: Final = re.compile(r"(?!.*(?:^|/)\.\.?(?:/|$))[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
_LONGEST: Final = 200
_MAX_PART: Final = 80
"""Most characters of one part of a path: tar's oldest format has no room for longer ones."""


def check_name(name: str) -> None:
    """Check the path of a file inside a bundle.

    Raises:
        InvalidInput: it may lead out of the bundle, or has other characters than such paths.
    """
    is_short = len(name) <= _LONGEST and all(len(p) <= _MAX_PART for p in name.split("/"))
    if not is_short or _NAME.fullmatch(name) is None:
        raise InvalidInput(
            f"a file is called {name!r:.200}", expected="a path of letters, digits, '.', '_', '-'"
        )


def part_of_name(text: str, longest: int) -> str:
    """Return the end of a text as a part of such a path."""
    return safe_name(text[-longest:]).lstrip(".") or "_"


@dataclasses.dataclass(frozen=True)
class BundledFile:
    """A file of a bundle; `path` is relative to its root."""

    path: str
    bytes: int
    sha256: str
    what: str


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Something that is not in a bundle, and why."""

    what: str
    reason: str


@dataclasses.dataclass
class Bundle:
    """A bundle that is being put together in a directory.

    Attributes:
        root: the directory.
        target: the step.
        redactor: has seen everything that is in it.
        limit: most bytes of all its files.
    """

    root: Path
    target: Target
    redactor: Redactor
    limit: int
    files: list[BundledFile] = dataclasses.field(default_factory=list)
    left_out: list[LeftOut] = dataclasses.field(default_factory=list)
    placed: list[PlacedFile] = dataclasses.field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The bytes of its files so far."""
        return sum(file.bytes for file in self.files)

    def add_text(self, name: str, text: str, what: str) -> None:
        """Write a text, redacted."""
        path = self._path(name)
        path.write_text(self.redactor.text(text), "utf-8")
        self.list_file(name, what)

    def add_json(self, name: str, value: object, what: str) -> None:
        """Write JSON, redacted."""
        path = self._path(name)
        path.write_bytes(encode(self.redactor.value(json.loads(encode(value)))))
        self.list_file(name, what)

    def add(self, name: str, source: Path, what: str, copy: Callable[[Path, Path], None]) -> bool:
        """Copy a file if there is room for it; return whether it was copied."""
        size = source.stat().st_size
        if self.bytes + size > self.limit:
            self.leave_out(f"{what}: {source}", f"its {size} bytes do not fit into {self.limit}")
            return False
        path = self._path(name)
        try:
            copy(source, path)
        except (OSError, StagescopeError) as error:
            path.unlink(missing_ok=True)
            self.leave_out(f"{what}: {source}", str(error))
            return False
        self.list_file(name, what)
        return True

    def list_file(self, name: str, what: str) -> None:
        """List a file that was written."""
        path = self.root / name
        self.files.append(BundledFile(name, path.stat().st_size, file_checksum(path), what))

    def leave_out(self, what: str, reason: str) -> None:
        """List something that was left out, and why."""
        self.left_out.append(LeftOut(self.redactor.text(what), self.redactor.text(reason)))

    def _path(self, name: str) -> Path:
        check_name(name)
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write_manifest(self, made_wall: float) -> None:
        """Write the list of all files in it, and of everything that was left out."""
        manifest: JsonObject = {
            "schema": SCHEMA,
            "version": stagescope_wire.__version__,
            "run": self.target.run,
            "attempt": self.target.number,
            "step": self.target.step_number,
            "made_wall": made_wall,
            "redacted": self.redactor.count,
            "files": [dataclasses.asdict(file) for file in self.files],
            "left_out": [dataclasses.asdict(each) for each in self.left_out],
        }
        (self.root / MANIFEST).write_bytes(encode(manifest))


def collect(
    deps: Dependencies,
    target: Target,
    root: Path,
    *,
    limit: int,
    tensors: bool,
    secrets: Iterable[str],
) -> Bundle:
    """Put everything but the report into a directory.

    Args:
        deps: the collaborators.
        target: the step.
        root: an empty directory.
        limit: most bytes of all files.
        tensors: whether the step's tensors (prompts and responses as token ids) go with it.
        secrets: texts that must not leave, such as the service's tokens.

    Returns:
        The bundle, whose catalogue has the files' paths inside `root`.

    Raises:
        CatalogueUnavailable, StoreError: it cannot be read, or the disk is full.
    """
    bundle = Bundle(root, target, Redactor([*secrets, *_environment_secrets()]), limit)
    with disk_errors(root):
        catalogue = root / CATALOGUE
        catalogue.parent.mkdir(parents=True)
        omitted = copy_run(
            deps.settings.catalogue_url, catalogue, target.run, attempt_id=target.attempt_id,
            step=target.step_number, redact=bundle.redactor.value,
        )  # fmt: skip
        for each in omitted:
            bundle.leave_out(each.what, each.reason)
        _add_readable(deps, bundle)
        if tensors:
            _add_payloads(deps, bundle)
        else:
            bundle.leave_out("the tensors of the step", "they were not asked for")
        _add_operators(deps, bundle)
        _add_dumps(deps, bundle)
        _add_logs(deps, bundle)
        place_files(catalogue, bundle.placed)
    return bundle


def finish(bundle: Bundle, made_wall: float) -> None:
    """Make the paths of the catalogue relative, list it, and write the manifest."""
    placed = [
        dataclasses.replace(each, path=ROOT + str(Path(each.path).relative_to(bundle.root)))
        for each in bundle.placed
    ]
    catalogue = bundle.root / CATALOGUE
    place_files(catalogue, placed)
    bundle.list_file(CATALOGUE, "the run's rows, as SQLite")
    bundle.write_manifest(made_wall)


def _environment_secrets() -> Iterator[str]:
    for name, value in os.environ.items():
        # PWD is the shell's working directory.
        if SECRET_NAME.search(name) and name not in ("PWD", "OLDPWD"):
            yield value


# --- what people read -----------------------------------------------------------------------
def _add_readable(deps: Dependencies, bundle: Bundle) -> None:
    """Add the files that people read without stagescope: findings, fingerprint, stacks."""
    target, catalogue = bundle.target, deps.catalogue
    every = catalogue.findings(attempt_id=target.attempt_id, limit=10_000)
    bundle.add_json("findings.json", every, "findings of the attempt")
    bundle.add_json(
        "fingerprint.json", catalogue.fingerprint(target.attempt_id) or {},
        "code, packages, drivers, configuration and environment of the attempt",
    )  # fmt: skip
    stacks = catalogue.stacks(attempt_id=target.attempt_id, step=target.step_number)
    lines = []
    for row in stacks:
        lines.append(
            f"== {row['role']} {row['rank']}, {row['stage'] or 'no stage'}, {row['state']}"
        )
        lines += [
            f"-- thread {each['name']}\n{each['stack']}" for each in row["threads"] or ()
        ] or [row["reason"] or "no stack"]
    bundle.add_text("stacks.txt", "\n".join(lines) + "\n", "stacks that were taken in the step")
    if not stacks:
        bundle.leave_out("stacks", "none were taken in this step: `stagescope stacks` takes them")


# --- files ----------------------------------------------------------------------------------
def _add_payloads(deps: Dependencies, bundle: Bundle) -> None:
    target = bundle.target
    copies = bundle.root.with_name(f"{bundle.root.name}-copies")
    copies.mkdir()
    named = _add_tokenizer(deps, bundle)
    try:
        rows = payload_artifacts(deps, target, target.step_number)
        for number, row in enumerate(rows):
            place = f"{row['stage']} {row['role']} {row['rank']}"
            try:
                source = local_file(deps, row, copies)
            except StagescopeError as error:
                bundle.leave_out(f"tensors of {place}: {row['path']}", str(error))
                continue
            stage, role = part_of_name(row["stage"], 32), part_of_name(row["role"], 16)
            name = f"data/payloads/{number:05d}-{stage}-{role}{row['rank']}.safetensors"

            def copy(source: Path, path: Path) -> None:
                _copy_tensors(source, path, bundle.redactor, named)

            if bundle.add(name, source, f"tensors of {place} ({row['kind']})", copy):
                file = bundle.files[-1]
                bundle.placed.append(
                    PlacedFile(
                        str(bundle.root / name), file.bytes, f"sha256:{file.sha256}",
                        artifact_id=row["artifact_id"],
                    )
                )  # fmt: skip
        if not rows:
            bundle.leave_out("the tensors of the step", "they left the ring, and were not kept")
    finally:
        for path in copies.iterdir():
            path.unlink()
        copies.rmdir()


def _add_tokenizer(deps: Dependencies, bundle: Bundle) -> str | None:
    """Add the tokenizer of the attempt, else the service's; return its path as the run has it."""
    found = deps.catalogue.settings_with(bundle.target.attempt_id, "tokenizer")
    named = next((each["tokenizer"] for each in found), None)
    what = "the tokenizer of the run"
    try:
        path = tokenizer_path(deps.settings, named)
        if path is None:
            return None
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            bundle.leave_out(f"{what}: {path}", f"it has more than {MAX_TOKENIZER_BYTES} bytes")
            return None
    except (OSError, StagescopeError) as error:
        bundle.leave_out(what, str(error))
        return None
    is_there = bundle.add(TOKENIZER, path, what, _copy_file)
    return named if is_there and isinstance(named, str) else None


def _with_bundled_tokenizer(metadata: Mapping[str, str], named: str) -> Mapping[str, str]:
    """Return the metadata of a file, in which the tokenizer of the bundle is named."""
    about = json.loads(metadata.get("stagescope", "{}"))
    settings = about.get("metadata", {}).get("settings")
    if not isinstance(settings, dict) or settings.get("tokenizer") != named:
        return metadata
    settings["tokenizer"] = BUNDLED
    return {**metadata, "stagescope": json.dumps(about, separators=(",", ":"))}


def _copy_tensors(source: Path, path: Path, redactor: Redactor, tokenizer: str | None) -> None:
    """Copy a safetensors file, its metadata redacted.

    Args:
        source, path: of the file and of its copy.
        redactor: has seen everything that is in the bundle.
        tokenizer: path of the tokenizer that lies in the bundle; None: none does.
    """
    with source.open("rb") as file, path.open("wb") as to:
        header, start = read_header(file, source, source.stat().st_size)
        found = header.get("__metadata__")
        redacted = redactor.value(found)
        if redacted and tokenizer is not None:
            redacted = _with_bundled_tokenizer(redacted, tokenizer)
        if redacted == found:
            file.seek(0)
        else:
            text = json.dumps({**header, "__metadata__": redacted}, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)  # tensors begin at a multiple of their item's size
            to.write(struct.pack("<Q", len(text)) + text)
            file.seek(start)
        while piece := file.read(_CHUNK):
            to.write(piece)


def _copy_file(source: Path, path: Path) -> None:
    with source.open("rb") as file, path.open("wb") as to:
        while piece := file.read(_CHUNK):
            to.write(piece)


def _add_operators(deps: Dependencies, bundle: Bundle) -> None:
    try:
        tables = tables_of(deps, bundle.target)
    except StagescopeError:
        return  # there are none
    for number, row in enumerate(tables):
        place = f"{row['stage']} {row['role']} {row['rank']}"
        try:
            source = deps.operator_files.path(row)
        except StagescopeError as error:
            if is_digested(row):
                bundle.leave_out(f"operators of {place}", str(error))
            continue
        name = f"data/operators/{number:05d}.parquet"
        if bundle.add(name, source, f"operators of {place}", _copy_file):
            key = (row["incarnation"], row["work_key"], row["capture_id"])
            file = bundle.files[-1]
            path = str(bundle.root / name)
            bundle.placed.append(PlacedFile(path, file.bytes, file.sha256, key=key))


def _add_dumps(deps: Dependencies, bundle: Bundle) -> None:
    """Add the JSON of msprobe's dumps; their tensors stay."""
    target = bundle.target
    for row in deps.catalogue.dumps(target.attempt_id, target.step_number, limit=10_000):
        place = f"dump of {row['stage']} {row['role']} {row['rank']}"
        if row["path"] is None:
            continue
        try:
            directory = confine(row["path"], deps.settings.roots)
        except StagescopeError as error:
            bundle.leave_out(f"{place}: {row['path']}", str(error))
            continue
        files = [path for path in sorted(directory.rglob("*.json")) if path.name in _DUMP_FILES]
        if not files:
            bundle.leave_out(f"{place}: {row['path']}", "it is not on this machine, or gone")
        for path in files:
            inner = part_of_name(str(path.relative_to(directory)).replace("/", "-"), 24)
            stage, role = part_of_name(row["stage"], 24), part_of_name(row["role"], 12)
            name = f"dumps/{stage}-{role}{row['rank']}-{inner}"
            _add_text_file(bundle, _free(bundle, name), path, place, deps.settings.roots)


def _add_logs(deps: Dependencies, bundle: Bundle) -> None:
    """Add the logs that the training's variables name, where they lie inside the roots."""
    found = deps.catalogue.fingerprint(bundle.target.attempt_id) or {}
    environment = found.get("environment")
    if not isinstance(environment, Mapping):
        return
    for variable, what in LOG_PATHS.items():
        text = environment.get(variable)
        if not isinstance(text, str) or not text:
            continue
        try:
            place = confine(text, deps.settings.roots)
        except StagescopeError as error:
            bundle.leave_out(f"{what}: {text}", str(error))
            continue
        if place.is_dir():
            files = [path for path in place.rglob("*") if path.is_file()]
        else:
            files = [path for path in place.parent.glob(f"{glob_text(place.name)}*")
                     if path.is_file()]  # fmt: skip
        files.sort(key=lambda path: (-path.stat().st_mtime, str(path)))
        if not files:
            bundle.leave_out(f"{what}: {text}", "nothing is there on this machine")
        for path in files[:MAX_LOGS]:
            name = f"logs/{part_of_name(path.name, 72)}"
            _add_text_file(bundle, _free(bundle, name), path, what, deps.settings.roots)
        if (more := len(files) - MAX_LOGS) > 0:
            bundle.leave_out(f"{what}: {more} older files of {text}", f"{MAX_LOGS} are enough")


def glob_text(text: str) -> str:
    """Return a text as a pattern of `glob` that matches it alone."""
    return re.sub(r"([*?\[\]])", r"[\1]", text)


def _free(bundle: Bundle, name: str) -> str:
    """Return a name that no file has yet."""
    taken = {file.path for file in bundle.files}
    stem, dot, ending = name.rpartition(".")
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{stem}-{number}{dot}{ending}" if dot else f"{name}-{number}"
    return found


def _add_text_file(bundle: Bundle, name: str, path: Path, what: str, roots: Iterable[Path]) -> None:
    """Add a file, redacted where it is a text; links that lead outside are refused."""
    try:
        source = confine(path, roots)
        size = source.stat().st_size
    except (OSError, StagescopeError) as error:
        bundle.leave_out(f"{what}: {path}", str(error))
        return
    if size > MAX_FILE_BYTES:
        bundle.leave_out(f"{what}: the first {size - MAX_FILE_BYTES} bytes of {path}",
                         f"it has {size}, more than {MAX_FILE_BYTES}")  # fmt: skip

    def copy(source: Path, to: Path) -> None:
        with source.open("rb") as file:
            file.seek(max(size - MAX_FILE_BYTES, 0))
            data = file.read(MAX_FILE_BYTES)
        try:
            to.write_bytes(bundle.redactor.text(data.decode()).encode())
        except UnicodeDecodeError:
            if b"\0" not in data:  # a text whose first character was cut
                text = data.decode(errors="replace")
                to.write_bytes(bundle.redactor.text(text).encode())
                return
            # A binary file cannot be redacted safely, so a known secret in it refuses the file.
            if bundle.redactor.has_known(data):
                raise Forbidden("it holds a secret, and is no text") from None
            to.write_bytes(data)

    bundle.add(name, source, what, copy)
