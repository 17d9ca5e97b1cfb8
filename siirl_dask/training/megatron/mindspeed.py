"""The door to MindSpeed, which replaces functions of megatron-core and of torch by those of an
NPU's libraries.

Its adaptor is imported before megatron-core, and patches the whole process as it is imported;
``repatch`` patches it again, once, with the options of the run. ``trainer.operators`` says which:
docs/devices.md#mindspeed. Names are those of its public source since it has a features manager,
which was read; no NPU has run this.
"""

from __future__ import annotations

import importlib
import logging
import runpy
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from siirl_dask.devices import DeviceKind, traits_of
from siirl_dask.devices.operators import LIBRARIES, MINDSPEED
from siirl_dask.devices.plugin import remedy
from siirl_dask.errors import ConfigError

logger = logging.getLogger("siirl_dask.training")
OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "rotary": {"use_fused_rotary_pos_emb": True},
        "rms_norm": {"use_fused_rmsnorm": True},
        "swiglu": {"use_fused_swiglu": True},
        "attention": {"use_flash_attn": True, "sparse_mode": 2},  # causal, by the compressed mask
    }
)
"""MindSpeed's own options by the operator of ``trainer.operators`` that they switch on."""
_OF_MODEL: Mapping[str, Any] = MappingProxyType(
    {
        "transformer_impl": "local",
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
    }
)
"""Options of Megatron-LM's scripts that MindSpeed looks at, as they are in every model that the
backend builds."""
_ADAPTOR = "mindspeed.megatron_adaptor"
_MANAGER = "mindspeed.features_manager.features_manager"
_CORE = "megatron.core"
_GOES_WITH = "0.16"  # megatron-core of MindSpeed's branch core_r0.16.0
_REMEMBERED = "siirl_dask_options"
"""Attribute of MindSpeed's adaptor: the options that it was called with, since they hold for the
process as it does."""


def options_of(operators: Mapping[str, str]) -> dict[str, Any] | None:
    """Return MindSpeed's options for libraries by operator; None where no operator is by
    MindSpeed.
    """
    if MINDSPEED not in operators.values():
        return None
    chosen = dict(_OF_MODEL)
    for operator, options in OPTIONS.items():
        is_on = operators[operator] == MINDSPEED
        chosen |= {name: value if is_on else type(value)() for name, value in options.items()}
    return chosen


def check_installed() -> None:
    """Check, importing neither, that MindSpeed, torch's plug-in and a megatron-core that goes with
    it are there.

    ConfigError if not.
    """
    library = LIBRARIES[MINDSPEED]
    plugin = traits_of(DeviceKind.NPU).plugin
    assert plugin is not None
    if find_spec(library.packages[0]) is None:
        raise ConfigError(
            f"trainer.operators: {MINDSPEED} is not installed; {library.cure}, or leave it out"
        )
    if find_spec(plugin) is None:
        raise ConfigError(
            f"trainer.operators: {MINDSPEED} needs {plugin} and CANN, and {plugin} is not "
            "installed: pip install 'siirl_dask[npu]', or leave it out"
        )
    core = find_spec(_CORE)
    if core is None or core.origin is None:
        raise ConfigError(
            "trainer.backend=megatron needs megatron-core: pip install 'siirl_dask[megatron]'"
        )
    version = str(
        runpy.run_path(str(Path(core.origin).with_name("package_info.py")))["__version__"]
    )
    if not version.startswith(f"{_GOES_WITH}."):
        raise ConfigError(
            f"trainer.operators: {MINDSPEED} (branch core_r0.16.0) goes with megatron-core "
            f"{_GOES_WITH}, and {version} is installed: pip install 'siirl_dask[megatron]'"
        )


def patch(operators: Mapping[str, str], kind: str) -> None:
    """Let MindSpeed patch this process for ``operators``, on a device of ``kind``; where another
    role has had it do so with the same options, do nothing.

    ConfigError where it is not there, does not import, lacks an option, or comes too late, and
    where another role of the process has other options.
    """
    wanted = options_of(operators)
    adaptor = sys.modules.get(_ADAPTOR)
    given = None
    if adaptor is not None:
        given = vars(adaptor).get(_REMEMBERED)
    if given == wanted:
        return
    if given is not None:
        raise ConfigError(_disagreement(given, wanted))
    assert wanted is not None
    if kind != LIBRARIES[MINDSPEED].kind:
        raise ConfigError(
            f"trainer.operators: {MINDSPEED} runs on {LIBRARIES[MINDSPEED].kind} alone, and the "
            f"role has {kind}: leave it out"
        )
    if adaptor is None and _CORE in sys.modules:
        raise ConfigError(
            f"trainer.operators: {MINDSPEED} must be imported before megatron-core, which this "
            "process has imported already: give its other roles of trainer.backend=megatron the "
            "same trainer.operators or other workers (cluster.placement), and start workers anew "
            "that have run without it"
        )
    check_installed()
    _repatch(wanted)
    logger.info(
        "MindSpeed patches this process: %s",
        ", ".join(f"{name}={value}" for name, value in wanted.items()),
    )


def _repatch(wanted: Mapping[str, Any]) -> None:
    with _bare_arguments():
        try:
            adaptor: Any = importlib.import_module(_ADAPTOR)
            known = _options_there()
            lacking = sorted(
                {name for options in OPTIONS.values() for name in options if wanted[name]} - known
            )
            if not lacking:
                adaptor.repatch(dict(wanted))
        except Exception as error:
            # MindSpeed's own: a missing library, a patch that does not fit megatron-core
            first = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"trainer.operators: {MINDSPEED} cannot patch megatron-core: "
                f"{type(error).__name__}: {first}; "
                f"{remedy('MindSpeed: ' + LIBRARIES[MINDSPEED].cure, error)}, or leave it out"
            ) from error
    if lacking:
        raise ConfigError(
            f"trainer.operators: this MindSpeed has no option {', '.join(lacking)}; "
            f"{LIBRARIES[MINDSPEED].cure}"
        )
    setattr(adaptor, _REMEMBERED, dict(wanted))


def _options_there() -> set[str]:
    """Return the options of this MindSpeed: arguments of its features, and their names, which are
    arguments of Megatron-LM's.
    """
    manager: Any = importlib.import_module(_MANAGER).MindSpeedFeaturesManager
    parser = ArgumentParser()
    manager.register_features_args(parser)
    return {action.dest for action in parser._actions} | {
        feature.feature_name for feature in manager.FEATURES_LIST
    }


def _disagreement(given: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> str:
    if wanted is None:
        return (
            f"trainer.backend=megatron without {MINDSPEED} in trainer.operators: another role of "
            "this process has it, and it patches the whole process; give both roles the same "
            "trainer.operators, or workers of their own (cluster.placement)"
        )
    differing = {name: value for name, value in wanted.items() if given[name] != value}
    return (
        f"trainer.operators: {MINDSPEED} would patch this process with {differing}, and has "
        f"patched it for another role with { ({name: given[name] for name in differing}) }: give "
        "both roles the same trainer.operators, or workers of their own (cluster.placement)"
    )


@contextmanager
def _bare_arguments() -> Iterator[None]:
    """Hide the process's arguments inside the block: MindSpeed reads its options from them, and
    they are not its.
    """
    own = sys.argv
    sys.argv = own[:1]
    try:
        yield
    finally:
        sys.argv = own
