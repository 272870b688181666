"""The collectives that cannot finish, from what the ranks of a role recorded.

A rank has entered a collective if it recorded the call, or a later one of the same group. A
collective cannot finish if a rank of its group has not entered it, or entered another one under its
number. If that rank waits in another collective, the first one waits behind the second: the one
whose missing ranks wait in none is the cause.

Pure functions: the coordinator applies them to answers of probes, a command to files.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_wire.collectives.records import (
    RECORDED,
    Call,
    GroupRecord,
    RankRecord,
    is_users,
    place_text,
)
from stagescope_wire.collectives.rows import BlockedCollective, CallOfRanks, RanksAt, Verdict
from stagescope_wire.render import counted, ranges_text

MAX_ROWS: Final = 16
"""Most collectives that one answer names."""
_MAX_PLACES: Final = 4
AXES: Final = ("tp", "cp", "sp", "pp", "ep", "etp", "dp")


class Member(NamedTuple):
    """A rank of a role with its record."""

    rank: int
    record: RankRecord
    stage: str | None = None
    place: str | None = None
    layout: Mapping[str, int] = {}
    """Axis -> its coordinate."""


_FRAME: Final = re.compile(r'  File "(.*)", line (\d+), in (.*)')


def place_of(stack: str) -> str | None:
    """Return the innermost line of the training's own code, of a stack as Python writes it."""
    frames = [match.groups() for line in stack.split("\n") if (match := _FRAME.match(line))]
    own = [frame for frame in frames if is_users(frame[0])] or frames
    return place_text(own[-1][2], own[-1][0], int(own[-1][1])) if own else None


def is_recording(members: Sequence[Member]) -> bool:
    """Return whether any rank has recorded a call."""
    return any(group.calls for member in members for group in member.record.groups)


def blocked(members: Sequence[Member], role: str | None = None) -> list[BlockedCollective]:
    """Return the collectives in which ranks wait, the causes first.

    A collective that runs at this moment is one of them: see `seconds`.
    """
    rows: list[BlockedCollective] = []
    for world in _worlds(members):
        found = [each for group in _groups(world) for each in group.blocked()]
        _order(found)
        rows += [each.row(role) for each in found]
    rank = {verdict: number for number, verdict in enumerate(_ORDER)}
    rows.sort(key=lambda row: (rank[row.verdict], -(row.seconds or 0.0)))
    return rows[:MAX_ROWS]


_ORDER: Final = ("not entered", "different calls", "circle", "no record", "entered", "behind")


def _worlds(members: Sequence[Member]) -> Iterator[dict[int, Member]]:
    """Yield global rank -> member of each world: engines of one role have one of their own."""
    own = {
        member.rank if member.record.rank is None else member.record.rank: member
        for member in members
    }
    if len(own) == len(members):
        yield own
        return
    worlds: dict[int, dict[int, Member]] = {}
    for member in members:
        number = member.rank if member.record.rank is None else member.record.rank
        worlds.setdefault(member.rank - number, {})[number] = member
    yield from worlds.values()


def _groups(world: Mapping[int, Member]) -> Iterator[_Group]:
    """Yield the process groups of a world; groups of one name and other ranks are others."""
    ranks_of: dict[tuple[str, int], tuple[int, ...]] = {}
    every: dict[str, set[tuple[int, ...]]] = {}
    for member in world.values():
        for record in member.record.groups:
            if record.ranks:
                every.setdefault(record.name, set()).add(record.ranks)
    for name, sets in every.items():
        for ranks in sets:
            ranks_of |= {(name, number): ranks for number in ranks}
    groups: dict[tuple[str, tuple[int, ...]], _Group] = {}
    for number, member in world.items():
        for record in member.record.groups:
            ranks = record.ranks or ranks_of.get((record.name, number), ())
            group = groups.setdefault((record.name, ranks), _Group(record.name, ranks, world))
            group.records[number] = record
    for group in groups.values():
        if not group.ranks:  # gloo's own dumps do not say them
            is_default = any(each.description == "default_pg" for each in group.records.values())
            group.ranks = tuple(sorted(world if is_default else group.records))
        yield group


