"""Imports vLLM in a process of its own, while other checks go on, and judges its report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from siirl_dask.config import Engine
from siirl_dask.context import DeviceKind
from siirl_dask.devices import ENGINE_PACKAGES, traits_of
from siirl_dask.driver.doctor.finding import DoctorFinding, fault, note, ok
from siirl_dask.driver.doctor.packages import version

_PART = "vllm"
_PROBE = "siirl_dask.rollout.vllm_engine.probe"
_PATIENCE = 90.0  # seconds; its first import on a machine takes many


@contextmanager
def vllm_probe() -> Iterator[subprocess.Popen[str] | None]:
    """Start the process that imports vLLM, and end it at the end of the block; None where vLLM
    is not installed.
    """
    if find_spec("vllm") is None:
        yield None
        return
    command = [sys.executable, "-m", _PROBE]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def judge_vllm(
    process: subprocess.Popen[str] | None, engine: str, kind: DeviceKind
) -> DoctorFinding:
    """Return a finding on vLLM, for a run with ``engine`` on a machine with devices of ``kind``."""
    extra = traits_of(kind).vllm_cure
    if process is None and engine == Engine.vllm:
        text = "it is not installed, and rollout.engine is vllm"
        return fault(_PART, text, f"{extra}, or rollout.engine=transformers")
    if process is None:
        return note(
            _PART,
            "it is not installed: rollout.engine=auto takes transformers, which is slower",
            extra,
        )
    versions = {name: version(name) for name in ENGINE_PACKAGES}
    installed = ", ".join(f"{name} {found}" for name, found in versions.items() if found)
    try:
        out, err = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        text = f"{installed or 'vllm'} could not be imported in {_PATIENCE:g} s"
        return note(_PART, text, f"the machine may be busy; see where it waits: python -m {_PROBE}")
    if process.returncode:
        lines = err.strip().splitlines()
        last = lines[-1] if lines else f"exit status {process.returncode}"
        cure = f"install it anew: {extra} (docs/engines.md), or rollout.engine=transformers"
        return fault(_PART, f"{installed or 'vllm'} cannot be imported: {last}", cure)
    found = json.loads(out.splitlines()[-1])
    text = f"{installed or found['version']}, for {found['device'] or 'no device'}"
    if found["device"] != str(kind):
        text += f", and torch computes on {kind} here: vLLM cannot run"
        return fault(
            _PART, text, f"pip uninstall {installed.split(' ')[0] or 'vllm'}, then {extra}"
        )
    return ok(_PART, text)
