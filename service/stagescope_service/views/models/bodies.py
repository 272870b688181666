"""Bodies of requests as pydantic models: they validate, and describe themselves in the document.

Modules that the CLI and the coordinator share validate captures, engines, rules of triggers and
events (`validate_capture`, `check_engine`, `Rules.parse`, `framing.parse`). The models of these are
for the document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails

from stagescope_service.compare.operators.divergence import MAX_VERDICTS
from stagescope_service.refusals import expected_of
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.common import ABSENT
from stagescope_wire.captures import CAPTURE_FIELDS, SHORTHANDS
from stagescope_wire.engines.registry import ENGINE_FIELDS
from stagescope_wire.errors import InvalidInput
from stagescope_wire.names import MAX_DISPLAY_NAME
from stagescope_wire.schema import STEP_BOUND

Schema = dict[str, Any]
"""A JSON schema."""

MAX_WAIT: Final = 60.0
"""Most seconds that a request may wait for ranks."""
MAX_POLL: Final = 20.0
MAX_DRAIN: Final = 5.0
MAX_UNRECEIPTED: Final = 100_000
MAX_REPLAYED_STEPS: Final = 20_000
REPLAYED_STEPS: Final = 1000

SENDER: Final = (
    "The process: [schema, incarnation, run, attempt_key, role, rank, node_id, clock_offset, "
    "clock_error, started, plan_revision, display_name]. The clock's numbers are in seconds, "
    "`started` is in Unix seconds, unknown ones are null. `display_name` is the run's name as it "
    "was given."
)
DEFAULT_RUN: Final = "A run's name; default: the run whose training stage began last."


def _field(description: str, *, also: Schema | None = None, **bounds: Any) -> Any:
    """Return `pydantic.Field`; `also` is what the document says beyond the type and its bounds."""
    return Field(description=description, json_schema_extra=also, **bounds)


def _tidy(schema: Schema, model: type[RequestBody]) -> None:
    """Leave out titles and null: a field that may be null need not be given."""
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
        if field.get("default", ...) is None:
            del field["default"]
        kinds = [kind for kind in field.get("anyOf", ()) if kind != {"type": "null"}]
        if len(kinds) == 1 and not model.documents_null:
            del field["anyOf"]
            field |= kinds[0]


_Int32 = Annotated[int, Field(ge=0, lt=1 << 31)]
Body = TypeVar("Body", bound="RequestBody")


class RequestBody(BaseModel):
    """The body of a request: a JSON object with no other fields than these."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, json_schema_extra=_tidy)

    expected: ClassVar[Mapping[str, str]] = {}
    """Field -> what an error message says is expected of it."""
    documents_null: ClassVar[bool] = False
    """Whether the document says of a field that it may be null."""

    @classmethod
    def parse(cls: type[Body], fields: Mapping[str, object]) -> Body:
        """Validate the fields of a body.

        Raises:
            InvalidInput: the first of its errors.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise cls._refusal(error.errors(include_url=False)[0], fields) from None

    @classmethod
    def document(cls, *, required: bool = True, closed: bool = True) -> Schema:
        """Return what a route with this body adds to its operation in the document.

        Args:
            required: whether the request needs a body.
            closed: whether the document says that the body has no other fields.
        """
        content = {"application/json": {"schema": cls.schema_of_fields(closed=closed)}}
        return {"requestBody": {"required": required, "content": content}}

    @classmethod
    def schema_of_fields(cls, *, closed: bool = True) -> Schema:
        """Return the JSON schema, without title and description of the whole; see `document`."""
        schema = cls.model_json_schema()
        left_out = {"title", "description"} | (set() if closed else {"additionalProperties"})
        return {key: schema[key] for key in schema if key not in left_out}

    @classmethod
    def _refusal(cls, error: ErrorDetails, fields: Mapping[str, object]) -> InvalidInput:
        location, top = error["loc"], str(error["loc"][0])
        if error["type"] == "extra_forbidden":
            owner = f"{cls._label(location[:-1])} has" if location[1:] else "there is"
            return InvalidInput(
                f"{owner} no field {str(location[-1])!r:.100}",
                expected="" if location[1:] else f"some of {', '.join(cls.model_fields)}",
            )
        label = cls._label(location)
        value = fields.get(top) if label == cls._label([top]) else error["input"]
        verb = "are" if label.endswith("s") else "is"
        expected = expected_of(error)
        if label == cls._label([top]):
            expected = cls.expected.get(top, expected)
        return InvalidInput(f"{label} {verb} {value!r:.100}", expected=expected)

    @classmethod
    def _label(cls, location: Sequence[int | str]) -> str:
        """Return the name of a field in error messages, given its location in the body."""
        return str(location[0])


# --- the page -------------------------------------------------------------------------------
class LoginRequest(RequestBody):
    """A login of a browser."""

    token: Annotated[str, _field("The content of read.token or operate.token of the service.")]


# --- processes ------------------------------------------------------------------------------
class EventsRequest(RequestBody):
    """A batch of events of a process, without tensors."""

    sender: Annotated[list[object], _field(SENDER)]
    events: Annotated[
        list[list[object]],
        _field(
            "Each [schema, kind, seq, wall, mono, fields]: `seq` counts from 1 in an incarnation, "
            "`wall` is in Unix seconds, `mono` in seconds."
        ),
    ]
    payloads: Annotated[
        dict[str, JsonObject] | None, _field("seq -> the payload of that event, without tensors.")
    ] = None


class PollRequest(RequestBody):
    """A poll of a process."""

    sender: Annotated[list[object], _field(SENDER)]
    revision: Annotated[
        int, _field("Revision of the plan that the process has applied; -1: none.")
    ] = -1
    unreceipted: Annotated[
        list[int],
        _field("The number (seq) of each payload without a receipt.", max_length=MAX_UNRECEIPTED),
    ] = []
    wait: Annotated[
        float, _field("Most seconds to wait for a change.", ge=0, also={"maximum": MAX_POLL})
    ] = MAX_POLL

    expected: ClassVar[Mapping[str, str]] = {
        "unreceipted": f"a list of at most {MAX_UNRECEIPTED} integers"
    }


class DrainRequest(RequestBody):
    """A request to wait until the payloads of a run are read."""

    run: Annotated[
        object, _field("The run's name; null: every run.", also={"type": ["string", "null"]})
    ]
    timeout: Annotated[
        float, _field("Most seconds to wait.", ge=0, also={"maximum": MAX_DRAIN})
    ] = MAX_DRAIN
    attempt_key: Annotated[
        str | None,
        _field(
            "Key of the attempts whose processes are asked to finish; null: no attempt.",
            min_length=1,
            max_length=500,
        ),
    ] = None
    ended_by: Annotated[
        dict[str, object] | None,
        _field(
            "The exception that ended the driver of these attempts: `error_type`, `error_message`, "
            "and `interrupted` if somebody stopped it. Then no process of them goes on. null: none."
        ),
    ] = None

    expected: ClassVar[Mapping[str, str]] = {"attempt_key": "a name", "ended_by": "an object"}
    documents_null: ClassVar[bool] = True


class StacksRequest(RequestBody):
    """A request for the stacks of processes."""

    run: Annotated[str | None, _field(DEFAULT_RUN)] = None
    attempt: Annotated[
        int | None,
        _field("Number of the attempt, from 1; default: the run's newest.", ge=1, lt=1 << 31),
    ] = None
    role: Annotated[str | None, _field("Only this role.")] = None
    ranks: Annotated[list[_Int32] | None, _field("Which ranks; all where it is not given.")] = None
    wait: Annotated[float, _field("Seconds that they have to answer.", ge=0, le=MAX_WAIT)] = 5.0

    expected: ClassVar[Mapping[str, str]] = {"ranks": "a list of numbers from 0"}


# --- captures -------------------------------------------------------------------------------
def _capture_field(name: str, *examples: object) -> Any:  # as pydantic.Field
    texts = {**CAPTURE_FIELDS, **SHORTHANDS}
    return Field(description=texts[name], examples=[*examples] or None)


_Names = list[str]
_Numbers = list[int]
"""Beside the model's own field `list`."""


