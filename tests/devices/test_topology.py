"""Cards are ordered by their links, and CPUs near them are found, on hosts that are made up."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.devices import DeviceKind, traits_of
from siirl_dask.devices.link_matrix import ask, read_addresses, read_matrix, speed_of
from siirl_dask.devices.topology import (
    CardPlace,
    blocks_of,
    order_by_links,
    read_topology,
    slowest_link,
)
from tests.devices.hosts import add_card, install, links, make_nodes, npu, nvidia, quads

CUDA, NPU = traits_of(DeviceKind.CUDA), traits_of(DeviceKind.NPU)
NUMBERS = [CardPlace("", number) for number in range(8)]


def answering(answers):
    """Ask programs that print ``answers``, by command; there are no others."""

    def answer(command):
        if command not in answers:
            raise FileNotFoundError(command[0])
        return answers[command]

    return answer


def listed(addresses):
    """Print addresses as nvidia-smi does: with eight digits of the domain, in capitals."""
    return "".join(f"{number}, 0000{address.upper()}\n" for number, address in enumerate(addresses))


def dgx(root):
    """Eight GPUs, all on NVLink, four to a NUMA node of 16 cores with two threads each."""
    make_nodes(root, [*range(16), *range(32, 48)], [*range(16, 32), *range(48, 64)], threads=2)
    return [
        add_card(root, f"pci0000:{bus}0/0000:{bus}0:01.0/0000:{bus}1:00.0", node=index // 4)
        for index, bus in enumerate(range(1, 9))
    ]


def test_eight_gpus_on_nvlink_keep_their_order_and_have_the_cpus_of_their_nodes(tmp_path):
    addresses = dgx(tmp_path)
    told = {
        CUDA.links: nvidia(links(8, lambda one, two: "NV18")),
        CUDA.addresses: listed(addresses),
    }
    found = read_topology(
        [CardPlace(address) for address in addresses], CUDA, tmp_path, answering(told)
    )
    assert found.order == tuple(range(8))
    assert {link for row in found.links for link in row} == {"NV18", "X"}
    assert found.nodes == (0,) * 4 + (1,) * 4
    assert found.near[0] == {*range(16), *range(32, 48)}
    assert found.near[7] == {*range(16, 32), *range(48, 64)}
    assert blocks_of(found) == [tuple(range(8))]
    assert not found.faults


def test_visible_gpus_are_found_by_address_however_torch_numbers_them(tmp_path):
    addresses = dgx(tmp_path)
    told = {CUDA.links: nvidia(links(8, quads)), CUDA.addresses: listed(addresses)}
    visible = [addresses[number] for number in (7, 2, 5, 0)]
    found = read_topology(
        [CardPlace(address) for address in visible], CUDA, tmp_path, answering(told)
    )
    assert [visible[card] for card in found.order] == [addresses[number] for number in (0, 2, 5, 7)]
    assert blocks_of(found) == [(3, 1), (2, 0)]


def test_two_quads_that_are_numbered_in_turn_come_one_after_the_other(tmp_path):
    make_nodes(tmp_path, range(24), range(24, 48))
    near = ["0-23", "24-47"] * 4
    for name in ("NPU", "Phy-ID"):
        told = {NPU.links: npu(links(8, quads), near, name)}
        found = read_topology(NUMBERS, NPU, tmp_path, answering(told))
        assert found.order == (0, 2, 4, 6, 1, 3, 5, 7)
        assert found.nodes == (0, 1) * 4
        assert found.near[2] == set(range(24))
        assert not found.faults


def test_npus_of_a_container_are_those_of_the_matrix_in_its_order(tmp_path):
    make_nodes(tmp_path, range(8))
    text = npu(links(2, lambda one, two: "SIO"), ["0-3", "4-7"], "Phy-ID").replace(
        "Phy-ID1", "Phy-ID13"
    )
    found = read_topology(
        NUMBERS[:2], NPU, tmp_path, answering({NPU.links: text.replace("Phy-ID0", "Phy-ID12")})
    )
    assert found.links[0] == ("X", "SIO")
    assert found.near == (frozenset(range(4)), frozenset(range(4, 8)))
    assert found.nodes == (0, 0), "the node that has the CPUs that the program names"
    other = read_topology(NUMBERS[:3], NPU, tmp_path, answering({NPU.links: text}))
    assert other.links[0] == ("X", "", ""), "three cards are not two of another program's"


def test_pairs_on_pcie_are_found_in_sysfs_without_any_program(tmp_path):
    make_nodes(tmp_path, range(8), range(8, 16))
    ways = [
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0", 0),
        ("pci0000:80/0000:80:01.0/0000:81:00.0", 1),
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0", 0),
        ("pci0000:80/0000:80:02.0/0000:82:00.0", 1),
        ("pci0000:90/0000:90:01.0/0000:91:00.0", 1),
        (
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:05:00.0/0000:06:00.0/0000:07:00.0",
            0,
        ),
    ]
    places = [CardPlace(add_card(tmp_path, *way)) for way in ways]
    found = read_topology(places, CUDA, tmp_path, answering({}))
    assert found.links[0] == ("X", "SYS", "PIX", "SYS", "SYS", "PXB")
    assert found.links[1] == ("SYS", "X", "SYS", "PHB", "NODE", "SYS")
    assert found.order == (0, 2, 5, 1, 3, 4)
    assert blocks_of(found) == [(0, 2), (5,), (1,), (3,), (4,)]
    assert not found.faults, "an absent program is nothing wrong"


def test_a_host_of_one_node_has_all_its_cpus_near_and_one_without_nodes_none(tmp_path):
    make_nodes(tmp_path / "one", range(8))
    address = add_card(tmp_path / "one", "pci0000:00/0000:00:05.0")
    (tmp_path / "none").mkdir()
    assert add_card(tmp_path / "none", "pci0000:00/0000:00:05.0") == address
    one, none = (
        read_topology([CardPlace(address)], CUDA, tmp_path / name, answering({}))
        for name in ("one", "none")
    )
    assert (one.nodes, one.near, one.order) == ((0,), (frozenset(range(8)),), (0,))
    assert (none.nodes, none.near, none.order) == ((None,), (frozenset(),), (0,))


def test_a_node_that_is_not_told_on_a_host_of_two_is_not_guessed(tmp_path):
    make_nodes(tmp_path, range(8), range(8, 16))
    found = read_topology(
        [CardPlace(add_card(tmp_path, "pci0000:00/0000:00:05.0"))], CUDA, tmp_path, answering({})
    )
    assert (found.nodes, found.near) == ((None,), (frozenset(),))


def test_parts_of_one_card_are_next_to_each_other(tmp_path):
    make_nodes(tmp_path, range(8))
    cards = [add_card(tmp_path, f"pci0000:0{bus}/0000:0{bus}:00.0", 0) for bus in (1, 2)]
    found = read_topology(
        [CardPlace(cards[part % 2]) for part in range(6)], CUDA, tmp_path, answering({})
    )
    assert found.order == (0, 2, 4, 1, 3, 5)
    assert found.links[0][2] == "X"


WRONG = {
    "nothing": "",
    "no driver": "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.",
    "a legend": "Legend:\n  X = Self\n",
    "a row too few": nvidia(links(3, quads)).replace("\nGPU2\t", "\nGPX2\t"),
    "a short row": "GPU0 GPU1\nGPU0 X NV1\nGPU1 NV1\n",
    "an unknown link": npu(links(2, lambda one, two: "WARP"), None),
    "itself elsewhere": npu(links(2, lambda one, two: "X"), None),
    "one way only": "NPU0 NPU1\nNPU0 X HCCS\nNPU1 SYS X\n",
    "CPUs that are none": npu(links(2, quads), ["0-3", "all"]),
    "CPUs without end": npu(links(2, quads), ["0-3", "0-999999"]),
    "a thousand cards": " ".join(f"GPU{index}" for index in range(1000)) + "\nGPU0 X\n",
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_what_is_no_matrix_is_told_and_left_out(text, tmp_path):
    make_nodes(tmp_path, range(8))
    with pytest.raises(ValueError, match=r"card|cells|columns|link|CPUs"):
        read_matrix(text)
    found = read_topology(NUMBERS[:3], NPU, tmp_path, answering({NPU.links: text}))
    assert len(found.faults) == 1
    assert found.faults[0].startswith("`npu-smi info -t topo` is left out: ")
    assert found.order == (0, 1, 2)


@given(st.text(max_size=300) | st.text("GPUNX01 \n\tSYV-,", max_size=300))
def test_no_text_does_more_than_be_refused(text):
    for read in (read_matrix, read_addresses):
        with suppress(ValueError):
            assert read(text) is not None


@given(st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_each_clique_of_fast_links_is_one_block_of_the_order_however_cards_are_numbered(
    cliques, size, random
):
    cards = list(range(cliques * size))
    random.shuffle(cards)
    clique = {card: place // size for place, card in enumerate(cards)}
    matrix = links(len(cards), lambda one, two: "NV4" if clique[one] == clique[two] else "PHB")
    names = [(f"0000:{card:02x}:00.0", card) for card in range(len(cards))]
    order = order_by_links(matrix, names)
    assert sorted(order) == sorted(cards)
    for first in range(0, len(cards), size):
        assert len({clique[card] for card in order[first : first + size]}) == 1
    other = list(range(len(cards)))
    random.shuffle(other)
    shown = order_by_links(
        [[matrix[one][two] for two in other] for one in other], [names[card] for card in other]
    )
    if size > 1 or cliques == 1:
        assert [other[card] for card in shown] == list(order), (
            "the same cards, however torch numbers them"
        )


@given(st.integers(0, 9), st.data())
def test_any_links_give_an_order_of_all_cards(count, data):
    kinds = st.sampled_from(["SYS", "NODE", "PHB", "PIX", "NV1", "NV12", "HCCS", ""])
    drawn = {
        pair: data.draw(kinds)
        for pair in [(one, two) for two in range(count) for one in range(two)]
    }
    matrix = links(count, lambda one, two: drawn[min(one, two), max(one, two)])
    order = order_by_links(matrix, [("", card) for card in range(count)])
    assert sorted(order) == list(range(count))
    if count > 1:
        fastest = max(map(speed_of, drawn.values()))
        pairs = pairwise(order)
        assert any(speed_of(matrix[one][two]) == fastest for one, two in pairs)


def test_the_larger_group_comes_first_so_that_groups_of_ranks_fit():
    clique = [0, 0, 0, 1, 1, 1, 1]
    matrix = links(7, lambda one, two: "HCCS" if clique[one] == clique[two] else "SYS")
    order = order_by_links(matrix, [("", card) for card in range(7)])
    assert {*order[:4]} == {3, 4, 5, 6}
    assert slowest_link(matrix, order[:4]) == "HCCS"
    assert slowest_link(matrix, order) == "SYS"
    assert slowest_link(matrix, order[:1]) == ""


def test_links_have_the_order_of_their_speed():
    names = ["?", "SYS", "NODE", "PHB", "PXB", "PIX", "HCCS_SW", "HCCS", "SIO", "NV1", "NV18", "X"]
    assert sorted(names, key=speed_of) == names


def test_programs_are_bounded_in_time_and_size(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, text in {
        "says": "echo $1",
        "fails": "exit 3",
        "endless": "exec yes",
        "late": "exec sleep 60",
    }.items():
        install(tmp_path, name, text)
    assert ask(["says", "this"]) == "this\n"
    began = time.monotonic()
    for name, message in {
        "fails": "code 3",
        "endless": "more than 262144 bytes",
        "late": "in time",
        "none": "no none",
    }.items():
        with pytest.raises(OSError, match=message):
            ask([name], 0.3)
    assert time.monotonic() - began < 10


def test_a_program_that_fails_is_told(tmp_path, monkeypatch):
    install(tmp_path, "nvidia-smi", "echo no driver; exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = read_topology([CardPlace("", None)] * 2, CUDA, tmp_path)
    assert found.faults == ("`nvidia-smi topo -m` is left out: it ended with code 9",)
    assert found.order == (0, 1)
