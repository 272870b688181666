"""What is kept of a stage: the words of a configuration or of a capture, and what they stand for.

A configuration is a plain dict, so that it travels in a process's settings and is stored as it is;
`validate_keep` is the one place that says what it may hold. Ranks ask it before they copy what is
only of use when it is kept, the service before it writes a file, readers when they open one.

A section stands for the tensors that belong together. They have the names of `PAYLOAD_TENSORS`;
parameters and gradients are `parameter/NAME` and `gradient/NAME`, datums `datums/KEY`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from stagescope.wire.captures import matches, read_ranks, read_steps, validate_capture
from stagescope.wire.errors import InvalidPlan, StagescopeError
from stagescope.wire.names import closest, closest_by_words

KEEP_FIELDS: Final[Mapping[str, str]] = {
    "every_n_steps": "keep steps 0, n, 2n, ...; or:",
    "steps": "a list of steps, a text like '5,8-10', or 'all', the default",
    "ranks": "a list of ranks from 0, a text like '0,4-7', or 'all', the default",
    "roles": "a list of roles, or null for every role",
    "stages": "a list of stages, or 'all', the default; of parameters and gradients actor_update",
    "what": "a list of sections, of names of tensors, or 'all' for every section but parameters "
    "and gradients; or {word: true or false}",
    "parameters": "patterns of parameter names, such as '*.q_proj.weight', to keep each rank's "
    "shards of at the stage's end",
    "gradients": "patterns of parameter names to keep the gradients of, each rank's shards",
}

COMPANIONS: Final = frozenset(
    {
        "response_mask", "loss_mask", "positions", "cu_seqlens", "token_offset", "round_offset",
    }
)  # fmt: skip
"""Kept with every section of rows: without them the others cannot be read."""

_TRAJECTORIES: Final = frozenset(
    {
        "tokens", "prompts", "responses", "round_ids", "turn_ids", "rollout_log_probs", "rewards",
        "versions",
    }
)  # fmt: skip
_ROWS: Final[Mapping[str, frozenset[str]]] = {
    "trajectories": _TRAJECTORIES,
    "batch_inputs": frozenset({"input_ids", "attention_mask", "position_ids", "labels"}),
    "old_log_probs": frozenset(
        {"old_log_probs", "ref_log_probs", "ref_log_prob", "recomputed_log_probs"}
    ),
    "forward_data": frozenset({"log_probs", "entropy"}),
    "advantages": frozenset({"values", "advantages", "returns"}),
    "is_loss": frozenset(
        {
            "log_probs", "old_log_probs", "ref_log_probs", "advantages", "prob_ratio",
            "elementwise_loss", "effective_valid",
        }
    ),
}  # fmt: skip
_OF_A_LOSS: Final = frozenset({"prob_ratio", "elementwise_loss", "effective_valid"})
_PREFIXES: Final = {"parameters": "parameter", "gradients": "gradient", "datums": "datums"}

SECTIONS: Final = (*_ROWS, "loss", "gradients", "parameters", "datums", "metrics", "other")
"""The words of sections; `loss` and `metrics` are the numbers that a stage logged."""

ALIASES: Final[Mapping[str, str]] = {
    "trajectory": "trajectories",
    "prepared_trajectories": "trajectories",
    "is_loss_debug": "is_loss",
    "param": "parameters",
    "gradient": "gradients",
    "training_metrics": "metrics",
}
"""Words of NexRL's dump_options, remote_api_dump_options and Weaver's WEAVER_DEBUG_DUMP_OPTIONS."""

_SHARDS: Final = ("parameters", "gradients")
_WHOLE: Final = "rollout_generate"
"""All that this stage records is of the trajectories."""


def validate_keep(spec: object) -> dict[str, Any]:
    """Return a configuration with every field present and checked.

    Raises:
        InvalidPlan: an unknown field, or a value that cannot be carried out.
    """
    if not isinstance(spec, Mapping):
        raise InvalidPlan(f"keep is {spec!r:.200}", expected=f"fields {[*KEEP_FIELDS]}")
    unknown = sorted(map(str, set(spec) - set(KEEP_FIELDS)))
    if unknown:
        raise InvalidPlan(
            f"keep has no field {', '.join(map(repr, unknown))}",
            expected="; ".join(f"{name}: {text}" for name, text in KEEP_FIELDS.items()),
        )
    words = read_words(spec.get("what"))
    checked = _as_capture(spec, words)
    for name in _SHARDS:
        if name in words and not checked[name]:
            raise InvalidPlan(
                f"keep names {name} without saying which", expected=f"patterns in {name}"
            )
    kept = {name: checked[name] for name in ("roles", "ranks", "stages", *_SHARDS)}
    steps = _named_steps(spec)
    return {"every_n_steps": spec.get("every_n_steps"), "steps": steps, **kept, "what": words}


def _named_steps(spec: Mapping[str, Any]) -> Any:
    steps, every = spec.get("steps"), spec.get("every_n_steps")
    if every is None:
        return "all" if steps is None else read_steps(steps)
    if steps is not None:
        raise InvalidPlan("keep has both every_n_steps and steps", expected="one of them, or none")
    read_steps({"every": every})
    return None


def _as_capture(spec: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Check what a configuration has in common with a capture by what checks that."""
    steps = _named_steps(spec)
    if not words and not any(spec.get(name) for name in _SHARDS):
        raise InvalidPlan(
            "keep names nothing to keep",
            expected=f"in what, some of {', '.join(SECTIONS)}; or patterns in parameters",
        )
    if isinstance(read_ranks(spec.get("ranks")), Mapping):
        raise InvalidPlan(f"ranks is {spec['ranks']!r:.200}", expected=KEEP_FIELDS["ranks"])
    if isinstance(steps, Mapping):
        raise InvalidPlan(f"steps is {spec['steps']!r:.200}", expected=KEEP_FIELDS["steps"])
    common = {name: spec.get(name) for name in ("roles", "ranks", *_SHARDS)}
    return validate_capture(
        {
            **common,
            "stages": "all" if spec.get("stages") is None else spec["stages"],
            "steps": {"every": spec["every_n_steps"]} if steps is None else steps,
            "keep": [*words, *_SHARDS],
        },
        allowed_roots=(),
    )