class RunChange(RequestBody):
    """What lists show of a run; a field that is not given stays as it is."""

    documents_null: ClassVar[bool] = True

    display_name: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=MAX_DISPLAY_NAME,
            description="What people see as its name; null: the name that is stored.",
        ),
    ] = None
    hidden: Annotated[bool, Field(description="Whether lists leave it out.")] = False


class CaptureRequest(RequestBody):
    """A capture to request; `validate_capture` validates it."""

    documents_null: ClassVar[bool] = True

    stages: Annotated[
        _Names | Literal["all"], _capture_field("stages", ["actor_compute_log_prob"], "all")
    ]
    steps: Annotated[
        _Numbers | str | dict[Literal["next", "every", "start", "count"], int | None],
        _capture_field("steps", [5], "5,8-10", "next", {"every": 100, "count": 3}),
    ]
    run: Annotated[str | None, _capture_field("run", "qwen3-8b-countdown")] = None
    roles: Annotated[_Names | None, _capture_field("roles", ["actor"])] = None
    ranks: Annotated[
        _Numbers | str | dict[Literal["worst"], int] | None,
        _capture_field("ranks", [0], "0,4-7", "worst(2)"),
    ] = "all"
    config: Annotated[
        JsonObject | None, _capture_field("config", {"task": "statistics", "level": "L1"})
    ] = None
    config_path: Annotated[str | None, _capture_field("config_path")] = None
    bench: Annotated[
        dict[Literal["capture_id", "step"], str | int] | None, _capture_field("bench")
    ] = None
    data_dir: Annotated[str | None, _capture_field("data_dir")] = None
    keep: Annotated[_Names | None, _capture_field("keep", ["old_log_probs"])] = None
    parameters: Annotated[_Names | None, _capture_field("parameters", ["*.q_proj.weight"])] = None
    gradients: Annotated[_Names | None, _capture_field("gradients", ["*.q_proj.weight"])] = None
    limits: Annotated[
        dict[Literal["bytes", "seconds", "reserve_bytes", "tokens"], float | None] | None,
        _capture_field("limits", {"bytes": 1e9, "seconds": 60}),
    ] = None
    force: Annotated[bool | None, _capture_field("force")] = False
    strict: Annotated[bool | None, _capture_field("strict")] = False
    timeout: Annotated[float | None, _capture_field("timeout", 60.0)] = 60.0
    late: Annotated[Literal["wait", "go_on", "give_up"] | None, _capture_field("late")] = "wait"
    again: Annotated[int | None, _capture_field("again", 1)] = 0
    task: Annotated[str | None, _capture_field("task", "statistics", "tensor")] = None
    level: Annotated[str | None, _capture_field("level", "L1")] = None
    scope: Annotated[_Names | str | None, _capture_field("scope")] = None
    list: Annotated[_Names | str | None, _capture_field("list", ["linear"])] = None
    data_mode: Annotated[_Names | str | None, _capture_field("data_mode", ["forward"])] = None


