"""Makes the pages of docs/ that list what the code declares: arguments, names, settings, commands.

python -m tests.tools.reference
"""

from __future__ import annotations

import collections
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias, cast

import click
import griffe

from stagescope.cli import main
from stagescope.cli.common import TASKS
from stagescope_service.settings import Settings
from stagescope_wire import schema
from stagescope_wire.tensors import (
    DTYPE_BYTES,
    INTEGER_TENSORS,
    PAIRS,
    PAYLOAD_STRINGS,
    PAYLOAD_TENSORS,
    STREAM_TENSORS,
)

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
COMMON: Final = 12
"""Commands that share an option before the page lists it once, at its top."""
EVERYWHERE: Final = 40
"""The same before a command does not name it."""
SHAPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("token_offset", "round_offset"), "[rows]"),
    **dict.fromkeys(("rewards", "versions"), "[rows] or [rows, tokens]"),
    "cu_seqlens": "[rows + 1]",
    **dict.fromkeys(("prompts", "tokens", "loss_mask", "input_ids", "attention_mask",
                     "position_ids"), "[rows, tokens], of a width of its own"),
}  # fmt: skip
"""Tensor -> its shape; every other one is as wide as `response_mask`."""
ZERO_ONE: Final = ("response_mask", "loss_mask", "attention_mask", "effective_valid")
VARIABLES: Final[Mapping[str, tuple[str, str]]] = {
    "STAGESCOPE_URL": ("all", "Address of the service; it comes before `service.json`. In a "
                       "training also `file://DIRECTORY`, from which `stagescope import --follow` "
                       "sends on."),
    "STAGESCOPE_TOKEN": ("all", "The access token itself."),
    "STAGESCOPE_TOKEN_FILE": ("all", "File that holds the access token, if STAGESCOPE_TOKEN is not "
                              "set."),
    "STAGESCOPE_HOME": ("all", "Directory of `service.json` and of the token files."),
    "STAGESCOPE_PROXY": ("all", "Proxy for requests to other hosts: `http://HOST:PORT`, `https://` "
                         "or `socks5://`. Default: none, whatever `http_proxy` says."),
    "STAGESCOPE_RUN": ("trainings", "Name of the run, if `init` names none, or if a trainer is "
                       "attached without a changed line. Default: the trainer's own name."),
    "STAGESCOPE_ATTEMPT": ("trainings", "Attempt key: the same text on all ranks of one start."),
    "STAGESCOPE_DATA_DIR": ("trainings", "Directory of the dumps of captures that name none."),
    "STAGESCOPE_WATCHDOG": ("trainings", "Seconds after which a blocked process writes its stacks; "
                            "0 switches it off. Default: 300."),
    "STAGESCOPE_CANARY": ("trainings", "`1`: a [canary](canary.md) after every weight sync of a "
                          "trainer that is attached without a changed line; N: for versions that N "
                          "divides. Default: none."),
    "STAGESCOPE_VERL": ("verl", "What is attached to verl: `all` (the default), `metrics`, "
                        "`stages` or `off`; see [verl](verl.md)."),
    "STAGESCOPE_VERL_FLOAT32": ("verl", "`1`: V1's own debug metrics and perplexities are computed "
                                "in float32. By default verl's numbers do not change."),
    "STAGESCOPE_INTEGRATIONS": ("trainings", "The packages to attach to. `stagescope run` sets "
                                "it: do not set it yourself."),
    "STAGESCOPE_ENGINE_KEY": ("engines", "Key of an inference engine, sent to that engine alone."),
    "STAGESCOPE_ENGINE_KEY_FILE": ("engines", "File that holds that key; it comes first."),
}  # fmt: skip
"""Variable that is read elsewhere than in the service -> where, and its meaning there."""
NOTE: Final = "<!-- Made by `python -m tests.tools.reference`: change the code, not this page. -->"


# --- text -----------------------------------------------------------------------------------
_MARKUP: Final = re.compile(r"`[^`]*`|[<*]")
_ESCAPED: Final = {"<": "&lt;", "*": r"\*"}
"""Signs that would be markup outside code."""


