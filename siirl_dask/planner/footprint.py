"""The memory of a role's object on an accelerator, part by part, and what roles on one accelerator
come to together.

At any time each worker computes with one of its roles, while the others keep what they hold, or
what is left of it where they can sleep. Between two of these moments new weights move from one role
that sleeps to another. So a worker needs the most of these moments, and workers that share an
accelerator need their sum. One role may take what all this leaves: an engine, for its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

PROCESS = 10**9
"""Bytes of an accelerator that each process takes for itself: its context, kernels, and buffers
of collectives."""
SPARE = 0.03
"""Share of an accelerator that is kept free: allocators round up, and leave gaps."""
MOST_SHARE = 0.9
"""Largest share of an accelerator for a role that takes what is left; also an engine's own
default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of a role's object on one of its workers, where that computes on an accelerator."""

    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes by part on the device, from when it is built."""
    working: Mapping[str, int] = field(default_factory=dict)
    """Bytes by part on the device, besides these, at the peak of what it computes."""
    leaves: tuple[str, ...] = ()
    """Held parts that are not on the device while the worker computes with its other roles."""
    moves: tuple[str, ...] = ()
    """Parts that are there in any case while weights move from this role to another of the
    worker, or the reverse."""
    parks: Mapping[str, int] = field(default_factory=dict)
    """Held parts that leave if the role parks, with the bytes that each then takes of the host's
    memory."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Bytes by part in the host's memory."""
    spared: Mapping[str, int] = field(default_factory=dict)
    """Bytes by part in the host's memory while it sleeps; where new weights follow each time, and
    so nothing need be kept, only until all roles are built."""
    loading: int = 0
    """Bytes in the host's memory while it is built, and not later."""
    fills: str | None = None
    """Held part that takes what memory is left; ``held`` begins with the least of it."""
    least: int = 0
    """Least bytes of that part, for one row of the greatest length."""
    share: float | None = None
    """Share of the accelerator that the held parts of a role that fills take in any case; None:
    what is left."""
    share_key: str = ""
    """Config key of that share; empty where there is none."""
    remedies: tuple[Remedy, ...] = ()
    """Settings that need less memory, the mildest first."""

    @property
    def resting(self) -> int:
        """Bytes on the device while other roles of the worker compute."""
        return sum(size for part, size in self.held.items() if part not in self.leaves)

    @property
    def busy(self) -> int:
        """Bytes on the device while it computes."""
        return sum(self.held.values()) + sum(self.working.values())

    @property
    def moving(self) -> int:
        """Bytes on the device while weights move between roles of the worker."""
        return sum(
            size
            for part, size in self.held.items()
            if part not in self.leaves or part in self.moves
        )

    def parked(self) -> Footprint:
        """Return the same where it parks while other roles compute."""
        copies = {f"parked {part}": size for part, size in self.parks.items() if size}
        leaves = tuple(dict.fromkeys((*self.leaves, *self.parks)))
        return replace(self, leaves=leaves, host={**self.host, **copies})

    def without(self, part: str) -> Footprint:
        """Return the same, with its remedies, where another role holds a part for both."""
        held = {name: size for name, size in self.held.items() if name != part}
        host = {name: size for name, size in self.host.items() if name != part}
        remedies = []
        for remedy in self.remedies:
            remedies.append(replace(remedy, footprint=remedy.footprint.without(part)))
        return replace(self, held=held, host=host, loading=0, remedies=tuple(remedies))

    def staying(self) -> Footprint:
        """Return the same where it cannot park."""
        remedies = tuple(remedy for remedy in self.remedies if not remedy.parks)
        return replace(self, parks={}, remedies=remedies)

    def grown(self, size: int) -> Footprint:
        """Return the same with ``size`` more bytes of the part that fills."""
        if self.fills is None or size <= 0:
            return self
        return replace(self, held={**self.held, self.fills: self.held[self.fills] + size})


@dataclass(frozen=True, slots=True)
class Remedy:
    """A setting that needs less memory."""

    setting: str
    """As it is written on a command line, ``trainer.gradient_checkpointing=true``."""
    footprint: Footprint
    """The role's memory with it, and with all remedies before it."""
    instead_of: str = ""
    """Setting of a remedy before it that it replaces, with those after that one: both do not go
    together."""
    parks: bool = False
    """Whether the role parks, whatever else is changed before or after."""


Roles = Mapping[str, Footprint]
"""The roles of one worker, by name."""
EXCHANGE = "weights move"
"""Name of the moment in which no role computes, and one that would sleep gives its weights to
another."""


def moments(roles: Roles) -> dict[str, int]:
    """Return the bytes that a worker has on its device while it computes with each of its roles,
    and while weights move from one role to another: if the weights of both leave the device at all
    other times, no other moment has both.
    """
    found = {}
    for name, own in roles.items():
        others = [other for role, other in roles.items() if role != name]
        found[name] = own.busy + sum(other.resting for other in others)
    coming_and_going = [one for one in roles.values() if not set(one.moves).isdisjoint(one.leaves)]
    if len(coming_and_going) > 1:
        found[EXCHANGE] = sum(one.moving for one in roles.values())
    return found


def peak(roles: Roles) -> int:
    """Return the most bytes that a worker's roles have on its device at one time."""
    return max(moments(roles).values(), default=0)