# --- engines --------------------------------------------------------------------------------
def _engine_field(name: str, *examples: object) -> Any:  # as pydantic.Field
    return Field(description=ENGINE_FIELDS[name], examples=[*examples] or None)


class EngineRequest(RequestBody):
    """A registration of an engine; `check_engine` validates it."""

    documents_null: ClassVar[bool] = True

    url: Annotated[str, _engine_field("url", "http://node7:8000")]
    name: Annotated[str | None, _engine_field("name", "llm")] = None
    kind: Annotated[str | None, _engine_field("kind", "vllm")] = None
    model: Annotated[str | None, _engine_field("model", "Qwen/Qwen3-8B")] = None
    version: Annotated[str | None, _engine_field("version", "0.11.0")] = None
    run: Annotated[str | None, _engine_field("run", "qwen3-8b-countdown")] = None
    note: Annotated[str | None, _engine_field("note")] = None
    settings: Annotated[JsonObject | None, _engine_field("settings", {"dtype": "bfloat16"})] = None


# --- comparisons of operators ---------------------------------------------------------------
class SideFields(RequestBody):
    """The fields that name one table of operators."""

    run: Annotated[
        str | None, _field("a run's name; default: the run whose training stage began last")
    ] = None
    attempt: Annotated[
        _Int32 | None, _field("an attempt's number; default: the newest that has the step")
    ] = None
    step: Annotated[int | None, _field("the trainer's step", ge=0, lt=STEP_BOUND)] = None
    stage: Annotated[str | None, _field("a stage's name")] = None
    role: Annotated[str | None, _field("a role")] = None
    rank: Annotated[_Int32 | None, _field("a rank")] = None
    ranks: Annotated[
        str | None,
        _field("`all`, or several ranks (`0-3`), whose tensors are put together; instead of rank"),
    ] = None
    layout: Annotated[
        str | None,
        _field(
            "the layout of these ranks, outermost axis first (`dp2tp2`); default: as they reported"
        ),
    ] = None
    part: Annotated[
        str | None, _field("occurrence.epoch.minibatch.microbatch; default: the first")
    ] = None
    capture_id: Annotated[str | None, _field("a capture's id; default: the newest")] = None

    def completed_by(self, other: SideFields) -> SideFields:
        """Return these fields, completed by those of `other` except its capture."""
        inherited = other.model_dump(exclude_none=True, exclude={"capture_id"})
        if self.run is not None:  # another run has its own attempts
            inherited.pop("attempt", None)
            inherited.pop("layout", None)
        if self.rank is not None or self.ranks is not None:
            for name in ("rank", "ranks", "layout"):
                inherited.pop(name, None)
        return SideFields(**{**inherited, **self.model_dump(exclude_none=True)})


