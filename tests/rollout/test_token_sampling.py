import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.rollout import Sampling
from siirl_dask.rollout.token_sampling import _invert, uniform
from siirl_dask.rollout.transformers_engine import Sampler

SEEDS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8)


def test_random_numbers_are_pinned():
    # splitmix64 of (seed, position); a change here changes every sample of every run with its seed
    assert uniform(np.array([0, 1, 2**63 - 1], dtype=np.uint64), 0).round(6).tolist() == [0.652448, 0.36819, 0.413236]


@given(seeds=SEEDS, position=st.integers(0, 10_000))
def test_a_random_number_depends_on_its_own_seed_and_position_alone(seeds, position):
    together = uniform(np.array(seeds, dtype=np.uint64), position)
    alone = [uniform(np.array([seed], dtype=np.uint64), position)[0] for seed in seeds]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 1)).all()


def test_random_numbers_are_uniform_over_seeds_and_over_positions():
    over_seeds = uniform(np.arange(20_000, dtype=np.uint64), 3)
    over_positions = np.concatenate([uniform(np.array([7], dtype=np.uint64), position) for position in range(20_000)])
    for numbers in (over_seeds, over_positions):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-squared of 19 degrees: one in 1,400 is more
    assert abs(np.corrcoef(over_positions[:-1], over_positions[1:])[0, 1]) < 0.03


@given(data=st.data())
def test_a_token_without_probability_is_never_drawn(data):
    probabilities = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 1e-12, 0.3, 1.0]), min_size=2, max_size=6)))
    if probabilities.sum() > 0:
        number = torch.tensor([data.draw(st.sampled_from([0.0, 0.5, 1 - 2**-53]))], dtype=torch.float64)
        token = _invert(probabilities.double()[None], number)
        assert probabilities[token] > 0


def test_large_vocabularies_are_sampled_in_chunks(monkeypatch):
    scores, seeds = torch.randn(10, 50), list(range(10))
    whole, parts = (Sampler(seeds, Sampling(max_tokens=1, top_k=7, top_p=0.9)) for _ in range(2))
    expected = whole(torch.zeros(10, 1), scores)
    monkeypatch.setattr("siirl_dask.rollout.token_sampling._CHUNK_BYTES", 3 * 50 * 8)
    assert torch.equal(parts(torch.zeros(10, 1), scores), expected)
    assert torch.equal(parts.result()[1], whole.result()[1])