def _cell(text: str) -> str:
    """Return a docstring's text on one line of a table, its cross references as code."""
    line = " ".join(re.sub(r"``([^`]+)``", r"`\1`", text).split())
    line = _MARKUP.sub(lambda found: _ESCAPED.get(found[0], found[0]), line)
    return line.replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _page(title: str, *parts: str, following: str) -> str:
    return "\n\n".join((f"# {title}", NOTE, *(each for each in parts if each),
                        f"Next: {following}")) + "\n"  # fmt: skip


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


# --- docstrings and signatures ----------------------------------------------------------------
_Kind = griffe.ParameterKind
_STARS: Final = {_Kind.var_keyword: "**", _Kind.var_positional: "*"}


def _load(package: str, folder: str) -> griffe.Module:
    logging.getLogger("griffe").setLevel(logging.ERROR)  # `url, token:` names two arguments
    paths = [ROOT / folder, ROOT / "client"]
    loaded = griffe.load(package, search_paths=paths, docstring_parser="google")
    return cast(griffe.Module, loaded)


def _function(member: object) -> griffe.Function | griffe.Attribute | None:
    """Return a public function or property of a class; None for everything else."""
    found = member.final_target if isinstance(member, griffe.Alias) else member
    if not isinstance(found, (griffe.Function, griffe.Attribute)) or found.name.startswith("_"):
        return None
    is_property = "property" in found.labels or "cached" in found.labels
    return found if isinstance(found, griffe.Function) or is_property else None


def _methods(owner: griffe.Class) -> Iterator[griffe.Function | griffe.Attribute]:
    for member in owner.all_members.values():
        found = _function(member)
        if found is not None and found.docstring is not None:
            yield found


def _stars(kind: griffe.ParameterKind | None) -> str:
    return "" if kind is None else _STARS.get(kind, "")


def _arguments(function: griffe.Function) -> list[str]:
    """Return the arguments as they are written, without `self`."""
    written = []
    before: griffe.ParameterKind | None = None
    for each in function.parameters:
        if each.name in ("self", "cls"):
            continue
        kind = each.kind
        if before is _Kind.positional_only and kind is not before:
            written.append("/")
        if kind is _Kind.keyword_only and before not in (kind, _Kind.var_positional):
            written.append("*")
        default = _default(each, function)
        written.append(f"{_stars(kind)}{each.name}{f'={default}' if default else ''}")
        before = kind
    return written


def _default(parameter: griffe.Parameter, function: griffe.Function) -> str:
    """Return the default as it is written, a constant by its value; empty without one."""
    if parameter.default is None or parameter.kind in _STARS:
        return ""
    text = str(parameter.default)
    if not re.fullmatch(r"[A-Z][A-Z_]+", text):
        return text
    value = getattr(importlib.import_module(function.module.path), text)
    return f"{value:_}" if isinstance(value, int) else repr(value)


def _signature(name: str, function: griffe.Function) -> str:
    line = f"{name}({', '.join(_arguments(function))})"
    if len(line) <= 96:
        return line
    return f"{name}(\n    " + ",\n    ".join(_arguments(function)) + ",\n)"


def _sections(found: griffe.Object) -> dict[str, list[object]]:
    """Return the parts of a docstring by their kind."""
    assert found.docstring is not None, found.path
    by_kind: dict[str, list[object]] = collections.defaultdict(list)
    options = {"returns_multiple_items": False, "returns_named_value": False}
    for section in found.docstring.parse("google", **options):
        by_kind[section.kind.value].append(section.value)
    return by_kind


def _first_sentence(found: griffe.Object) -> str:
    text = str(_sections(found)["text"][0]).partition("\n\n")[0]
    return _cell(text)


