import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from siirl_dask.rollout import Sampling
from siirl_dask.rollout.token_sampling import (
    TokenSampler,
    _lowest,
    _lowest_by_digits,
    _nucleus,
    random_bits,
)
from tests.device_waits import device_without_waits

SEEDS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8)
LARGE = 151_936
"""The vocabulary of Qwen2.5."""
FILTERS = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.7, "min_p": 0.02},
]


def draw(logits, seeds, position=0, **sampling):
    """Tokens and log-probs of a row for each seed; ``logits`` stay as they are."""
    return TokenSampler(Sampling(max_tokens=1, **sampling))(
        logits.clone(), np.array(seeds, dtype=np.uint64), position
    )


def uniform(seeds, position):
    """The first of a token's two random numbers, in [0, 1)."""
    return (random_bits(seeds, position) >> np.uint64(32)).astype(float) * 2.0**-32


def zipf(vocabulary, seed=0):
    """Logits of a vocabulary in which the k-th likeliest token is 1/k as likely as the first, in
    any order. [V].
    """
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed))
    return -torch.log(1.0 + order)


def test_random_numbers_are_pinned():
    # splitmix64 of (seed, position); a change here changes every sample of every run with its seed
    numbers = random_bits(np.array([0, 1, 2**63 - 1], dtype=np.uint64), 0)
    assert (numbers * 2.0**-64).round(6).tolist() == [0.652448, 0.36819, 0.413236]


@given(seeds=SEEDS, position=st.integers(0, 10_000))
def test_a_random_number_depends_on_its_own_seed_and_position_alone(seeds, position):
    together = random_bits(np.array(seeds, dtype=np.uint64), position)
    alone = [random_bits(np.array([seed], dtype=np.uint64), position)[0] for seed in seeds]
    assert together.tolist() == alone


def test_random_numbers_are_uniform_over_seeds_and_over_positions():
    over_seeds = uniform(np.arange(20_000, dtype=np.uint64), 3)
    over_positions = uniform(
        np.full(20_000, 7, dtype=np.uint64), np.arange(20_000, dtype=np.uint64)
    )
    for numbers in (over_seeds, over_positions):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert (
            (counts - 1000) ** 2 / 1000
        ).sum() < 45  # chi-squared of 19 degrees: one in 1,400 is more
    assert abs(np.corrcoef(over_positions[:-1], over_positions[1:])[0, 1]) < 0.03


@settings(max_examples=25, deadline=None)
@given(
    vocabulary=st.sampled_from([1, 2, 3, 97, 1000, 4096, 50_257]),
    rows=st.integers(1, 9),
    scale=st.sampled_from([0.0, 1.0, 20.0]),
    way=st.sampled_from([*FILTERS, {"temperature": 0.0}]),
)
def test_a_token_depends_on_no_row_beside_it_nor_on_its_place(vocabulary, rows, scale, way):
    generator = torch.Generator().manual_seed(vocabulary + rows)
    logits, seeds = (
        scale * torch.randn(rows, vocabulary, generator=generator),
        list(range(5, 5 + rows)),
    )
    tokens, logprobs = draw(logits, seeds, 3, **way)
    for row in range(rows):
        alone = draw(logits[row : row + 1], seeds[row : row + 1], 3, **way)
        assert [each.item() for each in alone] == [tokens[row].item(), logprobs[row].item()]
    turned = draw(logits.flip(0), seeds[::-1], 3, **way)
    assert torch.equal(turned[0].flip(0), tokens)
    assert torch.equal(turned[1].flip(0), logprobs)


@pytest.mark.parametrize("vocabulary", [1000, LARGE])
def test_rows_of_a_padded_vocabulary_and_of_several_chunks_give_the_same(monkeypatch, vocabulary):
    logits, seeds = zipf(vocabulary).expand(5, -1).contiguous(), list(range(5))
    expected = draw(logits, seeds)
    padded = torch.cat([logits, torch.zeros(5, 3)], dim=1)[:, :vocabulary]
    monkeypatch.setattr(
        "siirl_dask.rollout.memory._CHUNK", dict.fromkeys((True, False), 2 * 4 * vocabulary)
    )
    given = TokenSampler(Sampling(max_tokens=1))(padded, np.arange(5, dtype=np.uint64), 0)
    assert all(map(torch.equal, given, expected))


