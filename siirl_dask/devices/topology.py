"""Reads how a host's cards are linked and which CPUs are near them, and orders the cards by their
links.

A card's PCI address and NUMA node come from the driver and sysfs, links from the maker's program,
and where that is not there, from the bridges that two cards share in sysfs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path

from siirl_dask.devices.cpus import SYSFS, numa_nodes
from siirl_dask.devices.kinds import Traits
from siirl_dask.devices.link_matrix import (
    SELF,
    LinkMatrix,
    ask,
    plain_address,
    read_addresses,
    read_matrix,
    speed_of,
)

Ask = Callable[[Sequence[str]], str]
"""Runs a program and returns what it prints. OSError where it is not there or fails."""
_MOST_CARDS = 64  # whose links are looked at: a host has 16, or 56 parts of 8
_BRIDGE = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class CardPlace:
    """A card as its driver names it."""

    address: str = ""
    """PCI address, as in ``0000:3b:00.0``; empty where the driver does not tell it."""
    number: int | None = None
    """Number on the host; None where the driver does not tell it."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The links, NUMA nodes and CPUs of cards, in the order in which they were asked for."""

    links: tuple[tuple[str, ...], ...] = ()
    """Kind of link of each card to each, such as ``NV18``, ``HCCS``, ``PIX`` or ``SYS``; empty
    where not known."""
    nodes: tuple[int | None, ...] = ()
    """NUMA node of each card; None where not known."""
    near: tuple[frozenset[int], ...] = ()
    """CPUs near each card; empty where not known."""
    order: tuple[int, ...] = ()
    """All cards, those with fast links next to each other."""
    faults: tuple[str, ...] = field(default=(), compare=False)
    """Sentences on what could not be read, and why."""


def read_topology(
    places: Sequence[CardPlace],
    traits: Traits,
    root: Path = SYSFS,
    ask: Ask = ask,
) -> Topology:
    """Return the topology of cards of one kind on this host."""
    count = len(places)
    faults: list[str] = []
    matrix = LinkMatrix()
    numbers = list[int | None]([None] * count)
    if _may_be_linked(places, traits):
        matrix, faults = _matrix(traits, ask)
        if matrix.numbers:
            numbers = _numbers(places, traits, matrix, ask)
    by_node = numa_nodes(root)
    nodes = [_node_of(place, by_node, root) for place in places]
    near = []
    for index, number in enumerate(numbers):
        nearby = frozenset[int]() if number is None else matrix.near.get(number, frozenset())
        if nodes[index] is None and nearby:
            nodes[index] = next((node for node, cpus in by_node.items() if nearby <= cpus), None)
        node = nodes[index]
        if not nearby and node is not None:
            nearby = by_node.get(node, frozenset())
        near.append(nearby)
    paths = [_bridges(place, root) for place in places]

    def link(one: int, two: int) -> str:
        in_matrix = _link(matrix, numbers[one], numbers[two])
        if in_matrix:
            return in_matrix
        return _link_in_sysfs(paths[one], paths[two], nodes[one], nodes[two], same=one == two)

    links = tuple(tuple(link(one, two) for two in range(count)) for one in range(count))
    names = [_name(place, index) for index, place in enumerate(places)]
    return Topology(links, tuple(nodes), tuple(near), order_by_links(links, names), tuple(faults))


def order_by_links(
    links: Sequence[Sequence[str]], names: Sequence[tuple[str, int]]
) -> tuple[int, ...]:
    """Return all cards such that neighbours have the fastest links: cards of a quad, then the other
    quad's.

    Groups that are linked fastest, each card with each, are joined first, the smallest of them; of
    two that are joined the larger one comes first, so that groups of ranks begin in the largest.
    Equal ones go by ``names``, so that the order is the same in every start, however the cards are
    numbered there.
    """
    order = sorted(range(len(names)), key=lambda card: (names[card], card))
    if len(order) > _MOST_CARDS:
        return tuple(order)
    groups: list[tuple[int, ...]] = [(card,) for card in order]
    while len(groups) > 1:
        first, second = max(combinations(range(len(groups)), 2), key=partial(_rank, groups, links))
        joined = sorted((groups[first], groups[second]), key=len, reverse=True)
        groups[first] = (*joined[0], *joined[1])
        del groups[second]
    if groups:
        return groups[0]
    return ()


def slowest_link(links: Sequence[Sequence[str]], cards: Sequence[int]) -> str:
    """Return the slowest link within a group of cards; empty where one is not known, and for a
    single card.
    """
    return min((links[one][two] for one, two in combinations(cards, 2)), key=speed_of, default="")


