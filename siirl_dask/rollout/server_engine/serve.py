"""Starts a server of vLLM for ``rollout.engine=server``: vLLM's own, with what the engine needs.

    python -m siirl_dask.rollout.server_engine.serve MODEL --port 8000

Everything after the model is for vLLM's server, whose options here are defaults. It listens on
127.0.0.1 unless ``--host`` says another address; whoever reaches it can replace its weights.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from siirl_dask.models.broken_imports import hide
from siirl_dask.rollout.server_engine.vllm_server import EXTENSION, SAMPLER

hide()  # here: as they start, processes of vLLM import this module, which none called __main__ is
DEFAULTS = {
    "--host": "127.0.0.1",
    "--logits-processors": SAMPLER,
    "--logprobs-mode": "processed_logits",
    "--worker-extension-cls": EXTENSION,
    "--generation-config": "vllm",
    "--load-format": "hf",  # not those of Mistral's library, where a folder has both
    "--config-format": "hf",
}
SWITCHES = ("--enable-scale-out", "--skip-tokenizer-init", "--disable-uvicorn-access-log")
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # its API for new weights
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one does not take this kind of processor
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def arguments(model: str, given: list[str]) -> list[str]:
    """Return the words for vLLM's server: what is needed, and what was given instead or besides."""
    names = {word.partition("=")[0] for word in given}
    words = ["--model", model]
    for name, value in DEFAULTS.items():
        if name not in names:
            words += [name, value]
    words += [name for name in SWITCHES if name not in names]
    return [*words, *given]


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(
            "usage: python -m siirl_dask.rollout.server_engine.serve MODEL [OPTIONS OF VLLM'S SERVER]"
        )
    if find_spec("vllm") is None:
        sys.exit(
            "vLLM is not installed in this Python; install the extra gpu or cpu, as in pip install "
            "'siirl_dask[gpu]'"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from siirl_dask.rollout.vllm_engine import process

    process.prepare()
    # a server's engine is a process of its own
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    sys.argv = [sys.argv[0], *arguments(sys.argv[1], sys.argv[2:])]
    serve()


if __name__ == "__main__":
    main()
