"""Keep configurations: which tensors and numbers of a stage are kept, and in which sections.

A configuration is a plain dict, so that it is sent in a process's settings and stored unchanged.
Only `validate_keep` defines its content. Ranks read it before they copy tensors that are only
needed if they are kept. The service reads it before it writes a file, readers when they open one.

Selectors list what to keep: names of sections, of single tensors or of numbers. A section is a
group of tensors that belong together, by their names in `PAYLOAD_TENSORS`. Parameters and
gradients are `parameter/NAME` and `gradient/NAME`, datums are `datums/KEY`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from stagescope_wire.captures import check_fields, matches, read_ranks, read_steps, validate_capture
from stagescope_wire.errors import InvalidPlan, StagescopeError
from stagescope_wire.names import closest, closest_by_words
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.plan import Capture, CaptureScope, CaptureSpec, CaptureSteps, KeepSpec

KEEP_FIELDS: Final[Mapping[str, str]] = {
    "every_n_steps": "keep steps 0, n, 2n, ...; or:",
    "steps": "a list of steps, a text like '5,8-10', or 'all', the default",
    "ranks": "a list of ranks from 0, a text like '0,4-7', or 'all', the default",
    "roles": "a list of roles, or null for every role",
    "stages": "a list of stages, or 'all', the default; for parameters and gradients actor_update",
    "what": "a list of sections, of names of tensors, or 'all' for every section but parameters "
    "and gradients; or {word: true or false}",
    "parameters": "patterns of parameter names, such as '*.q_proj.weight', to keep each rank's "
    "shards of at the stage's end",
    "gradients": "patterns of parameter names to keep the gradients of, each rank's shards",
}

COMPANIONS: Final = frozenset({
    "response_mask", "loss_mask", "positions", "cu_seqlens", "token_offset", "round_offset",
})  # fmt: skip
"""Kept with every section of rows, whose other tensors cannot be interpreted without them."""

_ROWS: Final[Mapping[str, frozenset[str]]] = {
    "trajectories": frozenset({
        "tokens", "prompts", "responses", "round_ids", "turn_ids", "rollout_log_probs", "rewards",
        "versions",
    }),
    "batch_inputs": frozenset({"input_ids", "attention_mask", "position_ids", "labels"}),
    "old_log_probs": frozenset({
        "old_log_probs", "ref_log_probs", "ref_log_prob", "recomputed_log_probs",
    }),
    "forward_data": frozenset({"log_probs", "entropy"}),
    "advantages": frozenset({"values", "advantages", "returns"}),
    "is_loss": frozenset({
        "log_probs", "old_log_probs", "ref_log_probs", "advantages", "prob_ratio",
        "elementwise_loss", "effective_valid",
    }),
}  # fmt: skip
_LOSS_INTERMEDIATES: Final = frozenset({"prob_ratio", "elementwise_loss", "effective_valid"})
_PREFIXES: Final = {"parameters": "parameter", "gradients": "gradient", "datums": "datums"}

SECTIONS: Final = (*_ROWS, "loss", "gradients", "parameters", "datums", "metrics", "other")
"""The names of the sections; `loss` and `metrics` are the numbers that a stage logged."""

ALIASES: Final[Mapping[str, str]] = {
    "trajectory": "trajectories", "prepared_trajectories": "trajectories",
    "is_loss_debug": "is_loss", "param": "parameters", "gradient": "gradients",
    "training_metrics": "metrics",
}  # fmt: skip
"""Names in NexRL's dump_options, remote_api_dump_options and WEAVER_DEBUG_DUMP_OPTIONS."""

_SHARDS: Final = ("parameters", "gradients")
_UPDATES: Final = (None, "actor_update", "critic_update")
_ROLLOUT_STAGE: Final = "rollout_generate"
"""Everything that this stage records belongs to the trajectories."""


