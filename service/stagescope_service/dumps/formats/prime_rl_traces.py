"""prime-rl's traces with the trainer's annotations: `monitors/file/traces`, since September 2026.

Checked with prime-rl and verifiers of September 2026. `stream` has one line per episode, in order
of arrival. Its traces are graphs of messages with token ids, masks and the engine's log-probs.
`annotations/PRODUCER` has one line per later update of a trace. The orchestrator's updates name the
step that used it. The trainer's have log-probs and entropies of one branch, the path from the root
to a leaf: index t is token t. A stream is one file (`stream.jsonl`), or a directory of numbered
files; full files are compressed (`stream/00000.jsonl.zst`).

A branch that the trainer annotated is a row of the step. Both of its values are null outside the
loss's mask. A log-prob alone is null if it is not finite, and read as NaN. The first form has
values of every token, but those of tokens that the engine did not sample are not used. Values of
tokens are rounded to four decimals (`monitors.file.float_decimals`).
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import operator
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast

from stagescope_service.dumps.formats.columns import Columns
from stagescope_service.dumps.formats.content import MAX_LINE_BYTES, JsonLine, parse_line
from stagescope_service.dumps.formats.json_lines import lines_problem
from stagescope_service.dumps.formats.listing import FileDump, Format, ListedFile, files_of
from stagescope_service.dumps.formats.odd_values import number_in, value_in_words
from stagescope_service.dumps.formats.sequences import (
    NAN,
    SequenceRow,
    numbers,
    prompt_hashes,
    response_tensors,
    row_values,
    token_ids,
    token_mask,
    token_values,
)
from stagescope_service.dumps.records import DumpContents, DumpEntry, DumpProblem, Location, mapping
from stagescope_service.store.tensorfile import disk_errors
from stagescope_wire.errors import InvalidTensor, NotFound, StagescopeError

KIND: Final = "prime_rl_traces"
STAGE: Final = "actor_update"

_TRAINER: Final = re.compile(r"(?:\A|/)annotations/trainer(?:/\d{1,9})?\.jsonl(?:\.zst)?\Z")
_CHUNK: Final = re.compile(r"\d{1,9}\.jsonl(?:\.zst)?\Z")
_VERSION: Final = 1
_NAMES: Final[Mapping[str, str]] = {
    "trainer_logprobs": "log_probs",
    "entropies": "entropy",
    "is_masked": "is_masked",
    "mismatch_kl": "mismatch_kl",
    "advantages": "advantages",
}
_STREAMS: Final = {
    "rollout": {"producer": "inference", "alignment": "index t is token t"},
    "current": {"producer": "trainer", "alignment": "index t is token t"},
}

Json = Mapping[str, Any]


class _Line(NamedTuple):
    """Where a line of a stream is: in which file, at which byte of its content, and its number."""

    path: Path
    offset: int
    number: int


@dataclasses.dataclass
class _Step:
    traces: set[str] = dataclasses.field(default_factory=set)
    updates: list[_Line] = dataclasses.field(default_factory=list)
    episodes: list[_Line] = dataclasses.field(default_factory=list)


_Unread = defaultdict[Path, dict[int, str]]
"""File -> number of a line -> the part of the line that was not read, and why."""


def _is_trainers(found: ListedFile) -> bool:
    return _TRAINER.search(found.path.as_posix()) is not None


def open_prime_rl_traces(path: Path, step: int | None) -> FileDump:
    """List the steps of a directory of traces, of one above it, or of its trainer's annotations."""
    found, problems = files_of(path.absolute())
    roots = {_root(each.path) for each in found if _is_trainers(each)}
    if not roots:
        raise NotFound(
            f"{path} holds no annotations of prime-rl's trainer",
            expected="monitors/file/traces with stream and annotations/trainer",
        )
    if len(roots) > 1:
        raise InvalidTensor(
            f"{path} holds the traces of {len(roots)} runs", expected="the directory of one run"
        )
    steps, of_traces = _read_traces(roots.pop(), _stamp(found))
    entries = [
        DumpEntry("forward_data", Location(number, STAGE, "actor", 0), lines.updates[0].path)
        for number, lines in sorted(steps.items())
        if step in (None, number)
    ]
    return FileDump(str(path), KIND, entries, [*problems, *of_traces], read_entry)


def _root(trainer: Path) -> Path:
    return next(each.parent for each in trainer.parents if each.name == "annotations")


def _stamp(found: Sequence[ListedFile]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((str(each.path), each.bytes) for each in found))


