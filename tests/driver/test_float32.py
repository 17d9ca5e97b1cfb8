"""A run that computes in float32 on an accelerator is told so as it starts, with what that
costs.
"""

import torch

from siirl_dask.devices import accelerator
from siirl_dask.estimates.speeds import note_on_float32


def test_the_note_has_the_factor_of_the_cards_data_sheet():
    assert note_on_float32("NVIDIA H100 80GB HBM3") == (
        "model.dtype=float32 on NVIDIA H100 80GB HBM3: it multiplies 15 times as fast in bfloat16, "
        "989 TFLOP/s for 67 by NVIDIA H100 data sheet (model.dtype=bfloat16)"
    )
    assert "16 times as fast in bfloat16, 312 TFLOP/s for 20" in note_on_float32(
        "NVIDIA A100-SXM4-80GB"
    )


def test_a_card_of_which_no_figures_are_known_is_named_without_any():
    assert note_on_float32("NVIDIA B300") == (
        "model.dtype=float32 on NVIDIA B300: it multiplies several times as fast in bfloat16 "
        "(model.dtype=bfloat16)"
    )


def test_a_cpu_and_a_card_without_bfloat16_are_not_named(monkeypatch):
    monkeypatch.setattr(accelerator, "name_of", lambda kind, index: f"{kind} {index}")
    assert accelerator.name_if_faster_in_bfloat16(torch.device("cpu")) == ""
    for capability, name in (
        ((7, 5), ""),
        ((8, 0), "cuda 1"),
        ((9, 0), "cuda 1"),
        (None, "cuda 1"),
    ):
        monkeypatch.setattr(accelerator, "compute_capability", lambda device, one=capability: one)
        assert accelerator.name_if_faster_in_bfloat16(torch.device("cuda", 1)) == name
