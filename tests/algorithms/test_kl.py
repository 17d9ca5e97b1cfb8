import torch
from torch.testing import assert_close

from siirl_dask.algorithms import k1, k2, k3

LOGPROBS, REFERENCE = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])


def test_hand_checked_values():
    assert_close(k1(LOGPROBS, REFERENCE), torch.tensor([0.5, -1.0]))
    assert_close(k2(LOGPROBS, REFERENCE), torch.tensor([0.125, 0.5]))
    assert_close(k3(LOGPROBS, REFERENCE), torch.tensor([0.106531, 0.718282]))


def test_k1_and_k3_are_unbiased():
    p, q = torch.tensor([0.1, 0.2, 0.7]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    divergence = (p * (p / q).log()).sum()
    for estimate in (k1, k3):
        assert_close((p * estimate(p.log(), q.log())).sum(), divergence)


def test_k3_is_exact_for_policies_that_hardly_differ():
    assert_close(k3(torch.tensor([1e-3]), torch.tensor([0.0])), torch.tensor([5e-7]), rtol=1e-3, atol=0)