@functools.lru_cache(maxsize=2)
def _read_traces(root: Path, _stamped: object) -> tuple[dict[int, _Step], list[DumpProblem]]:
    """Return which step has which lines, and what is wrong; no values of tokens are kept."""
    problems: list[DumpProblem] = []
    unread: _Unread = defaultdict(dict)
    steps = _steps_of_updates(root, problems, unread)
    of_trace = {trace: number for number, step in steps.items() for trace in step.traces}
    seen: set[str] = set()
    for line, episode in _lines(_chunks(root, "stream"), problems, unread):
        traces = _traces_of(episode)
        if traces is None or not all(isinstance(each, dict) for each in traces):
            unread[line.path][line.number] = "has traces that are no objects"
        ids = {str(each.get("id")) for each in traces or () if isinstance(each, dict)}
        ids &= of_trace.keys()
        seen |= ids
        for number in {of_trace[each] for each in ids}:
            steps[number].episodes.append(line)
    if lost := of_trace.keys() - seen:
        message = f"{len(lost)} traces that were trained are in no episode: {min(lost)} first"
        problems.append(DumpProblem(root / "stream", "missing", message))
    problems += [lines_problem(path, lines) for path, lines in sorted(unread.items())]
    return {number: step for number, step in steps.items() if step.episodes}, problems


def _steps_of_updates(root: Path, problems: list[DumpProblem], unread: _Unread) -> dict[int, _Step]:
    """Return the traces that the trainer annotated, and the lines about each, by step.

    Raises:
        InvalidTensor: all updates are of another version.
    """
    shipped: dict[str, int] = {}
    trained: dict[str, tuple[int | None, list[_Line]]] = {}
    other: InvalidTensor | None = None
    for producer in _producers(root):
        for line, update in _lines(_chunks(root / "annotations", producer), problems, unread):
            try:
                branches = _branches(update)
            except InvalidTensor as error:
                other = error if "version" in update else other
                unread[line.path][line.number] = error.wrong
                continue
            trace = str(update.get("trace_id"))
            if (number := _number(update, "info", "ship", "step")) is not None:
                shipped[trace] = number
            if any("trainer_logprobs" in streams for _, streams in branches):
                step, lines = trained.get(trace, (None, []))
                own = _number(update, "info", "trainer", "step")
                trained[trace] = (step if own is None else own, [*lines, line])
            elif branches and trace in trained:
                trained[trace][1].append(line)
    if other is not None and not trained:
        raise other
    steps: dict[int, _Step] = defaultdict(_Step)
    for trace, (own, lines) in trained.items():
        number = shipped.get(trace) if own is None else own
        if number is None:
            message = f"no annotation says which step took trace {trace}: it is left out"
            problems.append(DumpProblem(lines[0].path, "missing", message))
            continue
        steps[number].traces.add(trace)
        steps[number].updates += lines
    return dict(steps)


def _branches(update: Json) -> list[tuple[int, dict[str, list[Any]]]]:
    """Return the index and the streams of each branch of an update.

    Raises:
        InvalidTensor: an update of another version, or a branch of another form.
    """
    if update.get("version") != _VERSION:
        raise InvalidTensor(
            f"is an update of version {update.get('version')}", expected=str(_VERSION)
        )
    found: list[tuple[int, dict[str, list[Any]]]] = []
    branches = _list(update, "branches")
    if not all(isinstance(each, dict) for each in branches):
        raise InvalidTensor("has branches that are no objects")
    for branch in branches:
        index = branch.get("index", -1)
        streams = {name: branch[name] for name in _NAMES if branch.get(name)}
        odd = [name for name, values in streams.items() if not isinstance(values, list)]
        if type(index) is not int or odd:
            raise InvalidTensor(f"has a branch without a list of {', '.join(odd) or 'its index'}")
        found.append((index, streams))
    return found


def _traces_of(episode: Json) -> list[Any] | None:
    traces = episode.get("traces") or []
    return traces if isinstance(traces, list) else None


def _producers(root: Path) -> list[str]:
    """Return who annotated the traces; the trainer is the last, as it learns last."""
    with disk_errors(root):
        names = {path.name.split(".", 1)[0] for path in (root / "annotations").iterdir()}
    return [*sorted(names - {"trainer"}), "trainer"]


def _chunks(directory: Path, name: str) -> list[Path]:
    """Return the files of a stream in order; a file that is being compressed counts once, plain."""
    with disk_errors(directory):
        folder, plain = directory / name, directory / f"{name}.jsonl"
        if not folder.is_dir():
            return [plain] if plain.is_file() else []
        found: dict[str, Path] = {}
        for path in sorted(folder.iterdir(), key=lambda each: len(each.name), reverse=True):
            if _CHUNK.match(path.name):
                found[path.name.split(".", 1)[0]] = path
        return [found[number] for number in sorted(found, key=lambda each: (int(each), each))]


def _open(path: Path) -> BinaryIO:
    import pyarrow as pa  # only where such a file is read

    compression = "zstd" if path.suffix == ".zst" else None
    return cast(BinaryIO, io.BufferedReader(pa.input_stream(path, compression=compression)))