def _described(name: str, function: griffe.Function, level: str = "###") -> str:
    """Return a function: its call, its text, a table of its arguments, what it raises."""
    sections = _sections(function)
    parts = [f"{level} {name}", f"```py\n{_signature(name, function)}\n```"]
    parts += [_paragraphs(str(text)) for text in sections["text"]]
    types = {each.name: each for each in function.parameters}
    rows = []
    for each in cast("list[list[griffe.DocstringParameter]]", sections["parameters"])[:1]:
        for argument in each:
            known = types.get(argument.name.partition(",")[0].lstrip("*"))
            annotation = "" if known is None or known.annotation is None else str(known.annotation)
            default = "" if known is None else _default(known, function)
            stars = "" if known is None else _stars(known.kind)
            rows.append((_code(stars + argument.name), annotation and _code(annotation),
                         default and _code(default), _cell(argument.description)))  # fmt: skip
    if rows:
        parts.append(_table(("argument", "type", "default", "meaning"), rows))
    for returned in cast("list[list[griffe.DocstringReturn]]", sections["returns"]):
        for value in returned:
            # A colon in the first line would end a type.
            is_type = str(value.annotation) == str(function.returns)
            first = "" if is_type else f"{value.annotation}: "
            parts.append(f"Returns: {first}{_cell(value.description)}")
    for raised in cast("list[list[griffe.DocstringRaise]]", sections["raises"]):
        parts += [f"Raises {_errors(each.annotation)}: {_cell(each.description)}"
                  for each in raised]  # fmt: skip
    return "\n\n".join(parts)


def _errors(annotation: object) -> str:
    return ", ".join(_code(each) for each in re.findall(r"\w+", str(annotation)))


def _paragraphs(text: str) -> str:
    return "\n\n".join(
        # click's mark of lines that are to stay as they are
        f"```text\n{each[2:].rstrip()}\n```" if each.startswith("\b\n")
        else _cell(each).replace("\\|", "|")
        for each in text.split("\n\n")
    )  # fmt: skip


# --- pages ----------------------------------------------------------------------------------
def probe_page() -> str:
    """Return the page of what a training process calls."""
    workers = _load("stagescope_workers", "workers")
    of = {name: cast(griffe.Class, workers[path]) for name, path in
          (("probe", "probe.probe.Probe"), ("stage", "probe.stage.Stage"))}  # fmt: skip
    shown = {"probe": ("stage", "begin", "end", "as_stage", "log", "wants", "end_step",
                       "record_weights", "canary", "status", "close"),
             "stage": ("record", "hand_over", "record_datums", "log", "wants")}  # fmt: skip
    lifecycle = cast(griffe.Module, workers["probe.lifecycle"])
    parts = [
        "What a training process calls. [Attach to a run](attach.md) shows it in use.",
        "```py\n" + inspect.cleandoc("""
            from stagescope_workers import finish, init

            probe = init(run="qwen3-8b-countdown", rank=rank, world_size=world_size)
            with probe.stage("actor_update", step=step, model=model) as stage:
                stage.record(old_log_probs=..., rollout_log_probs=..., response_mask=...)
                stage.log(loss=loss)
            finish(timeout=30)""") + "\n```",
        _described("init", cast(griffe.Function, lifecycle["init"]), "##"),
        _described("finish", cast(griffe.Function, lifecycle["finish"]), "##"),
    ]  # fmt: skip
    for name, calls in shown.items():
        by_name = {each.name: each for each in _methods(of[name])}
        parts.append(f"## {name.capitalize()}")
        parts.append(_paragraphs(str(_sections(of[name])["text"][0])))
        parts += [
            _described(f"{name}.{call}", cast(griffe.Function, by_name[call])) for call in calls
        ]
    return _page("init, probe and stage", *parts, following="[stage and record names]"
                 "(reference-names.md), [attach to a run](attach.md)")  # fmt: skip


