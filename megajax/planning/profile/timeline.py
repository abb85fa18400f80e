"""Timeline: a scheduled program is played on the queues of a GPU, with the start and the waits of every instruction.

XLA's program is a schedule: the instructions of every computation are in the order in which they are launched. One
queue computes. A start puts its work onto another queue: one for collectives, one for sends to neighbours, and one for
copies beside other kernels. The matching done makes the computing queue wait. A collective without start and done
blocks the computing queue.

While a collective is in flight, kernels beside it lose DISTURBANCE of their speed, because NCCL takes multiprocessors
and bandwidth. Kernels that run beside each other share the memory bandwidth. The closed form makes the same assumptions
(`planning.operations`).

The body of a loop is played once and counts as often as it runs, except for first turns during which work from before
the loop is still in flight. A branch counts by the share of times that it is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

from megajax.planning.hlo import UNKNOWN, Instruction, Program
from megajax.planning.operations import DISTURBANCE
from megajax.planning.profile.prices import Price

SLOWEST = 0.1
"""Share of its speed that a kernel keeps, however much runs beside it."""
COMPUTING, NEIGHBOURS, COLLECTIVES, COPIES = "computing", "neighbours", "collectives", "copies"
"""Queues of a GPU."""


@dataclass(frozen=True)
class Span:
    """The execution of an instruction; in a loop, the first one."""

    instruction: Instruction
    price: Price
    queue: str
    start: float
    """Seconds from the start of the program to the start of the instruction."""
    seconds: float
    """Seconds from its start to its end, including those by which it is slowed down."""
    waited: float
    """Seconds of these in which the computing queue waits."""
    times: float
    """Number of executions, multiplied by the share of times that a branch is taken."""
    source: str
    """JAX functions from which the instruction, or the loop around it, comes."""

    @property
    def computes(self) -> bool:
        """Tell whether it runs on the computing queue, which otherwise may wait for it."""
        return self.queue == COMPUTING

    @property
    def taken(self) -> float:
        """Return the seconds that one execution takes from the computing queue, computing or waiting."""
        return self.seconds if self.computes else self.waited


@dataclass(frozen=True)
class Turns:
    """A loop of a program, with the turns that are not played one by one."""

    name: str
    start: float
    turn: float
    """Seconds of one turn."""
    times: int
    """Number of turns that follow the one that is played."""


@dataclass
class _Flight:
    """Follow work on another queue that has been started and is not done."""

    instruction: Instruction
    price: Price
    queue: str
    source: str
    times: float
    """Number of times that it counts."""
    share: float
    """Share of the times that the branches around it are taken, by which all its seconds are multiplied."""
    left: float
    """Seconds of its own work that remain."""
    start: float | None = None
    end: float = 0.0
    waited: float = 0.0


@dataclass
class Timeline:
    """The times of one run of a program."""

    spans: list[Span] = field(default_factory=list)
    loops: list[Turns] = field(default_factory=list)
    seconds: float = 0.0
    uncounted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Names of what the reader does not understand, with the number of places: unknown kernels, loops without trip
    count.
    """


def play(
    program: Program,
    price: Callable[[Instruction, str], Price],
    taken: Callable[[str], Fraction] = lambda source: Fraction(1),
    unknown: int | None = None,
) -> Timeline:
    """Return the timeline of a program, played from its first to its last instruction.

    Args:
        program: scheduled program.
        price: function that returns the price of an instruction in the computation with the given name.
        taken: function from a source to the share of times that the dearest branch there is taken.
        unknown: turns to assume for loops whose number depends on data; None = such loops are named, and count once.
    """
    player = _Player(program, price, taken, unknown)
    player.run(program.entry, "")
    player.land_all()
    return player.timeline