def blocks_of(topology: Topology) -> list[tuple[int, ...]]:
    """Return groups of cards, each linked to each by the fastest kind that the host has; others
    are alone.
    """
    speeds = (speed_of(topology.links[one][two]) for one, two in combinations(topology.order, 2))
    fastest = max(speeds, default=-1)
    blocks: list[tuple[int, ...]] = []
    for card in topology.order:
        if blocks and speed_of(slowest_link(topology.links, (*blocks[-1], card))) == fastest:
            blocks[-1] = (*blocks[-1], card)
        else:
            blocks.append((card,))
    return blocks


def _rank(
    groups: Sequence[tuple[int, ...]], links: Sequence[Sequence[str]], pair: tuple[int, int]
) -> tuple[int, ...]:
    """Return a key by which the pair of groups to join next is the largest."""
    first, second = (groups[at] for at in pair)
    speed = min(speed_of(links[one][two]) for one in first for two in second)
    return (speed, -len(first) - len(second), -pair[0], -pair[1])


def _name(place: CardPlace, index: int) -> tuple[str, int]:
    return (place.address, index if place.number is None else place.number)


def _may_be_linked(places: Sequence[CardPlace], traits: Traits) -> bool:
    if not traits.links or len(places) > _MOST_CARDS:
        return False
    if len(places) != 1:
        return True
    return not places[0].address  # a single card has no links, and sysfs knows its node


def _matrix(traits: Traits, ask: Ask) -> tuple[LinkMatrix, list[str]]:
    """Return what the maker's program tells, and what is wrong with it; an absent program is
    nothing wrong.
    """
    try:
        return read_matrix(ask(traits.links)), []
    except FileNotFoundError:
        return LinkMatrix(), []
    except (OSError, ValueError) as error:
        return LinkMatrix(), [f"`{' '.join(traits.links)}` is left out: {error}"]


def _numbers(
    places: Sequence[CardPlace],
    traits: Traits,
    matrix: LinkMatrix,
    ask: Ask,
) -> list[int | None]:
    """Return the number of each card in the matrix; None for one that is not found in it.

    Cards without an address or a number of their own are those of the matrix in its order, where
    there are as many.
    """
    known: dict[str, int] = {}
    if traits.addresses and all(place.address for place in places):
        try:
            known = read_addresses(ask(traits.addresses))
        except (OSError, ValueError):
            known = {}
    numbers = [place.number for place in places]
    if known:
        numbers = [known.get(plain_address(place.address)) for place in places]
    if known or set(numbers) <= set(matrix.numbers):
        return [number if number in matrix.numbers else None for number in numbers]
    if len(matrix.numbers) == len(places):
        return list(matrix.numbers)
    return [None] * len(places)


def _node_of(place: CardPlace, by_node: Mapping[int, frozenset[int]], root: Path) -> int | None:
    if not place.address:
        return None
    try:
        node = int((root / "bus/pci/devices" / place.address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    only = None
    if len(by_node) == 1:
        only = next(iter(by_node))
    return node if node >= 0 else only  # the kernel writes -1 where the firmware tells none


def _bridges(place: CardPlace, root: Path) -> tuple[str, ...]:
    """Return the way from the host bridge to a card: the bridge, such as ``pci0000:3a``, PCI
    bridges, the card.
    """
    if not place.address:
        return ()
    try:
        parts = (root / "bus/pci/devices" / place.address).resolve(strict=True).parts
    except OSError:
        return ()
    start = next(
        (
            at
            for at, part in enumerate(parts)
            if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)
        ),
        None,
    )
    if start is None:
        return ()
    return (parts[start], *(part for part in parts[start + 1 :] if _BRIDGE.fullmatch(part)))


def _link(matrix: LinkMatrix, one: int | None, two: int | None) -> str:
    if one is None or two is None:
        return ""
    return matrix.links.get((one, two), "")


def _link_in_sysfs(
    one: Sequence[str],
    two: Sequence[str],
    node: int | None,
    other: int | None,
    *,
    same: bool = False,
) -> str:
    """Return the link of two cards over PCIe by the bridges on their ways; empty where that is
    not known.
    """
    if same or (one and one == two):
        return SELF
    if not one or not two:
        return ""
    shared = next(
        (at for at, (here, there) in enumerate(zip(one, two, strict=False)) if here != there), 0
    )
    if shared == 0:  # other host bridges
        if node is not None and node == other:
            return "NODE"
        return "SYS"
    if shared == 1:
        return "PHB"
    if max(len(one), len(two)) - shared <= 2:
        return "PIX"
    return "PXB"
