"""Samples of two calls that generated the same requests in batches of other sizes."""

import pytest

ROUNDING = 1e-5
"""Log-probs of one row in float32 differ by less, whatever other rows its batch has."""


def assert_same_samples(found, expected, *, to_the_bit=()):
    """Hold samples to those expected: the same tokens and ends, log-probs but for rounding, and all
    to the bit of the rows with the numbers ``to_the_bit``.
    """
    assert len(found) == len(expected)
    for row, (sample, wanted) in enumerate(zip(found, expected, strict=True)):
        if row in to_the_bit:
            assert sample == wanted, f"row {row}"
            continue
        assert sample.token_ids == wanted.token_ids, f"row {row}"
        assert sample.finish_reason == wanted.finish_reason, f"row {row}"
        assert sample.logprobs == pytest.approx(wanted.logprobs, abs=ROUNDING), f"row {row}"