class _Player:
    def __init__(
        self,
        program: Program,
        price: Callable[[Instruction, str], Price],
        taken: Callable[[str], Fraction],
        unknown: int | None,
    ) -> None:
        self.program, self.price, self.taken, self.unknown = program, price, taken, unknown
        self.timeline = Timeline()
        self.flights: dict[tuple[str, str], _Flight] = {}
        self.times = self.share = 1.0

    def run(self, computation: str, source: str) -> None:
        """Play the instructions of a computation in their order."""
        for line, here in self.program.with_sources(computation, source):
            if line.opcode == "while":
                self._loop(line, here)
            elif line.opcode == "conditional":
                self._branches(line, here)
            elif line.opcode == "call":
                self.run(line.calls[0], here)
            elif line.opcode.endswith("-update"):
                if flight := self.flights.pop((computation, line.operand_names[0]), None):
                    self.flights[computation, line.name] = flight
            elif line.opcode.endswith("-done"):
                self._wait(computation, line)
            else:
                self._launch(computation, line, here)

    def _launch(self, computation: str, line: Instruction, source: str) -> None:
        price = self.price(line, computation)
        if price.unknown:
            self.timeline.uncounted[price.unknown] += 1
        if price.kind == "free":
            return
        queue = _queue(line, price)
        flight = _Flight(line, price, queue, source, self.times, self.share, price.seconds * self.share)
        if line.opcode.endswith("-start"):
            self.flights[computation, line.name] = flight
        elif price.kind == "collective":  # a collective without a start blocks the computing queue
            self.flights[computation, line.name] = flight
            self._land((computation, line.name))
        else:
            start = self.timeline.seconds
            self._compute(price)
            self._record(flight, start, self.timeline.seconds - start)

    def _wait(self, computation: str, line: Instruction) -> None:
        """Wait for the start that a done names, unless it runs nothing."""
        key = (computation, line.operand_names[0])
        if key in self.flights:
            self._land(key)

    def _land(self, key: tuple[str, str]) -> None:
        """Let other queues run, without computing, until a flight is over, and record it."""
        flight = self.flights[key]
        while flight.left > 0:
            heads = self._heads()
            head = heads[flight.queue]
            step = min(other.left / self._rate(other, heads, None) for other in heads.values())
            self._advance(step, None)
            head.waited += step
        self._record(self.flights.pop(key))

    def land_all(self) -> None:
        """Wait for everything in flight, because a program ends when all of it is over."""
        for key in list(self.flights):
            self._land(key)

    def _compute(self, price: Price) -> None:
        """Run a kernel on the computing queue, beside all flights."""
        left = price.seconds * self.share
        while left > 0:
            heads = self._heads()
            rate = self._rate_of_kernel(heads, price)
            step = min([left / rate, *(other.left / self._rate(other, heads, price) for other in heads.values())])
            self._advance(step, price)
            left = left - step * rate if step < left / rate else 0.0

    def _heads(self) -> dict[str, _Flight]:
        """Return the flight on which every other queue works."""
        heads: dict[str, _Flight] = {}
        for flight in self.flights.values():
            if flight.left > 0:
                heads.setdefault(flight.queue, flight)
        return heads

    def _advance(self, step: float, price: Price | None) -> None:
        heads = self._heads()
        rates = {queue: self._rate(flight, heads, price) for queue, flight in heads.items()}
        now = self.timeline.seconds = self.timeline.seconds + step
        for queue, flight in heads.items():
            if flight.start is None:
                flight.start = now - step
            flight.left -= step * rates[queue]
            if flight.left <= 1e-12:
                flight.left, flight.end = 0.0, now

    @staticmethod
    def _rate_of_kernel(heads: dict[str, _Flight], price: Price) -> float:
        sends = sum(flight.price.kind == "collective" for flight in heads.values())
        copies = sum(flight.price.kind != "collective" for flight in heads.values())
        shared = 1 / (1 + copies) if price.kind == "memory" else 1.0
        return max(SLOWEST, shared * (1 - DISTURBANCE * sends))

    @staticmethod
    def _rate(flight: _Flight, heads: dict[str, _Flight], price: Price | None) -> float:
        if flight.price.kind == "collective":
            return 1.0
        sends = sum(other.price.kind == "collective" for other in heads.values())
        shared = 0.5 if price and price.kind == "memory" else 1.0
        return max(SLOWEST, shared * (1 - DISTURBANCE * sends))

    def _loop(self, line: Instruction, source: str) -> None:
        if line.trips == UNKNOWN and self.unknown is None:
            self.timeline.uncounted[f"turns of loop {line.name}"] += 1
        left, source = line.trips or self.unknown or 1, f"{source}/body"
        while left and any(flight.left > 0 for flight in self.flights.values()):
            self.run(line.body, source)
            left -= 1
        if left:
            start = self.timeline.seconds
            with self._counted(times=left):
                self.run(line.body, source)
            turn = self.timeline.seconds - start
            self.timeline.seconds += turn * (left - 1)
            if left > 1:
                self.timeline.loops.append(Turns(line.name, start + turn, turn, left - 1))

    def _branches(self, line: Instruction, source: str) -> None:
        """Play every branch: the dearest for the share of times that it is taken, and the others for the rest."""
        branches = [name for name in line.calls if name in self.program.computations]
        prices = {name: self._dearness(name) for name in branches}
        dearest = max(branches, key=lambda name: prices[name])
        share = float(self.taken(source))
        for name in branches:
            part = share if name == dearest else (1 - share) / max(1, len(branches) - 1)
            if part:
                with self._counted(share=part):
                    self.run(name, source)

    def _dearness(self, computation: str) -> float:
        """Return the seconds of a computation in which nothing runs beside anything else."""
        seconds = 0.0
        for line in self.program.computations[computation]:
            if line.opcode in ("while", "conditional", "call"):
                seconds += (line.trips or 1) * sum(map(self._dearness, line.calls))
            else:
                seconds += self.price(line, computation).seconds
        return seconds

    @contextmanager
    def _counted(self, times: float = 1, share: float = 1) -> Iterator[None]:
        before = self.times, self.share
        self.times, self.share = self.times * times, self.share * share
        yield
        self.times, self.share = before

    def _record(self, flight: _Flight, start: float | None = None, seconds: float = 0.0) -> None:
        if start is None:
            start = flight.start or 0.0
            seconds = flight.end - start
        what, share = (flight.instruction, flight.price, flight.queue), flight.share
        times = flight.times * share
        self.timeline.spans.append(Span(*what, start, seconds / share, flight.waited / share, times, flight.source))


def _queue(line: Instruction, price: Price) -> str:
    if price.kind != "collective":
        return COPIES if line.opcode.endswith("-start") else COMPUTING
    return NEIGHBOURS if line.opcode.startswith("collective-permute") else COLLECTIVES