def _side(description: str) -> WithJsonSchema:
    return WithJsonSchema({**SideFields.schema_of_fields(), "description": description})


class SidesRequest(RequestBody):
    """Two tables of operators to compare; fields that `b` leaves out are as in `a`."""

    a: Annotated[SideFields, _side("Side `a`, which gives the order of operators.")]
    b: Annotated[SideFields, _side("Side `b`; fields that it leaves out are as in `a`.")]

    expected: ClassVar[Mapping[str, str]] = dict.fromkeys(
        "ab", f"an object of {', '.join(SideFields.model_fields)}"
    )

    def sides(self) -> tuple[tuple[SideFields, int], tuple[SideFields, int]]:
        """Return both sides, each with its step.

        Raises:
            InvalidInput: a side names no step.
        """
        b = self.b.completed_by(self.a)
        for name, side in (("a", self.a), ("b", b)):
            if side.step is None:
                raise InvalidInput(f"side {name} names no step", expected="its step, an integer")
        assert self.a.step is not None
        assert b.step is not None
        return (self.a, self.a.step), (b, b.step)

    @classmethod
    def _label(cls, location: Sequence[int | str]) -> str:
        name, *nested = location
        if name not in ("a", "b"):
            return str(name)
        return f"{nested[0]} of side {name}" if nested else f"side {name}"


