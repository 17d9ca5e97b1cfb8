"""Draws tokens so that a row's sample depends on its seed and its logits, never on the rows beside
it.

The random numbers of a row's t-th token are a hash of (seed, t): no generator has a state that
other rows could advance. They pick the token by inverting the cumulative distribution twice: over
about sqrt(V) groups of tokens, and over the tokens of one. Everything is float32 or whole numbers,
on the device of the logits, and the same in any batch: floats are added in one order, whatever the
shape, and cumulative sums are of whole numbers, which need none. Engines differ only in where the
logits come from. Nothing here waits for an accelerator: random numbers are copied to it from pinned
memory, and no decision on the host needs what it computes.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from siirl_dask.devices import accelerator
from siirl_dask.rollout.engine import Sampling
from siirl_dask.rollout.memory import sampler_chunk

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNITS = 2.0**40  # whole units of the largest mass; what is smaller than one is never drawn
# bits of a total, of at most 60, that are multiplied by a random number apart from the others
_LOW = 29
_NUMBER = 32  # bits of a random number
_CANDIDATES = 1024  # likeliest tokens among which top_p looks first, and then among all
# bits of a float32 but its sign, by which the nucleus is found without sorting
_DIGITS = (11, 10, 10)
_INFINITE = 0x7F800000  # bits of infinity
_DIGIT_PARTS = 8  # of a chunk's rows: looking for digits takes six times the logits
_SMALL = 4096  # a vocabulary that needs no groups: fewer operations take less than what they save


def as_seed(seed: int) -> int:
    """Return the low 64 bits of any number."""
    return seed & (2**64 - 1)


def random_bits(
    seeds: NDArray[np.uint64], positions: int | NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return 64 random bits for each seed at a token position, the hash (splitmix64) of both. [B]
    -> [B].

    ``positions`` is one number for all seeds, or [B].
    """
    with np.errstate(over="ignore"):
        return _mix(
            _mix(seeds + _GOLDEN)
            + (np.asarray(positions, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
        )


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (https://prng.di.unimi.it/splitmix64.c)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class TokenSampler:
    """Draws one token per row from logits, with the temperature and the filters of a Sampling."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._filters = sampling.filters

    def __call__(
        self,
        logits: Tensor,
        seeds: NDArray[np.uint64],
        positions: int | NDArray[np.uint64],
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and their log-probs under softmax(logits / temperature). [B, V], [B], [B]
        -> [B], [B].

        ``logits``, float32, are written to: they become ``(logits - highest of the row) /
        temperature``.
        """
        bits = random_bits(seeds, positions)
        halves = np.stack([bits >> np.uint64(_NUMBER), bits & np.uint64(2**_NUMBER - 1)]).astype(
            np.int64
        )
        numbers = accelerator.copied_to(logits.device, torch.from_numpy(halves))
        rows = max(1, sampler_chunk(on_cpu=logits.device.type == "cpu") // (4 * logits.shape[-1]))
        parts = zip(logits.split(rows), numbers.split(rows, dim=1), strict=True)
        drawn = [self._draw(part, number) for part, number in parts]
        return torch.cat([token for token, _ in drawn]), torch.cat(
            [logprob for _, logprob in drawn]
        )

    def _draw(self, logits: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Draw from some rows by two random numbers for each. [b, V], [2, b] -> [b], [b]."""
        temperature = self._sampling.temperature
        logits.sub_(logits.amax(dim=1, keepdim=True))
        if temperature not in (0, 1):
            logits.div_(temperature)
        masses = _Masses(logits)
        cumulative = masses.cumulative()
        total = cumulative[:, -1:] / _UNITS
        if temperature == 0:
            tokens = logits.argmax(dim=1, keepdim=True)
        else:
            if self._filters:
                self._filter(masses, logits, total)
                cumulative = masses.cumulative()
            first, second = numbers
            tokens = masses.pick(cumulative, first, second)
        return tokens.squeeze(1), (logits.gather(1, tokens) - total.log()).squeeze(1)

    def _filter(self, masses: _Masses, logits: Tensor, total: Tensor) -> None:
        """Leave no mass to tokens below the top_k, then below the top_p of what is left, then
        below min_p.
        """
        sampling = self._sampling
        likeliest = None
        if 0 < sampling.top_k < logits.shape[1]:
            likeliest = logits.topk(sampling.top_k, dim=1).values
            masses.drop(logits < likeliest[:, -1:])
            total = masses.cumulative()[:, -1:] / _UNITS
        if sampling.top_p < 1:
            masses.drop(logits < _nucleus(logits, likeliest, total * sampling.top_p))
        if sampling.min_p > 0:
            masses.drop(masses.of_tokens < sampling.min_p)


class _Masses:
    """Probabilities of tokens over the likeliest one's, in about sqrt(V) groups of about as many
    tokens.

    Group g has the tokens g, g + width, g + 2 width, and so on; in a small vocabulary each token is
    a group.
    """

    def __init__(self, logits: Tensor) -> None:
        """``logits`` [B, V] are at most 0 in each row, and 0 in one place."""
        rows, vocabulary = logits.shape
        # tokens of a group: a power of two, for _halved
        self._height = 1 if vocabulary <= _SMALL else 1 << (isqrt(vocabulary) - 1).bit_length()
        self._width = -(-vocabulary // self._height)
        every = logits.new_empty(rows, self._height * self._width)
        every[:, vocabulary:] = 0
        self.of_tokens = torch.exp(logits, out=every[:, :vocabulary])
        self._members = every.view(rows, self._height, self._width)

    def drop(self, tokens: Tensor) -> None:
        """Set the masses of some tokens to 0. [B, V] bool."""
        self.of_tokens.masked_fill_(tokens, 0)

    def cumulative(self) -> Tensor:
        """Return the mass of each group and of all before it. [B, width]."""
        return _cumulative(_halved(self._members))

    def pick(self, cumulative: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return a token by two random numbers: its group, then its place there. [B, width],
        [B], [B] -> [B, 1].
        """
        group = _pick(cumulative, first[:, None])
        if self._height == 1:
            return group
        members = self._members.gather(2, group[:, :, None].expand(-1, self._height, 1)).squeeze(2)
        cumulative = _cumulative(members / members.amax(dim=1, keepdim=True))
        return _pick(cumulative, second[:, None]) * self._width + group


def _halved(parts: Tensor) -> Tensor:
    """Add up over the second axis, always in the same order: a half to the other, and so on. [B,
    2^n, w] -> [B, w].
    """
    height = parts.shape[1] // 2
    if not height:
        return parts[:, 0]
    total = parts[:, :height] + parts[:, height:]
    while height > 1:
        height //= 2
        total = total[:, :height].add_(total[:, height:])
    return total[:, 0]


def _cumulative(masses: Tensor) -> Tensor:
    """Return cumulative sums in whole units, which are the same in any order. [B, n] float32 ->
    [B, n] int64.
    """
    return (masses * _UNITS).to(torch.int64).cumsum(dim=1)


def _pick(cumulative: Tensor, number: Tensor) -> Tensor:
    """Return the first place whose cumulative mass exceeds ``number / 2^32`` of all. [B, n], [B, 1]
    -> [B, 1].

    A place without mass is never picked.
    """
    total = cumulative[:, -1:]
    high = total >> _LOW  # total * number has more than 64 bits
    low = total & (2**_LOW - 1)
    target = (high * number + (low * number >> _LOW)) >> (_NUMBER - _LOW)
    place = torch.searchsorted(cumulative, target, right=True)
    # only nan gets there; the engine refuses its log-probability
    return place.clamp(max=cumulative.shape[1] - 1)


def _nucleus(logits: Tensor, likeliest: Tensor | None, mass: Tensor) -> Tensor:
    """Return the lowest logit of the fewest tokens that have ``mass`` together. [B, V], [B, k], [B,
    1] -> [B, 1].

    ``likeliest`` are the logits of the only tokens that count, in falling order; None: all.
    """
    if likeliest is not None:
        return _lowest(likeliest, mass)
    if logits.shape[1] <= _CANDIDATES:
        return _lowest(logits.sort(dim=1, descending=True).values, mass)
    # to ask whether the candidates suffice would wait for the device
    if logits.device.type != "cpu":
        rows = -(-len(logits) // _DIGIT_PARTS)
        parts = zip(logits.split(rows), mass.split(rows), strict=True)
        return torch.cat([_lowest_by_digits(some, masses) for some, masses in parts])
    candidates = logits.topk(_CANDIDATES, dim=1).values  # far quicker than to sort all
    lowest = _lowest(candidates, mass)
    short = (lowest == candidates[:, -1:]).squeeze(1)
    if bool(short.any()):
        lowest[short] = _lowest(logits[short].sort(dim=1, descending=True).values, mass[short])
    return lowest


def _lowest(falling: Tensor, mass: Tensor) -> Tensor:
    """Return the last logit before which there is less than ``mass``. [B, k] in falling order,
    [B, 1] -> [B, 1].
    """
    masses = falling.exp()
    before = _cumulative(masses) - (masses * _UNITS).to(torch.int64)
    kept = (before < (mass * _UNITS).to(torch.int64)).sum(dim=1, keepdim=True)
    return falling.gather(1, (kept - 1).clamp(min=0))


def _lowest_by_digits(logits: Tensor, mass: Tensor) -> Tensor:
    """Return what ``_lowest`` returns for the sorted logits, without sorting. [b, V] at most 0, [b,
    1] -> [b, 1].

    As numbers without a sign, bits of floats have the order of the floats. The bits of the last
    logit before which there is less than ``mass`` are found a digit after the other, by the mass of
    the tokens that have each digit. Sums are of whole units, so they do not depend on the order in
    which a device adds them up.
    """
    keys = logits.view(torch.int32) & 0x7FFFFFFF
    units = (logits.exp() * _UNITS).to(torch.int64)
    target = (mass * _UNITS).to(torch.int64)
    before = torch.zeros_like(target)
    found = torch.zeros_like(target)
    shift = sum(_DIGITS)
    for bits in _DIGITS:
        shift -= bits
        digits = (keys >> shift & (1 << bits) - 1).to(torch.int64)
        of_digit = units.new_zeros(len(logits), 1 << bits).scatter_add_(1, digits, units)
        del digits
        before_digit = before + of_digit.cumsum(dim=1) - of_digit
        digit = ((before_digit < target).sum(dim=1, keepdim=True) - 1).clamp(min=0)
        before = before_digit.gather(1, digit)
        found = (found << bits) + digit
        units.masked_fill_(keys >> shift != found, 0)
    # where all tokens together have less than the mass, the digits are those of no number: all
    # tokens count
    return -found.clamp(max=_INFINITE).to(torch.int32).view(torch.float32)