@pytest.mark.parametrize("way", [*FILTERS, {"temperature": 0.0}])
def test_log_probs_are_of_the_tempered_softmax_before_all_filters(way):
    logits = 4 * torch.randn(50, 3000, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = draw(logits, range(50), **way)
    expected = (
        (logits.double() / (way.get("temperature", 1) or 1))
        .log_softmax(-1)
        .gather(1, tokens[:, None])
    )
    torch.testing.assert_close(logprobs, expected.squeeze(1).float(), atol=3e-6, rtol=1e-6)


def assert_kept(logits, mass, count):
    """The lowest logit of the nucleus is that of its ``count``-th token. [V]."""
    below = (logits - logits.max())[None]
    lowest = _nucleus(below, None, below.double().exp().sum(1, keepdim=True).float() * mass)
    assert lowest.item() == below.sort(descending=True).values[0, count - 1].item()


def allowed_probabilities(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities that tokens are drawn with, by the filters of transformers. [V] -> [V]
    float64.
    """
    filters = LogitsProcessorList()
    if top_k:
        filters.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        filters.append(TopPLogitsWarper(top_p))
    if min_p:
        filters.append(MinPLogitsWarper(min_p))
    return filters(None, logits[None].double() / temperature)[0].softmax(-1)


def assert_drawn_with(probabilities, tokens, bins=60):
    """Chi-square test of tokens against probabilities, with the likeliest tokens alone and the
    others in bins.
    """
    order = probabilities.argsort(descending=True)
    mass = probabilities[order].cumsum(0)
    of_place = (mass * bins).clamp(max=bins - 1e-9).long().unique(return_inverse=True)[1]
    of_token = torch.empty_like(of_place).scatter_(0, order, of_place)
    expected = torch.zeros(int(of_place.max()) + 1, dtype=torch.float64).index_add_(
        0, of_token, probabilities
    )
    counts = torch.bincount(of_token[tokens], minlength=len(expected))
    expected = expected * len(tokens)
    assert len(expected) > 2
    assert (probabilities[tokens] > 0).all()
    degrees = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    # about one in 100,000 is more
    assert statistic < degrees + 4.5 * (2 * degrees) ** 0.5, (statistic, degrees)


@pytest.mark.parametrize("way", FILTERS)
def test_tokens_are_drawn_with_the_probabilities_that_transformers_gives_them(way):
    logits = 2 * torch.randn(200, generator=torch.Generator().manual_seed(2))
    tokens, _ = draw(logits.expand(8000, -1), range(8000), **way)
    assert_drawn_with(allowed_probabilities(logits, **way), tokens)


@pytest.mark.parametrize("mass", [0.3, 0.97])
def test_top_p_keeps_what_transformers_keeps_whether_few_tokens_have_that_mass_or_many(mass):
    """On logits of which some rows need more than the first candidates, and some do not."""
    logits = (
        torch.randn(6, 6000, generator=torch.Generator().manual_seed(4))
        * torch.tensor([1.0, 6.0] * 3)[:, None]
    )
    for row in logits:
        probabilities = allowed_probabilities(row, top_p=mass)
        assert_kept(row, mass, int((probabilities > 0).sum()))


@pytest.mark.parametrize(("way", "draws"), [({}, 2000), ({"temperature": 0.9, "top_p": 0.6}, 400)])
def test_tokens_of_a_large_vocabulary_are_drawn_with_their_probabilities(way, draws):
    logits = zipf(LARGE)
    tokens = torch.cat(
        [draw(logits.expand(20, -1), range(at, at + 20), **way)[0] for at in range(0, draws, 20)]
    )
    probabilities = allowed_probabilities(logits, **way)
    assert_drawn_with(probabilities, tokens, bins=draws // 50)
    # Kolmogorov-Smirnov, over the ids of tokens
    places = probabilities.cumsum(0)[tokens].sort().values
    distance = (places - torch.arange(1, draws + 1) / draws).abs().max().item()
    assert distance < 2.3 / draws**0.5 + probabilities.max().item()


@given(data=st.data())
def test_a_token_without_probability_is_never_drawn(data):
    kinds = st.sampled_from([-torch.inf, -60.0, -25.0, 0.0, 1.0])
    logits = torch.tensor([data.draw(st.lists(kinds, min_size=2, max_size=40))])
    if logits.isfinite().any():
        token, logprob = draw(logits, [data.draw(st.integers(0, 2**63 - 1))])
        assert logits[0, token] > -torch.inf
        assert logprob.isfinite()


def test_unlikely_tokens_are_drawn_as_often_as_they_should():
    """One of 4,096 tokens has 99 in 100, and the others alike the rest: 2.4e-6 each."""
    logits = torch.zeros(4096)
    logits[1234] = np.log(99 * 4095)
    tokens = torch.cat(
        [draw(logits.expand(2000, -1), range(at, at + 2000))[0] for at in range(0, 20_000, 2000)]
    )
    others = tokens[tokens != 1234]
    assert 130 < len(others) < 270  # 200 are expected, 14 more or less
    counts = torch.bincount(others // 512, minlength=8)
    assert (
        (counts - len(others) / 8) ** 2 / (len(others) / 8)
    ).sum() < 29  # 7 degrees: one in 7,000 is more


def test_the_chosen_token_is_the_only_highest_of_what_is_left():
    logits = 5 * torch.randn(64, 500, generator=torch.Generator().manual_seed(3))
    tokens, logprobs = TokenSampler(Sampling(max_tokens=1))(
        logits, np.arange(64, dtype=np.uint64), 0
    )
    assert logits.max() == 0
    assert torch.equal(logits.scatter_(1, tokens[:, None], -logprobs[:, None]).argmax(1), tokens)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_the_log_prob_of_a_row_that_is_not_finite_is_not_finite(broken):
    logits = torch.zeros(2, 30)
    logits[1, 7] = broken
    for temperature in (0.0, 1.0):
        _, logprobs = draw(logits, [0, 1], temperature=temperature)
        assert logprobs.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("vocabulary", [1000, 5000, LARGE])
@pytest.mark.parametrize("way", [*FILTERS, {"temperature": 0.0}])
def test_drawing_a_token_does_not_wait_for_the_device(way, vocabulary):
    with device_without_waits() as device:
        logits = torch.empty(3, vocabulary, device=device)
        tokens, logprobs = TokenSampler(Sampling(max_tokens=1, **way))(
            logits, np.arange(3, dtype=np.uint64), 0
        )
    assert tokens.device == logprobs.device == device


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.integers(1, 3000),
    scale=st.sampled_from([0.0, 0.01, 1.0, 6.0, 40.0]),
    mass=st.floats(0.0, 1.0),
    coarse=st.booleans(),
    hidden=st.floats(0.0, 0.9),
    seed=st.integers(0, 1000),
)
def test_the_nucleus_by_digits_is_that_of_sorted_logits_to_the_last_bit(
    vocabulary, scale, mass, coarse, hidden, seed
):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(4, vocabulary, generator=generator)
    if coarse:  # many tokens tie, as logits of a model in bfloat16 do
        logits = logits.bfloat16().float()
    logits[:, 1:].masked_fill_(
        torch.rand(4, vocabulary - 1, generator=generator) < hidden, -torch.inf
    )
    logits -= logits.amax(dim=1, keepdim=True)
    total = logits.exp().sum(dim=1, keepdim=True)
    expected = _lowest(logits.sort(dim=1, descending=True).values, total * mass)
    found = _lowest_by_digits(logits, total * mass)
    assert torch.equal(logits < found, logits < expected)
    assert (
        torch.equal(found.view(torch.int32), expected.abs().neg().view(torch.int32))
        or mass > 0.9999
    )


def test_all_tokens_count_where_together_they_have_less_than_the_mass():
    logits = torch.tensor([[0.0, -1.0, -50.0, -torch.inf]])
    assert not (logits < _lowest_by_digits(logits, torch.tensor([[2.0]]))).any()


@pytest.mark.parametrize(
    "way", [{"top_p": 0.8}, {"temperature": 1.3, "top_p": 0.97, "min_p": 0.001}]
)
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_tokens_and_log_probs_are_the_same_however_the_nucleus_is_found(monkeypatch, way, scale):
    """On logits whose nucleus has more tokens than the candidates, and fewer."""
    logits = scale * torch.randn(16, 6000, generator=torch.Generator().manual_seed(5))
    expected = draw(logits, range(16), **way)

    def by_digits(logits, likeliest, mass):
        return _lowest_by_digits(logits, mass)

    monkeypatch.setattr("siirl_dask.rollout.token_sampling._nucleus", by_digits)
    assert all(map(torch.equal, draw(logits, range(16), **way), expected))