class _Group:
    """A process group with the records of its ranks, by global rank."""

    def __init__(self, name: str, ranks: tuple[int, ...], world: Mapping[int, Member]) -> None:
        self.name, self.ranks, self.world = name, ranks, world
        self.records: dict[int, GroupRecord] = {}

    @property
    def description(self) -> str:
        """Its description or number, and what of the layout it spans."""
        described = (each.description for each in self.records.values() if each.description)
        name = next(described, "")
        if name in ("", "undefined", "default_pg"):
            name = "all ranks" if name == "default_pg" else f"group {self.name}"
        elif not name.isdecimal() and self.name != name:
            name = f"{name} (group {self.name})"
        axis = self._axis()
        return f"{name}, {axis}" if axis and name != "all ranks" else name

    def _axis(self) -> str:
        """Return the axis along which its ranks lie, and where, such as `tp of dp 1`."""
        layouts = [self.world[rank].layout for rank in self.ranks if rank in self.world]
        if len(layouts) < 2:
            return ""
        spanned = [
            axis
            for axis in AXES
            if len({layout.get(axis) for layout in layouts} - {None}) == len(layouts)
        ]
        if not spanned:
            return ""
        fixed = shared_layout(layouts)
        return f"{spanned[0]} of {fixed}" if fixed else spanned[0]

    def blocked(self) -> Iterator[_Blocked]:
        """Yield its first collective that cannot finish, and its sends and receives that wait."""
        if (found := self._collective()) is not None:
            yield found
        yield from self._point_to_point()

    def _calls(self, is_p2p: bool) -> Iterator[tuple[int, Call]]:
        for number, record in self.records.items():
            for call in record.calls:
                if call.is_p2p is is_p2p:
                    yield number, call

    def _collective(self) -> _Blocked | None:
        waits: dict[int, set[int]] = {}
        calls: dict[int, dict[int, Call]] = {}
        for number, call in self._calls(is_p2p=False):
            calls.setdefault(call.sequence, {})[number] = call
            if not call.done:
                waits.setdefault(call.sequence, set()).add(number)
        entered_by_all = None
        for sequence in sorted(waits):
            missing, unknown = set[int](), set[int]()
            for number in self.ranks:
                member = self.world.get(number)
                if member is None or member.record.state != RECORDED:
                    unknown.add(number)
                elif number not in self.records or self.records[number].entered < sequence:
                    missing.add(number)
            found = _Blocked(self, sequence, calls[sequence], waits[sequence], missing, unknown)
            if missing or unknown or len(found.variants) > 1:
                return found
            entered_by_all = entered_by_all or found
        return entered_by_all

    def _point_to_point(self) -> Iterator[_Blocked]:
        """Yield the oldest send or receive of each pair that waits for its counterpart."""
        waiting: dict[tuple[int, str], Call] = {}
        for number, call in self._calls(is_p2p=True):
            if not call.done:
                waiting.setdefault((number, call.operation), call)
        open_at = {(number, _ends(call)) for (number, _), call in waiting.items()}
        for (number, _), call in waiting.items():
            ends = _ends(call)
            if ends is None or max(ends) >= len(self.ranks):
                continue
            peer = next((self.ranks[end] for end in ends if self.ranks[end] != number), number)
            member = self.world.get(peer)
            is_unknown = member is None or member.record.state != RECORDED
            is_missing = not is_unknown and (peer, ends) not in open_at
            if is_missing or is_unknown or number < peer:  # a pair that both entered is one
                yield _Blocked(
                    self, call.sequence, {number: call},
                    {number} if is_missing or is_unknown else {number, peer},
                    {peer} if is_missing else set(), {peer} if is_unknown else set(),
                )  # fmt: skip


_ENDS: Final = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