class DivergenceRequest(SidesRequest):
    """A question for the first operator in which two tables differ."""

    factor: Annotated[
        float | None,
        _field(
            "The threshold as a factor: times the eps of the coarsest dtype; default: 4, 100 "
            "where the devices are of two kinds, 8 (float32: 100) where the layouts are.",
            ge=0,
            lt=1e300,
        ),
    ] = None
    by_dtype: Annotated[
        dict[str, Annotated[float, Field(ge=0, lt=1e300)]] | None,
        _field("dtype -> relative difference that counts, instead of factor times eps."),
    ] = None
    exact: Annotated[bool, _field("Every number must be equal.")] = False
    skip_sharded: Annotated[bool, _field("Leave out shards.")] = False
    shards: Annotated[
        list[str],
        _field(
            "How tensors of several ranks are put together where their shapes do not tell: "
            "`PATTERN=AXIS:HOW`. The pattern matches NAME.SECTION.INDEX, HOW is a dimension from "
            "0, `sum`, `mean`, `same` or `skip`.",
            max_length=100,
        ),
    ] = []
    limit: Annotated[
        int, _field("Most rows, and operators of one side alone, to list.", ge=1, le=1000)
    ] = MAX_VERDICTS


class TensorsRequest(SidesRequest):
    """A question for the differences of full tensors."""

    limit: Annotated[int, _field("Most rows to answer.", ge=1, le=10_000)] = 1000
    offset: Annotated[int, _field("Number of rows to leave out first.", ge=0, le=1 << 31)] = 0


# --- comparisons of steps -------------------------------------------------------------------
class DirectoryFields(RequestBody):
    """A directory or file of dumps."""

    directory: str


_DIRECTORY: Final = {
    "type": "string",
    "description": "Path of a directory or file in the service's allowed roots.",
}


def _steps_or_directory(description: str) -> WithJsonSchema:
    kinds = [
        {"type": "string", "description": "RUN[@ATTEMPT][:STEP]"},
        {"type": "object", "properties": {"directory": _DIRECTORY}},
    ]
    text = f"{description}: `RUN[@ATTEMPT][:STEP]`, or an object with a `directory`."
    return WithJsonSchema({"oneOf": kinds, "description": text})


class ComparisonRequest(RequestBody):
    """Two or three things to compare, and what differences are tolerated."""

    a: Annotated[str | DirectoryFields, _steps_or_directory("The first side")]
    b: Annotated[str | DirectoryFields, _steps_or_directory("The second side")]
    c: Annotated[str | DirectoryFields | None, _steps_or_directory("A third side")] = None
    tolerances: Annotated[
        list[str] | None,
        _field(
            "What counts as noise, each `PATTERN=ATOL[,RTOL]`: names of tensors, and up to which "
            "|d|."
        ),
    ] = None

    expected: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys("abc", "RUN[@ATTEMPT][:STEP], or {'directory': PATH}"),
        "tolerances": "a list of PATTERN=ATOL",
    }


# --- triggers -------------------------------------------------------------------------------
class RulesRequest(RequestBody):
    """Rules of triggers, as data or as YAML; `Rules.parse` validates them."""

    rules: Annotated[
        object,
        _field(
            "The rules, in the form that `GET /triggers/defaults` has.",
            also={"type": "array", "items": {"type": "object"}},
        ),
    ] = None
    runs: Annotated[
        object, _field("Run or pattern -> {capture: auto, budget}.", also={"type": "object"})
    ] = None
    yaml: Annotated[str, _field("The document as YAML, instead of rules and runs.")] = ABSENT

    def rules_document(self) -> JsonObject:
        """Return the fields of the rules that were given."""
        return self.model_dump(include={"rules", "runs", "yaml"}, exclude_unset=True)


class DryRunRequest(RulesRequest):
    """Rules to try on the stored steps of a run."""

    run: Annotated[str | None, _field(DEFAULT_RUN)] = None
    steps: Annotated[
        int | None,
        _field(
            "Number of closed steps, the newest, to try the rules on.", ge=1, le=MAX_REPLAYED_STEPS
        ),
    ] = REPLAYED_STEPS