def names_page() -> str:
    """Return the page of the names of stages, roles, tensors and lists."""
    streams = {tensor: f"log-probs of the stream `{stream}`, natural logarithm"
               for stream, tensor in STREAM_TENSORS.items()}  # fmt: skip
    tensors = {**streams, **PAYLOAD_TENSORS}
    return _page(
        "Stage and record names",
        "A stage may have any name, and `record` accepts any name. The names below have a meaning: "
        "statistics, findings and the page read them.",
        "## Stages",
        ", ".join(_code(each) for each in schema.STAGES) + ".",
        "The numbers of a step come from the first of these stages that recorded both streams: "
        + ", ".join(_code(each) for each in schema.STEP_SUMMARY_STAGES) + ".",
        "## Roles",
        ", ".join(_code(each) for each in schema.ROLES) + ". A role of your own is allowed.",
        "## Tensors",
        "The mismatch compares the first of these pairs that was recorded: "
        + ", ".join(f"`{p}` with `{q}`" for p, q in PAIRS[:2])
        + ". The noise floor comes from `old` with `recomputed`.",
        _table(("name", "shape", "dtype", "meaning"),
               [(_code(name), SHAPES.get(name, "[rows, tokens]"), _values(name),
                 _cell(re.sub(r"^\[rows[ +1]*\] ", "", meaning)))
                for name, meaning in tensors.items()]),
        "`[rows, tokens]` may be padded on either side, packed with `cu_seqlens`, `torch.nested` "
        "or a list of rows. Accepted dtypes: "
        + ", ".join(_code(each) for each in DTYPE_BYTES) + ".",
        "## Lists of strings",
        "Each has one string per row.",
        _table(("name", "meaning"),
               [(_code(name), _cell(each)) for name, each in PAYLOAD_STRINGS.items()]),
        "## Layout",
        "Keys of `init(layout=...)`: " + ", ".join(map(_code, schema.LAYOUT_COLUMNS)) + ".",
        following="[init, probe and stage](reference-probe.md), [metrics](metrics.md)",
    )  # fmt: skip


def _values(name: str) -> str:
    if name in ZERO_ONE:
        return "0 or 1"
    return "integer" if name in INTEGER_TENSORS else "float"


def settings_page() -> str:
    """Return the page of the service's settings and of the other environment variables."""
    rows = []
    for name, field in Settings.model_fields.items():
        annotation = inspect.formatannotation(field.annotation).replace("pathlib.", "")
        annotation = annotation.replace("pydantic.types.", "").replace("typing.", "")
        default = field.default
        shown = str(default) if isinstance(default, Path) else repr(default)
        rows.append((_code(f"STAGESCOPE_{name.upper()}"),
                     "" if default in (None, ()) else _code(shown),
                     f"{_code(annotation)}. {_cell(field.description or '')}"))  # fmt: skip
    others = [(_code(name), where, _cell(meaning)) for name, (where, meaning) in VARIABLES.items()]
    return _page(
        "Settings and environment variables",
        "The service reads its settings once, at its start:",
        "```sh\nSTAGESCOPE_PORT=8710 STAGESCOPE_KEPT_DAYS=30 stagescope serve\n```",
        "## Settings of the service",
        "Sizes are bytes, times are seconds. A list is joined by `,`, a list of paths by `:`.",
        _table(("variable", "default", "type and meaning"), rows),
        "## Variables of trainings and clients",
        _table(("variable", "read by", "meaning"), others),
        following="[operations](operations.md), [access and trust](trust.md)",
    )


_Option: TypeAlias = tuple[str, str]
"""An option's names and help: commands with equal ones share the option."""


def commands_page() -> str:
    """Return the page of every command with its arguments and options."""
    commands = {name: _command(name) for name in main.list_commands(click.Context(main))}
    by_option = collections.Counter(
        _option_key(each) for command in commands.values() for each in _options(command)
    )
    common = {key for key, number in by_option.items() if number >= COMMON}
    everywhere = {key for key, number in by_option.items() if number >= EVERYWHERE}
    seen: dict[_Option, click.Option] = {}
    for command in commands.values():
        seen |= {key: each for each in _options(command) if (key := _option_key(each)) in common}
    parts = [
        "`stagescope COMMAND --help` prints the same. [The command line](command-line.md) has the "
        "exit codes, and how a command finds the service and the access token.",
        "```sh\nstagescope doctor\nstagescope rounds 33 --json\n```",
        "## Options of almost every command",
        _options_table(each for key, each in seen.items() if key in everywhere),
        "## Options of many commands",
        "Each command names those that it has.",
        _options_table(each for key, each in seen.items() if key not in everywhere),
    ]
    for task, names in TASKS.items():
        parts.append(f"## {task}")
        for name in names:
            command = commands[name]
            parts.append(_command_text(name, command, common, everywhere))
            if isinstance(command, click.Group):
                parts += [_command_text(f"{name} {each}", sub, common, everywhere)
                          for each, sub in command.commands.items()]  # fmt: skip
    return _page("Every command and option", *parts, following="[the command line]"
                 "(command-line.md), [the Python client](reference-client.md)")  # fmt: skip