def _ends(call: Call) -> tuple[int, int] | None:
    """Return the sender and the receiver, as ranks of the group."""
    found = _ENDS.match(call.operation)
    if found is None:
        return None
    first, second = int(found[2]), int(found[3])
    return (first, second) if found[1] == "send" else (second, first)


_UNEVEN_INPUTS: Final = ("all_to_all", "scatter", "broadcast", "reduce_scatter_v", "gather_v")
_ONE_SIDED: Final = ("broadcast", "scatter", "gather", "reduce")


def _signature(call: Call) -> tuple[object, ...]:
    """Return what must be the same on every rank of a collective."""
    operation = call.operation
    if operation in _ONE_SIDED or operation.startswith("_"):
        return (operation,)
    dtypes = frozenset(call.dtypes)
    if any(each in operation for each in _UNEVEN_INPUTS):
        return operation, dtypes
    return operation, dtypes, sum(math.prod(shape) for shape in call.inputs)


@dataclasses.dataclass(eq=False)
class _Blocked:
    """A collective in which ranks wait, by global rank."""

    group: _Group
    sequence: int
    calls: dict[int, Call]
    waiting: set[int]
    missing: set[int]
    unknown: set[int]
    behind: tuple[int, _Blocked] | None = None
    """A missing rank, and the collective in which it waits."""
    in_circle: bool = False

    @property
    def variants(self) -> dict[tuple[object, ...], list[int]]:
        """The different calls, each with its ranks."""
        found: dict[tuple[object, ...], list[int]] = {}
        for number, call in sorted(self.calls.items()):
            found.setdefault(_signature(call), []).append(number)
        return found

    @property
    def verdict(self) -> Verdict:
        if len(self.variants) > 1:
            return "different calls"
        if self.in_circle:
            return "circle"
        if self.missing:
            return "not entered" if self.behind is None else "behind"
        return "no record" if self.unknown else "entered"

    @property
    def seconds(self) -> float | None:
        waited = [self.calls[each].seconds for each in self.waiting if each in self.calls]
        return max((each for each in waited if each is not None), default=None)

    @property
    def call(self) -> Call:
        waiting = min(self.waiting & self.calls.keys(), default=min(self.calls))
        return self.calls[waiting]

    @property
    def name(self) -> str:
        return f"{self.call.operation} #{self.sequence} of {self.group.description}"

    def row(self, role: str | None) -> BlockedCollective:
        """Return it as an answer shows it."""
        calls = [(numbers, self.calls[numbers[0]]) for numbers in self.variants.values()]
        return BlockedCollective(
            role=role,
            group=self.group.description,
            operation=self.call.operation,
            sequence=self.sequence,
            verdict=self.verdict,
            seconds=self.seconds,
            ranks=len(self.group.ranks),
            waiting=self._places(self.waiting),
            missing=self._places(self.missing),
            unknown=self._shown(self.unknown),
            calls=[
                CallOfRanks(
                    self._shown(numbers), call.operation, [[*shape] for shape in call.inputs],
                    [*call.dtypes],
                )
                for numbers, call in calls
            ],
            message=self._message(),
        )  # fmt: skip

    def _shown(self, numbers: Iterable[int]) -> list[int]:
        """Return global ranks as ranks of the role."""
        world = self.group.world
        return sorted(world[each].rank if each in world else each for each in numbers)

    def _places(self, numbers: Iterable[int]) -> list[RanksAt]:
        world = self.group.world
        folded: dict[tuple[str | None, str | None], list[Member]] = {}
        for number in sorted(numbers):
            if (member := world.get(number)) is not None:
                call = self.calls.get(number)
                place = member.place or (None if call is None else call.place)
                folded.setdefault((member.stage, place), []).append(member)
        return [
            RanksAt(
                sorted(member.rank for member in members),
                stage,
                place,
                shared_layout([member.layout for member in members]),
            )
            for (stage, place), members in folded.items()
        ]

    def _message(self) -> str:
        own = ranges_text("rank", self._shown(self.waiting))
        waits = f"{own} {'waits' if len(self.waiting) == 1 else 'wait'} in {self.name}"
        match self.verdict:
            case "different calls":
                called = [
                    f"{ranges_text('rank', self._shown(numbers))} "
                    f"called {_call_text(self.calls[numbers[0]])}"
                    for numbers in self.variants.values()
                ]
                return (
                    f"ranks of {self.group.description} called different collectives as "
                    f"#{self.sequence}: {'; '.join(called)}"
                )
            case "no record":
                others = ranges_text("rank", self._shown(self.unknown))
                return f"{waits}; there is no record of {others}"
            case "entered":
                return f"{waits}; every rank of the group has entered it"
        absent = ranges_text("rank", self._shown(self.missing))
        has = "has" if len(self.missing) == 1 else "have"
        text = f"{waits}; {absent} {has} not entered it"
        if self.behind is not None:
            number, other = self.behind
            return f"{text}: rank {self._shown([number])[0]} waits in {other.name}"
        where = self._where()
        return f"{text}: {where}" if where else text

    def _where(self) -> str:
        """Return where the missing ranks are."""
        places = self._places(self.missing)
        known = [each for each in places if each.place]
        if not known:
            return self._last_calls()
        texts = []
        for each in known[:_MAX_PLACES]:
            one = len(each.ranks) == 1
            who = ("it" if one else "they") if len(places) == 1 else ranges_text("rank", each.ranks)
            texts.append(f"{who} {'is' if one else 'are'} in {each.place}")
        rest = len(known) - _MAX_PLACES
        return "; ".join(texts) + (f"; {counted(rest, 'more place')}" if rest > 0 else "")

    def _last_calls(self) -> str:
        """Return the last call of a missing rank, of files: they hold no stacks of it."""
        number = min(self.missing)
        calls = [
            (call.order, group, call)
            for group in self.group.world[number].record.groups
            for call in group.calls
        ]
        if not calls:
            return ""
        _, group, call = max(calls, key=lambda each: each[0])
        at = f" at {call.place}" if call.place else ""
        return (
            f"the last call of rank {self._shown([number])[0]} is {call.operation} "
            f"#{call.sequence} of group {group.name}{at}"
        )