@dataclass(frozen=True, slots=True)
class Card:
    """An accelerator, and the roles of the workers that compute on it, where one that fills has
    taken what is left.
    """

    memory: int
    """Bytes of the accelerator."""
    workers: Mapping[str, Roles]

    @property
    def usable(self) -> int:
        """Bytes for the roles of all workers on it."""
        return int(self.memory * (1 - SPARE)) - PROCESS * len(self.workers)

    @property
    def needed(self) -> int:
        """Bytes that the roles of all workers take at most at one time."""
        return sum(map(peak, self.workers.values()))

    @property
    def fits(self) -> bool:
        """Whether everything fits."""
        return self.needed <= self.usable

    def filling(self, worker: str) -> Footprint | None:
        """Return the worker's role that takes what is left, if it has one."""
        return next((one for one in self.workers[worker].values() if one.fills is not None), None)


def fill(memory: int, workers: Mapping[str, Roles]) -> Card:
    """Return an accelerator of ``memory`` bytes on which the roles that fill have taken what the
    others leave.

    They take equal parts, and no more than ``MOST_SHARE`` of it together; where they have a share
    of their own, that. Nothing is left where the roles do not fit: see ``Card.fits``.
    """
    count = len(workers)
    workers = {worker: _with_shares(roles, memory, count) for worker, roles in workers.items()}
    card = Card(memory, workers)
    filling = []
    for worker, roles in workers.items():
        if any(_grows(one) for one in roles.values()):
            filling.append(worker)
    left = card.usable - card.needed
    if left < 0 or not filling:
        return card
    share = left // len(filling)
    most = int(MOST_SHARE * memory) // len(filling)
    grown = dict(workers)
    for worker in filling:
        grown[worker] = _grow(workers[worker], peak(workers[worker]) + share, most)
    return Card(memory, grown)


def _grows(one: Footprint) -> bool:
    if one.fills is None:
        return False
    return one.share is None


def _with_shares(roles: Roles, memory: int, sharers: int) -> Roles:
    """Let roles with a share of their own have it, divided by the workers on the accelerator."""
    grown = {}
    for name, one in roles.items():
        share = 0
        if one.share is not None:
            share = int(one.share * memory / sharers)
        grown[name] = one.grown(share - sum(one.held.values()))
    return grown


def _grow(roles: Roles, budget: int, most: int) -> Roles:
    """Let a worker's filling role grow until one of the moments that have it takes ``budget``,
    or itself ``most``.
    """
    grown = dict(roles)
    for name, one in roles.items():
        if _grows(one):
            bounds = [most - sum(one.held.values())]
            for role, nbytes in moments(grown).items():
                if role == name or one.fills not in one.leaves:
                    bounds.append(budget - nbytes)
            grown[name] = one.grown(min(bounds))
    return grown


def remedies(memory: int, workers: Mapping[str, Roles]) -> Iterator[tuple[str, Card]]:
    """Yield settings, each with the accelerator as it is with it and all before it, until
    everything fits.

    Those of the role that computes at the peak come first. A setting that lowers nothing is passed
    over, and so are those of a role without which everything comes to fit.
    """
    chosen = _ladder(memory, workers)
    if fill(memory, _with(workers, chosen)).fits:
        for settings in tuple(chosen):
            fewer = [others for others in chosen if others is not settings]
            if fill(memory, _with(workers, fewer)).fits:
                chosen = fewer
    for settings in chosen:
        for setting in settings:
            workers = _changed(workers, setting)
            yield setting, fill(memory, workers)


def _ladder(memory: int, workers: Mapping[str, Roles]) -> list[list[str]]:
    """Return the settings that lower the peak, until everything fits, one list for each role."""
    largest = max(workers.values(), key=peak, default={})
    needed = fill(memory, workers).needed
    ladder: list[list[str]] = []
    own = {name: size for name, size in moments(largest).items() if name in largest}
    for role in sorted(own, key=lambda name: -own[name]):
        settings: list[str] = []
        ladder.append(settings)
        for remedy in largest[role].remedies:
            changed = _changed(workers, remedy.setting)
            card = fill(memory, changed)
            if card.fits or card.needed < needed:
                workers = changed
                needed = card.needed
                # what came after it made room for a role that is elsewhere now
                if remedy.instead_of in settings:
                    del settings[settings.index(remedy.instead_of) :]
                settings.append(remedy.setting)
            if card.fits:
                return ladder
    return ladder


def _with(workers: Mapping[str, Roles], chosen: Sequence[Sequence[str]]) -> Mapping[str, Roles]:
    for settings in chosen:
        for setting in settings:
            workers = _changed(workers, setting)
    return workers


def _changed(workers: Mapping[str, Roles], setting: str) -> Mapping[str, Roles]:
    """Return the workers with a setting, which may be one of several of their roles."""
    changed = {}
    for worker, roles in workers.items():
        changed[worker] = {name: _remedied(one, setting) for name, one in roles.items()}
    return changed


def _remedied(one: Footprint, setting: str) -> Footprint:
    remedy = next((remedy for remedy in one.remedies if remedy.setting == setting), None)
    if remedy is None:
        return one
    if remedy.parks:
        return one.parked()
    footprint = remedy.footprint
    if one.parks and one.parks.keys() <= {*one.leaves}:
        footprint = footprint.parked()
    return replace(footprint, remedies=one.remedies)