def validate_keep(spec: object) -> KeepSpec:
    """Return a configuration with every field present and checked.

    Raises:
        InvalidPlan: an unknown field, or a value that cannot be carried out.
    """
    if not isinstance(spec, Mapping):
        raise InvalidPlan(f"keep is {spec!r:.200}", expected=f"fields {[*KEEP_FIELDS]}")
    check_fields("keep", spec, KEEP_FIELDS)
    selectors = read_selectors(spec.get("what"))
    checked = _as_capture(spec, selectors)
    for name in _SHARDS:
        if name in selectors and not checked[name]:
            raise InvalidPlan(
                f"keep names {name} without saying which", expected=f"patterns in {name}"
            )
    return {
        "every_n_steps": spec.get("every_n_steps"), "steps": _named_steps(spec),
        "roles": checked["roles"], "ranks": checked["ranks"], "stages": checked["stages"],
        "parameters": checked["parameters"], "gradients": checked["gradients"], "what": selectors,
    }  # fmt: skip


def _named_steps(spec: JsonObject) -> CaptureSteps | None:
    """Return the steps of a configuration; None if it has `every_n_steps` instead."""
    steps, every = spec.get("steps"), spec.get("every_n_steps")
    if every is None:
        return "all" if steps is None else read_steps(steps)
    if steps is not None:
        raise InvalidPlan("keep has both every_n_steps and steps", expected="one of them, or none")
    read_steps({"every": every})
    return None


def _as_capture(spec: JsonObject, selectors: Sequence[str]) -> CaptureSpec:
    """Return the capture with the fields of a configuration; `validate_capture` checks them."""
    steps = _named_steps(spec)
    if not selectors and not any(spec.get(name) for name in _SHARDS):
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
            "keep": [*selectors, *_SHARDS],
        },
        allowed_roots=(),
    )


def read_selectors(what: object) -> list[str]:
    """Return the selectors in the field `what`, without repeats and aliases.

    Raises:
        InvalidPlan: neither a list of names nor a mapping of names to booleans.
    """
    if what is None:
        return []
    if isinstance(what, str):
        what = [what]
    if isinstance(what, Mapping) and all(isinstance(is_on, bool) for is_on in what.values()):
        what = [name for name, is_on in what.items() if is_on]
    if not isinstance(what, Sequence) or not all(map(_is_selector, what)):
        raise InvalidPlan(f"what is {what!r:.200}", expected=KEEP_FIELDS["what"])
    selectors = [ALIASES.get(name, name) for name in what]
    if "all" in selectors:
        selectors += [section for section in SECTIONS if section not in _SHARDS]
    return [name for name in dict.fromkeys(selectors) if name != "all"]