def _call_text(call: Call) -> str:
    shapes = ", ".join(f"[{', '.join(map(str, shape))}]" for shape in call.inputs[:3])
    dtypes = ", ".join(dict.fromkeys(call.dtypes))
    return " ".join(each for each in (call.operation, shapes, dtypes) if each)


def _order(found: Sequence[_Blocked]) -> None:
    """Note which collectives wait behind which, and which wait in a circle."""
    waits_in: dict[int, list[_Blocked]] = {}
    for each in found:
        for number in each.waiting:
            waits_in.setdefault(number, []).append(each)
    for each in found:
        if len(each.variants) > 1:
            continue
        others = [
            (number, other)
            for number in sorted(each.missing)
            for other in waits_in.get(number, ())
            if other is not each
        ]
        # A missing rank that waits in none and holds up none of those holds this one up alone.
        free = each.missing - {number for number, _ in others}
        if others and free <= set[int]().union(*(other.missing for _, other in others)):
            each.behind = others[0]
    for each in found:
        seen, at = {id(each)}, each
        while at.behind is not None and id(at.behind[1]) not in seen:
            at = at.behind[1]
            seen.add(id(at))
        each.in_circle = at.behind is not None and at.behind[1] is each


def shared_layout(layouts: Sequence[Mapping[str, int]]) -> str:
    """Return the coordinates that all layouts share, such as `pp 0, dp 1`."""
    first = layouts[0] if layouts else {}
    shared = [
        f"{axis} {first[axis]}"
        for axis in AXES
        if axis in first and all(each.get(axis) == first[axis] for each in layouts)
    ]
    return ", ".join(shared)