def read_words(what: object) -> list[str]:
    """Return the words of what is to be kept, those of other projects as ours; no repeats.

    Raises:
        InvalidPlan: neither a list of names nor a mapping of them to true and false.
    """
    if what is None:
        return []
    if isinstance(what, str):
        what = [what]
    if isinstance(what, Mapping) and all(isinstance(is_on, bool) for is_on in what.values()):
        what = [word for word, is_on in what.items() if is_on]
    names = isinstance(what, Sequence) and all(_is_word(word) for word in what)
    if not names:
        raise InvalidPlan(f"what is {what!r:.200}", expected=KEEP_FIELDS["what"])
    assert isinstance(what, Sequence)
    words = [ALIASES.get(word, word) for word in what]
    if "all" in words:
        words += [section for section in SECTIONS if section not in _SHARDS]
    return [word for word in dict.fromkeys(words) if word != "all"]


def misspelt_words(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (word, what it seems to mean) of words that name no section and no known tensor.

    Any other name may be that of a tensor or number of the training's own.
    """
    said = [*words]
    for word in said:
        if word in SECTIONS or word in ALIASES or is_loss(word):
            continue
        found = closest_by_words(word, (*SECTIONS, *ALIASES)) or closest(word)
        if found is not None and found not in said:
            yield word, found


def _is_word(word: object) -> bool:
    return isinstance(word, str) and 0 < len(word) <= 200 and word.isprintable()


def shard_capture(keep: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the capture by which a rank takes the parameters and gradients of a configuration."""
    if not any(keep[name] for name in _SHARDS):
        return None
    every = keep["every_n_steps"]
    capture = validate_capture(
        {
            "stages": ["actor_update"] if keep["stages"] == "all" else keep["stages"],
            "steps": keep["steps"] if every is None else {"every": every, "start": 0},
            **{name: keep[name] for name in ("roles", "ranks", *_SHARDS)},
        },
        allowed_roots=(),
    )
    return {**capture, "capture_id": "keep", "source": "keep", "by": "init", "created": 0.0}


def wanted_by(
    keep: Mapping[str, Any], *, stage: str, role: str, rank: int, step: int | None
) -> tuple[str, ...]:
    """Return the words by which a checked configuration keeps something of this stage."""
    every = keep["every_n_steps"]
    steps = keep["steps"] if every is None else {"every": every, "start": 0}
    if not matches({**keep, "steps": steps}, stage=stage, role=role, rank=rank, step=step):
        return ()
    return (*keep["what"], *(f"{_PREFIXES[name]}/*" for name in _SHARDS if keep[name]))


def words_of(capture: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words by which a capture keeps something of the stages that it matches."""
    shards = (f"{_PREFIXES[name]}/*" for name in _SHARDS if capture.get(name))
    return (*read_words(capture["keep"]), *shards)


def read_keep(said: object) -> dict[str, Any] | None:
    """Return the configuration in a process's settings; None where there is none to be read."""
    try:
        return None if said is None else validate_keep(said)
    except StagescopeError:
        return None  # its own process refused it, and said so


def is_wanted(words: Collection[str], stage: str, name: str) -> bool:
    """Say whether some of `words` keep a tensor or a number of this name, in this stage.

    `name` may be a section's word, too.
    """
    if name in words or family(name) in words:
        return True
    sections = {section for section in SECTIONS if _may_hold(section, stage, name)}
    if not sections - {"trajectories"}:
        sections.add("other")  # where what makes a trajectory is not beside it
    return not sections.isdisjoint(words)


def _may_hold(section: str, stage: str, name: str) -> bool:
    if section in _ROWS:
        of_rollout = section == "trajectories" and stage == _WHOLE
        return of_rollout or name in _ROWS[section] or name in COMPANIONS
    if section == "loss":
        return is_loss(name)
    return family(name) == f"{_PREFIXES.get(section)}/*"


def is_loss(name: str) -> bool:
    """Say whether a number is a loss by its name: `loss`, `pg_loss`, `actor/pg_loss`."""
    return name not in _OF_A_LOSS and name.rpartition("/")[2].rpartition("_")[2] == "loss"


def family(name: str) -> str:
    """Return what tensors of one origin are called together: `gradient.1/linear.weight` is
    `gradient/*`; a name of no family is one of its own."""
    first, slash, _ = name.partition("/")
    return f"{first.partition('.')[0]}/*" if slash else name


def sections_of(
    stage: str | None, tensors: Iterable[str], scalars: Iterable[str] = ()
) -> dict[str, list[str]]:
    """Return section -> names of what a stage handed over, in the order of SECTIONS.

    A tensor may be of several sections (`log_probs` of `forward_data` and `is_loss`); companions
    are in each section of rows that holds anything else. Of `loss` and `metrics` the names are
    those of numbers.
    """
    names, numbers = [*tensors], [*scalars]
    found: dict[str, list[str]] = {}
    for section, own in _ROWS.items():
        held = [name for name in names if name in own]
        if section == "trajectories":
            held = _of_trajectories(stage, names, held)
        if section == "is_loss" and not _OF_A_LOSS.intersection(held):
            held = []
        if held:
            found[section] = [name for name in names if name in held or name in COMPANIONS]
    losses = [name for name in (*numbers, *names) if is_loss(name)]
    found["loss"] = losses
    for section, prefix in _PREFIXES.items():
        found[section] = [name for name in names if family(name) == f"{prefix}/*"]
    found["metrics"] = [name for name in numbers if name not in losses]
    placed = {name for held in found.values() for name in held}
    found["other"] = [name for name in names if name not in placed]
    return {section: found[section] for section in SECTIONS if found.get(section)}


def _of_trajectories(stage: str | None, names: list[str], held: list[str]) -> list[str]:
    if stage == _WHOLE:
        return names
    # Log-probs of the engine beside an update's own are no trajectory.
    is_one = any(name in held for name in ("tokens", "responses", "rewards"))
    return held if is_one else []


def kept_sections(
    words: Collection[str],
    stage: str | None,
    tensors: Collection[str],
    scalars: Collection[str] = (),
) -> dict[str, list[str]]:
    """Return what of `sections_of` is kept by `words`, which name sections or single tensors."""
    found: dict[str, list[str]] = {}
    for section, names in sections_of(stage, tensors, scalars).items():
        held = names
        if section not in words:
            held = [name for name in names if name in words or family(name) in words]
        if held:
            found[section] = held
    return found