def misspelt_selectors(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (selector, similar known name) of selectors that look misspelt.

    A selector without a similar name may be a tensor or number of the training itself.
    """
    selectors = [*words]
    for selector in selectors:
        if selector in SECTIONS or selector in ALIASES or is_loss(selector):
            continue
        similar = closest_by_words(selector, (*SECTIONS, *ALIASES)) or closest(selector)
        if similar is not None and similar not in selectors:
            yield selector, similar


def _is_selector(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable()


def shard_capture(keep: KeepSpec) -> Capture | None:
    """Return the capture of a configuration's parameters and gradients; None without them."""
    if not (keep["parameters"] or keep["gradients"]):
        return None
    capture = validate_capture(
        {
            "stages": ["actor_update"] if keep["stages"] == "all" else keep["stages"],
            "steps": _steps_of(keep),
            **{name: keep[name] for name in ("roles", "ranks", *_SHARDS)},
        },
        allowed_roots=(),
    )
    return {**capture, "capture_id": "keep", "source": "keep", "by": "init", "created": 0.0}


def _steps_of(keep: KeepSpec) -> CaptureSteps | None:
    every = keep["every_n_steps"]
    return keep["steps"] if every is None else {"every": every, "start": 0, "count": None}


def matching_selectors(
    keep: KeepSpec, *, stage: str, role: str, rank: int, step: int | None
) -> tuple[str, ...]:
    """Return the selectors of a validated configuration that apply to this stage; () if none do."""
    scope: CaptureScope = {
        "stages": keep["stages"], "roles": keep["roles"], "ranks": keep["ranks"],
        "steps": _steps_of(keep) or [],
    }  # fmt: skip
    if not matches(scope, stage=stage, role=role, rank=rank, step=step):
        return ()
    return (*keep["what"], *(f"{_PREFIXES[name]}/*" for name in _SHARDS if keep[name]))


def capture_selectors(capture: CaptureSpec) -> tuple[str, ...]:
    """Return the selectors of the data that a capture keeps in the stages that it matches."""
    shards = (f"{_PREFIXES[name]}/*" for name in _SHARDS if capture.get(name))
    return (*read_selectors(capture["keep"]), *shards)


def read_keep(spec: object) -> KeepSpec | None:
    """Return the configuration in a process's settings; None if it is absent or invalid."""
    try:
        return None if spec is None else validate_keep(spec)
    except StagescopeError:
        return None  # the process itself has refused and reported it


def is_selected(words: Collection[str], stage: str, name: str) -> bool:
    """Return whether the selectors `words` keep a tensor or number of this name in this stage.

    `name` may also be the name of a section.
    """
    if name in words or family(name) in words:
        return True
    sections = {section for section in SECTIONS if _may_hold(section, stage, name)}
    if not sections - {"trajectories"}:
        sections.add("other")  # if the tensors that make a trajectory are not recorded with it
    return not sections.isdisjoint(words)


def _may_hold(section: str, stage: str, name: str) -> bool:
    if section in _ROWS:
        of_rollout = section == "trajectories" and stage == _ROLLOUT_STAGE
        return of_rollout or name in _ROWS[section] or name in COMPANIONS
    if section == "loss":
        return is_loss(name)
    return family(name) == f"{_PREFIXES.get(section)}/*"


def is_loss(name: str) -> bool:
    """Return whether a name means a loss, such as `loss`, `pg_loss` or `actor/pg_loss`."""
    return name not in _LOSS_INTERMEDIATES and name.rpartition("/")[2].rpartition("_")[2] == "loss"


def family(name: str) -> str:
    """Return the family of a tensor: `gradient/*` for `gradient.1/linear.weight`.

    The family of a name without a slash is the name itself.
    """
    first, slash, _ = name.partition("/")
    return f"{first.partition('.')[0]}/*" if slash else name


def sections_of(
    stage: str | None, tensors: Iterable[str], scalars: Iterable[str] = ()
) -> dict[str, list[str]]:
    """Return section -> names of the recorded tensors and scalars, in the order of SECTIONS.

    A tensor may belong to several sections (`log_probs` to `forward_data` and `is_loss`).
    Companions are in each section of rows that has another tensor. The names in `loss` and
    `metrics` are those of scalars.
    """
    names, numbers = [*tensors], [*scalars]
    found: dict[str, list[str]] = {}
    for section, own in _ROWS.items():
        held = [name for name in names if name in own]
        if section == "trajectories":
            held = _of_trajectories(stage, names, held)
        if section == "is_loss" and not _LOSS_INTERMEDIATES.intersection(held):
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
    if stage == _ROLLOUT_STAGE:
        return names
    # The engine's log-probs beside those of an update are not a trajectory, unless it has more.
    is_one = any(name in held for name in ("tokens", "responses", "rewards"))
    return held if is_one or stage not in _UPDATES else []


def kept_sections(
    words: Collection[str],
    stage: str | None,
    tensors: Collection[str],
    scalars: Collection[str] = (),
) -> dict[str, list[str]]:
    """Return the part of `sections_of` that the selectors `words` keep."""
    found: dict[str, list[str]] = {}
    for section, names in sections_of(stage, tensors, scalars).items():
        held = names
        if section not in words:
            held = [name for name in names if name in words or family(name) in words]
        if held:
            found[section] = held
    return found