def _command(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None, name
    return command


def _options(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option) and not each.hidden]


def _option_key(option: click.Option) -> _Option:
    return ", ".join(option.opts), option.help or ""


def _options_table(options: Iterable[click.Option]) -> str:
    rows = []
    for each in options:
        value = "" if each.is_flag else f" {each.make_metavar(click.Context(main))}"
        off = f" / {each.secondary_opts[0]}" if each.secondary_opts else ""
        rows.append((_code(f"{', '.join(each.opts)}{value}{off}"), _cell(each.help or "")))
    return _table(("option", "meaning"), rows) if rows else ""


def _command_text(
    name: str, command: click.Command, common: set[_Option], everywhere: set[_Option]
) -> str:
    """Return a command: its usage, help, own options, and the names of the shared ones."""
    context = click.Context(command, info_name=f"stagescope {name}")
    usage = " ".join(command.collect_usage_pieces(context))
    help_text = inspect.cleandoc(command.help or "").partition("\f")[0]
    keys = [_option_key(each) for each in _options(command)]
    own = [each for each in _options(command) if _option_key(each) not in common]
    has_all = everywhere <= set(keys)
    named = [f"`{key[0]}`" for key in keys
             if key in common and not (has_all and key in everywhere)]  # fmt: skip
    if has_all:
        named.append("[those of almost every command](#options-of-almost-every-command)")
    parts = [f"### stagescope {name}", f"```text\nstagescope {name} {usage}\n```",
             _paragraphs(help_text), _options_table(own)]  # fmt: skip
    if named:
        parts.append(f"{'Also' if own else 'Options'}: {', '.join(named)}.")
    return "\n\n".join(each for each in parts if each)


def client_page() -> str:
    """Return the page of the Python client."""
    client = _load("stagescope", "client")
    parts = [
        "The client asks the service from Python. Answers are tables with `.to_pandas()`, or "
        "dicts. `help(stagescope.Session.series)` prints arguments, shapes and errors of one call.",
        "```py\nimport stagescope\n\nsession = stagescope.attach()\nstep = session.step(\"latest\")"
        "\nstep.metrics()[\"rollout_corr/k3_kl\"]\nstep.rounds().to_pandas()\n```",
        "## Connect",
        *(_described(f"stagescope.{name}", cast(griffe.Function, client[path]))
          for name, path in (("attach", "session.attach"), ("engine", "session.engine"))),
    ]  # fmt: skip
    for title, path in (("session", "session.Session"), ("step", "step.Step"),
                        ("table", "table.Table")):  # fmt: skip
        owner = cast(griffe.Class, client[path])
        rows = [(_code(_call(title, each)), _code(str(_returned(each) or "None")),
                 _first_sentence(each))
                for each in sorted(_methods(owner), key=lambda each: each.name)]  # fmt: skip
        parts += [f"## {title.capitalize()}", _first_sentence(owner),
                  _table(("call", "returns", "what it does"), rows)]  # fmt: skip
    return _page("The Python client", *parts, following="[attach to a run](attach.md), "
                 "[every command and option](reference-commands.md)")  # fmt: skip


def _call(owner: str, found: griffe.Function | griffe.Attribute) -> str:
    if isinstance(found, griffe.Attribute):
        return f"{owner}.{found.name}"
    return f"{owner}.{found.name}({', '.join(_arguments(found))})"


def _returned(found: griffe.Function | griffe.Attribute) -> object:
    return found.annotation if isinstance(found, griffe.Attribute) else found.returns


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "reference-probe.md": probe_page,
    "reference-names.md": names_page,
    "reference-settings.md": settings_page,
    "reference-commands.md": commands_page,
    "reference-client.md": client_page,
}
"""Page of docs/ -> what makes it."""


if __name__ == "__main__":
    for page, make in PAGES.items():
        (DOCS / page).write_text(make(), encoding="utf-8")
