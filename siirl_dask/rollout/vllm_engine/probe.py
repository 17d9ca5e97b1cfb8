"""Prints as JSON which vLLM this Python has, and what it would run on.

    python -m siirl_dask.rollout.vllm_engine.probe

It imports vLLM as an engine does. That takes seconds, and may end a process: hence one of its own.
"""

from __future__ import annotations

import json

from siirl_dask.models.broken_imports import hide


def main() -> None:
    """Import vLLM and print its version and device."""
    hide()
    from siirl_dask.rollout.vllm_engine import process

    process.prepare()
    import vllm
    from vllm import LLM
    from vllm.platforms import current_platform

    print(
        json.dumps(
            {
                "version": vllm.__version__,
                "device": str(current_platform.device_type),
                "has": LLM.__name__,
            }
        )
    )


if __name__ == "__main__":
    main()