def _lines(
    paths: Sequence[Path], problems: list[DumpProblem], unread: _Unread
) -> Iterator[tuple[_Line, Json]]:
    """Yield the lines of a stream; one that cannot be read costs nothing but itself."""
    for path in paths:
        try:
            with disk_errors(path), _open(path) as file:
                offset = 0
                texts = iter(functools.partial(file.readline, MAX_LINE_BYTES), b"")
                for number, text in enumerate(texts, 1):
                    try:
                        if text.strip():
                            yield _Line(path, offset, number), _parse(text, number)
                    except InvalidTensor as error:
                        unread[path][number] = error.wrong
                    offset += len(text)
        except (StagescopeError, OSError) as error:  # noqa: PERF203 - the other files are read
            problems.append(DumpProblem.from_error(path, error))


def _parse(text: bytes, number: int) -> Json:
    found = parse_line(JsonLine(number, text, text.endswith(b"\n")))
    if not isinstance(found, dict):
        raise InvalidTensor(f"holds a {type(found).__name__}, not an object")
    return found


def _read(lines: Sequence[_Line]) -> Iterator[Json]:
    """Yield the lines, each file from its beginning to its end."""
    by_path: dict[Path, set[_Line]] = defaultdict(set)
    for line in lines:
        by_path[line.path].add(line)
    for path, chosen in by_path.items():
        with disk_errors(path), _open(path) as file:
            at = 0
            for line in sorted(chosen, key=operator.attrgetter("offset")):
                while at < line.offset:
                    at += len(file.read(min(line.offset - at, MAX_LINE_BYTES)) or b"\0")
                text = file.readline(MAX_LINE_BYTES)
                at += len(text)
                yield _parse(text, line.number)


def _number(update: Json, *path: str) -> int | None:
    found: object = update
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def read_entry(entry: DumpEntry) -> DumpContents:
    """Read the rows of a step; see `records.Dump.read`."""
    root = _root(entry.path)
    found_files, _ = files_of(root)
    step = _read_traces(root, _stamp(found_files))[0][entry.location.step or 0]
    updates: dict[tuple[str, int], dict[str, list[object]]] = {}
    for update in _read(step.updates):
        for index, streams in _branches(update):
            # The newest of each stream counts.
            updates.setdefault((str(update.get("trace_id")), index), {}).update(streams)
    rows: list[_Row] = []
    problems: list[DumpProblem] = []
    for episode in _read(step.episodes):
        for trace in _traces_of(episode) or ():
            if not isinstance(trace, dict) or str(trace.get("id")) not in step.traces:
                continue
            try:
                rows += _rows(episode, trace, updates)
                odd = _odd_reward(trace)
                wrong = f"has no reward: it is {odd}" if odd is not None else None
            except InvalidTensor as error:
                wrong = f"is left out: {error.wrong}"
            if wrong is not None:
                message = f"{entry.path}: trace {trace.get('id')} {wrong}"
                problems.append(DumpProblem(entry.path, "damaged", message, entry))
    if problems and not rows:
        raise InvalidTensor(problems[0].message, expected="traces as prime-rl writes them")
    return _contents(entry, rows, problems)


class _Row(NamedTuple):
    """A branch of a trace; `nulls` counts the log-probs of the trainer that are not finite."""

    sequence: SequenceRow
    nulls: int
    reward: float
    policy: list[float]
    trace: str
    environment: str


def _rows(
    episode: Json, trace: Json, updates: Mapping[tuple[str, int], Mapping[str, list[Any]]]
) -> Iterator[_Row]:
    nodes = _list(trace, "nodes")
    if not all(isinstance(node, dict) for node in nodes):
        raise InvalidTensor("its nodes are no objects")
    work = mapping(mapping(episode, "run"), "work")
    policy, _ = numbers(cast(Any, mapping(work, "policy").get(name)) for name in ("start", "end"))
    environment = mapping(episode, "env")
    name = str(environment.get("name") or environment.get("id") or "")
    reward = NAN if _odd_reward(trace) else _reward(trace)
    for index, path in enumerate(_paths(nodes)):
        streams = updates.get((str(trace.get("id")), index), {})
        if "trainer_logprobs" in streams:
            sequence, nulls = _sequence([nodes[each] for each in path], streams)
            yield _Row(sequence, nulls, reward, policy, str(trace.get("id")), name)


def _list(values: Json, name: str) -> list[Any]:
    """Return the list under a name; [] without one.

    Raises:
        InvalidTensor: it is anything else.
    """
    found = values.get(name) or []
    if not isinstance(found, list):
        raise InvalidTensor(f"{name} is no list: {value_in_words(found)}")
    return found


