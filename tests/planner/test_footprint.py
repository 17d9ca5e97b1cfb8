"""Roles on one accelerator: what they need together, what an engine may take, and what makes
them fit.
"""

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from siirl_dask.planner.explain.device_memory import (
    advice,
    card_as_data,
    describe_card,
    refusal,
    summary,
)
from siirl_dask.planner.footprint import (
    EXCHANGE,
    MOST_SHARE,
    Footprint,
    Remedy,
    fill,
    moments,
    peak,
    remedies,
)

GB = 10**9
SIZES = st.integers(0, 40 * GB)
TRAINERS = st.builds(
    lambda held, working: Footprint(held={"weights": held}, working={"activations": working}),
    SIZES,
    SIZES,
)
ENGINES = st.builds(
    lambda weights, sampler, sleeps: Footprint(
        held={"weights": weights, "cache": GB, "graphs": GB // 2},
        working={"sampler": sampler},
        leaves=("weights", "cache") if sleeps else (),
        fills="cache",
        least=GB,
    ),
    SIZES,
    st.integers(0, GB),
    st.booleans(),
)
WORKERS = st.lists(
    st.builds(
        lambda trainer, engine: {
            **({"policy": trainer} if trainer else {}),
            **({"rollout": engine} if engine else {}),
        },
        st.none() | TRAINERS,
        st.none() | ENGINES,
    ),
    min_size=1,
    max_size=3,
).map(lambda found: {str(at): roles for at, roles in enumerate(found)})
CARDS = st.integers(16 * GB, 200 * GB)


@given(WORKERS, CARDS)
def test_what_is_filled_fits_whenever_anything_does(workers, memory):
    card = fill(memory, workers)
    least = sum(map(peak, workers.values()))
    assert card.fits == (least <= card.usable)
    assert card.needed == least if not card.fits else least <= card.needed <= card.usable
    engines = [one for roles in card.workers.values() for one in roles.values() if one.fills]
    grown = [one for one in engines if one.held["cache"] > GB]
    assert sum(sum(one.held.values()) for one in grown) <= MOST_SHARE * memory + len(grown)


@given(WORKERS, CARDS, st.integers(0, 100 * GB))
def test_a_larger_accelerator_never_leaves_an_engine_less(workers, memory, more):
    small, large = fill(memory, workers), fill(memory + more, workers)
    for worker, roles in small.workers.items():
        for role, one in roles.items():
            assert large.workers[worker][role].held.get("cache", 0) >= one.held.get("cache", 0)
    assert not small.fits or large.fits


@given(TRAINERS, ENGINES, CARDS)
def test_an_engine_that_sleeps_leaves_more_and_gets_more(trainer, engine, memory):
    awake, asleep = (
        fill(memory, {"0": {"policy": trainer, "rollout": replace(engine, leaves=leaves)}})
        for leaves in ((), ("weights", "cache"))
    )
    assert not awake.fits or asleep.fits
    assert not awake.fits or (
        asleep.workers["0"]["rollout"].held["cache"] >= awake.workers["0"]["rollout"].held["cache"]
    )


@given(TRAINERS, ENGINES, CARDS, st.integers(0, 20 * GB))
def test_a_trainer_that_holds_more_leaves_the_engine_less(trainer, engine, memory, more):
    held = replace(trainer, held={"weights": trainer.held["weights"] + more})
    light, heavy = (
        fill(memory, {"0": {"policy": one, "rollout": engine}})
        .workers["0"]["rollout"]
        .held["cache"]
        for one in (trainer, held)
    )
    assert heavy <= light


def test_while_one_role_computes_the_others_keep_what_they_hold():
    policy = Footprint(held={"weights": 10}, working={"activations": 5})
    engine = Footprint(
        held={"weights": 3, "cache": 4, "graphs": 1},
        working={"sampler": 2},
        leaves=("weights", "cache"),
    )
    assert moments({"policy": policy, "rollout": engine}) == {"policy": 16, "rollout": 20}
    assert peak({}) == 0


PARKS = Footprint(
    held={"weights": 10, "gradients": 10, "state": 20},
    working={"activations": 5},
    moves=("weights",),
    parks={"weights": 10, "gradients": 0, "state": 20},
)


def test_weights_move_while_both_ends_hold_theirs_and_nothing_else():
    engine = Footprint(
        held={"weights": 60, "cache": 9, "graphs": 1},
        leaves=("weights", "cache"),
        moves=("weights",),
        working={"a": 2},
    )
    parked = PARKS.parked()
    assert moments({"policy": PARKS, "rollout": engine}) == {"policy": 46, "rollout": 112}
    assert moments({"policy": parked, "rollout": engine}) == {
        "policy": 46,
        "rollout": 72,
        EXCHANGE: 71,
    }
    assert parked.host == {"parked weights": 10, "parked state": 20}
    assert parked.parked() == parked
    large = Footprint(held={"weights": 30}, leaves=("weights",), moves=("weights",))
    assert f"while {EXCHANGE} (largest: rollout's weights" in refusal(
        "w", 60, {"0": {"p": large, "rollout": engine}}
    )


def test_parking_goes_together_with_whatever_else_helps():
    """The engine is at the peak at first, then the policy, and the engine again: parking is
    proposed in the end too.
    """
    cut = replace(PARKS, working={})
    offload = Remedy("offload=true", Footprint(), instead_of="park=true")
    park = Remedy("park=true", PARKS.parked(), parks=True)
    policy = replace(PARKS, remedies=(park, Remedy("tokens=8", cut), park, offload))
    workers = {
        "0": {"policy": policy, "rollout": Footprint(held={"weights": 30}, leaves=("weights",))}
    }
    unit = GB // 2
    scaled = {"0": {name: larger(one, unit) for name, one in workers["0"].items()}}
    found = {
        bytes_: [setting for setting, _ in remedies(bytes_, scaled)]
        for bytes_ in (23 * GB, 10 * GB)
    }
    assert found[23 * GB] == ["park=true", "tokens=8"]
    assert found[10 * GB] == ["offload=true"], "what is offloaded is in the host's memory already"


def larger(one, unit):
    """The same with a ``unit`` for each byte, also in its remedies."""

    def times(parts):
        return {part: size * unit for part, size in parts.items()}

    changed = tuple(
        replace(remedy, footprint=larger(remedy.footprint, unit)) for remedy in one.remedies
    )
    return replace(
        one,
        held=times(one.held),
        working=times(one.working),
        parks=times(one.parks),
        host=times(one.host),
        remedies=changed,
    )


def test_two_workers_on_one_accelerator_share_what_is_left_evenly():
    engine = Footprint(held={"weights": 2 * GB, "cache": GB}, fills="cache", least=GB)
    card = fill(24 * GB, {"0": {"rollout": engine}, "1": {"rollout": engine}})
    one, other = (card.workers[worker]["rollout"].held["cache"] for worker in "01")
    assert one == other
    assert 2 * one + 4 * GB <= card.usable <= 24 * GB - 2 * GB


def test_a_share_that_the_user_gives_is_taken_as_it_is():
    engine = Footprint(held={"weights": 2 * GB, "cache": GB}, fills="cache", least=GB, share=0.5)
    assert (
        sum(fill(24 * GB, {"0": {"rollout": engine}}).workers["0"]["rollout"].held.values())
        == 12 * GB
    )
    both = fill(24 * GB, {"0": {"rollout": engine}, "1": {"rollout": engine}})
    assert sum(both.workers["1"]["rollout"].held.values()) == 6 * GB
    assert not fill(
        24 * GB, {"0": {"rollout": engine, "policy": Footprint(held={"weights": 12 * GB})}}
    ).fits


BASE = Footprint(held={"weights": 10 * GB}, working={"activations": 80 * GB})
LADDER = replace(
    BASE,
    remedies=(
        Remedy("checkpointing=true", replace(BASE, working={"activations": 20 * GB})),
        Remedy("nothing=true", replace(BASE, working={"activations": 20 * GB})),
        Remedy("tokens=8", replace(BASE, working={"activations": 10 * GB})),
        Remedy("tokens=4", replace(BASE, working={"activations": 5 * GB})),
        Remedy("offload=true", Footprint(working={"activations": 5 * GB})),
    ),
)


def test_remedies_come_in_their_order_until_everything_fits():
    found = list(remedies(24 * GB, {"0": {"policy": LADDER}}))
    assert [setting for setting, _ in found] == ["checkpointing=true", "tokens=8"]
    assert [card.fits for _, card in found] == [False, True]
    assert advice(24 * GB, {"0": {"policy": LADDER}}).splitlines()[1:] == [
        "  checkpointing=true (30.0 GB)",
        "  tokens=8 (20.0 GB)",
    ]
    assert "tokens=4" in advice(17 * GB, {"0": {"policy": LADDER}})
    assert "tokens=8" not in advice(17 * GB, {"0": {"policy": LADDER}}), (
        "of a number that falls, the last"
    )


def test_a_setting_of_several_roles_changes_all_of_them():
    workers = {"0": {"policy": LADDER, "critic": LADDER}}
    (_, card), *_ = remedies(100 * GB, workers)
    assert [one.working["activations"] for one in card.workers["0"].values()] == [20 * GB, 20 * GB]


def test_settings_of_a_role_that_are_not_needed_in_the_end_are_left_out():
    engine = Footprint(
        held={"weights": 15 * GB, "cache": GB},
        working={"sampler": 4 * GB},
        leaves=("weights", "cache"),
        fills="cache",
        least=GB,
        remedies=(
            Remedy(
                "max_rows=64",
                Footprint(held={"weights": 15 * GB, "cache": GB}, leaves=("weights", "cache")),
            ),
        ),
    )
    policy = Footprint(
        held={"weights": 30 * GB},
        remedies=(Remedy("offload=true", Footprint(working={"activations": 9 * GB})),),
    )
    found = list(remedies(24 * GB, {"0": {"rollout": engine, "policy": policy}}))
    assert [setting for setting, _ in found] == ["offload=true"]
    assert found[0][1].fits


def test_what_nothing_helps_is_said_to_be_so():
    large = {"0": {"policy": Footprint(held={"weights": 99 * GB})}}
    assert "No setting lowers it: take more workers" in advice(24 * GB, large)
    small = replace(LADDER, held={"weights": 99 * GB}, remedies=LADDER.remedies[:1])
    assert "does not suffice" in advice(24 * GB, {"0": {"policy": small}})
    assert "workers 0 need 99.0 GB of an accelerator with 24.0 GB" in refusal(
        "workers 0", 24 * GB, large
    )
    assert refusal("workers 0", 141 * GB, large) is None


@given(WORKERS, CARDS)
def test_every_combination_can_be_shown(workers, memory):
    assume(any(workers.values()))
    text = describe_card("Workers 0", memory, workers)
    data = card_as_data(memory, workers)
    assert ("It fits" in text) == data["fits"]
    assert data["needed"] == fill(memory, workers).needed
    first = next(roles for roles in workers.values() if roles)
    assert "141 GB" in summary({"0": (", ".join(first), first)})