def _rewards(trace: Json) -> list[tuple[Any, Any]]:
    rewards = [each for each in mapping(trace, "rewards").values() if isinstance(each, dict)]
    return [(each.get("score") or 0, each.get("weight", 1)) for each in rewards]


def _odd_reward(trace: Json) -> str | None:
    """Return a description of a trace's rewards if they are no numbers, else None."""
    rewards = trace.get("rewards")
    if rewards is not None and not isinstance(rewards, dict):
        return value_in_words(rewards)
    values = itertools.chain.from_iterable(_rewards(trace))
    odd = [each for each in values if each is not None and number_in(each) is None]
    return value_in_words(odd[0]) if odd else None


def _reward(trace: Json) -> float:
    rewards = [numbers(pair)[0] for pair in _rewards(trace)]
    return sum(score * weight for score, weight in rewards) if rewards else NAN


def _paths(nodes: Sequence[Json]) -> list[list[int]]:
    """Return the paths from a root to each leaf, in the order of the leaves.

    Raises:
        InvalidTensor: a node's parent is not before it.
    """
    parents = [node.get("parent") for node in nodes]
    for index, parent in enumerate(parents):
        if parent is not None and not (isinstance(parent, int) and 0 <= parent < index):
            raise InvalidTensor(f"node {index} of a trace has the parent {parent}")
    paths: list[list[int]] = []
    for leaf in sorted(set(range(len(nodes))) - set(parents)):
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = parents[at]
        paths.append(path[::-1])
    return paths


def _sequence(nodes: Sequence[Json], streams: Mapping[str, list[Any]]) -> tuple[SequenceRow, int]:
    """Return a branch's tokens, and how many log-probs of the trainer's are not finite."""
    tokens: list[int] = []
    sampled: list[bool] = []
    rollout: list[float] = []
    for node in nodes:
        ids, chosen = _list(node, "token_ids"), token_mask("mask", _list(node, "mask"))
        values = token_values("logprobs", node.get("logprobs") or [NAN] * sum(chosen))
        if len(chosen) != len(ids) or len(values) != sum(chosen):
            raise InvalidTensor(
                f"a message has {len(ids)} tokens, {len(chosen)} values of its mask and "
                f"{len(values)} log-probs",
                expected="a mask of every token and a log-prob of each that was sampled",
            )
        each = iter(values)
        tokens += token_ids("token_ids", ids)
        sampled += chosen
        rollout += [next(each) if one else 0.0 for one in chosen]
    # The trainer cuts what is longer than its sequences.
    length = min(len(tokens), len(streams["trainer_logprobs"]))
    log_probs = streams["trainer_logprobs"]
    if short := [name for name, values in streams.items() if len(values) < length]:
        raise InvalidTensor(f"{short[0]} has fewer values than the {length} trained tokens")
    entropies = streams.get("entropies") or [0.0] * length
    mask = [
        sampled[at] and not (log_probs[at] is None and entropies[at] is None)
        for at in range(length)
    ]
    columns = {
        _NAMES[name]: token_values(name, values[:length]) for name, values in streams.items()
    }
    nulls = sum(one and value is None for one, value in zip(mask, log_probs, strict=False))
    return SequenceRow(
        tokens[:length], mask, {"rollout_log_probs": rollout[:length], **columns}
    ), nulls


def _contents(
    entry: DumpEntry, rows: Sequence[_Row], problems: Sequence[DumpProblem]
) -> DumpContents:
    sequences = [row.sequence for row in rows]
    starts, ends = ([row.policy[at] for row in rows] for at in (0, 1))
    found = Columns()
    found.tensors |= response_tensors(sequences)
    rewards = [row.reward for row in rows]
    columns = {"rewards": rewards, "policy_start": starts, "policy_end": ends}
    for name, values in columns.items():
        if any(value == value for value in values):
            found.tensors[name] = row_values(values)
    if all(start == end for start, end in zip(starts, ends, strict=True)):
        found.tensors["versions"] = row_values(starts, whole=True)
    found.texts["env_name"] = tuple(row.environment for row in rows)
    found.texts["trace_id"] = tuple(row.trace for row in rows)
    if nulls := sum(row.nulls for row in rows):
        found.about["null_values"] = {"log_probs": nulls}
    found.about |= {
        "alignment": "responses alone, index t is token t",
        "dtypes": "float32 in prime-rl, rounded to four decimals unless its file monitor was told",
        "streams": _STREAMS,
    }
    # Each run gives traces new names: samples pair by their content.
    groups = prompt_hashes(sequences)
    return found.contents(entry, groups=groups, masks=["response_mask"], problems=problems)


FORMAT: Final = Format(
    KIND,
    "prime-rl's traces (monitors/file/traces/annotations/trainer)",
    lambda found: any(map(_is_trainers, found)),
    open_prime_rl_traces,
)
