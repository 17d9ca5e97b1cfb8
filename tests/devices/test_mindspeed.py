"""MindSpeed's adapter, on MindSpeed and NPUs that are stood in for (``tests/fake_mindspeed``,
``tests/fake_npu``).
"""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from siirl_dask.commands.plan import describe_run
from siirl_dask.config import Backend, TrainerConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.config.megatron import MEGATRON_OPERATORS
from siirl_dask.context import Device
from siirl_dask.devices.operators import OPERATORS, choose_operators
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.training import layouts
from siirl_dask.training.megatron import mindspeed, spec
from tests.fake_mindspeed import mindspeed_checks
from tests.fake_mindspeed.mindspeed_checks import ALL, OF_MODEL
from tests.settings import digits_overrides

ROOT = Path(__file__).resolve().parents[2]
NORMS = {"rms_norm": "mindspeed"}
CASES = (
    {"rotary": "torch_npu"},  # megatron-core's layers take none
    {"rms_norm": "liger"},
    {"swiglu": "mindspeed"},  # and norms by torch, which MindSpeed would replace
    {"swiglu": "mindspeed", "rms_norm": "torch"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip(
        "megatron.core", reason="needs megatron-core: pip install 'siirl_dask[megatron]'"
    )
    folder = tiny_model(tmp_path_factory.mktemp("model") / "model", seed=1)
    torch.save(mindspeed_checks.learned(folder, Device("w0"), {}), folder.with_name("expected.pt"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        pytest.param("npu_without_mindspeed", marks=pytest.mark.sweep),
        "npu_with_everything",
        pytest.param("npu_with_norms_alone", marks=pytest.mark.sweep),
    ],
)
def test_in_a_process_of_its_own(check, folder):
    paths = [ROOT / "tests" / "fake_mindspeed", ROOT / "tests" / "fake_npu", ROOT, ROOT / "storage"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "FAKE_NPU_COUNT": "1",
    }
    command = [
        sys.executable,
        str(ROOT / "tests" / "fake_mindspeed" / "mindspeed_checks.py"),
        check,
        str(folder),
    ]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def operators(given=ALL):
    return choose_operators(given, "npu", liger=False, libraries=MEGATRON_OPERATORS)


class Recorded(SimpleNamespace):
    """Modules of MindSpeed that record what they are asked, in a process that has neither
    megatron-core nor an NPU.
    """

    def __init__(self, monkeypatch):
        super().__init__(calls=[], arguments=[])
        self._monkeypatch = monkeypatch
        self.features = ["use_flash_attn"]
        self.flags = [
            "use_fused_rotary_pos_emb",
            "use_fused_rmsnorm",
            "use_fused_swiglu",
            "sparse_mode",
        ]
        for name in [
            each for each in sys.modules if each.partition(".")[0] in ("mindspeed", "megatron")
        ]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(mindspeed, "check_installed", lambda: None)
        monkeypatch.setattr(mindspeed.importlib, "import_module", self.imported)

    def imported(self, name):
        """Import a module of MindSpeed's as Python does: it is among those of the process from
        then on.
        """
        if name == "mindspeed.megatron_adaptor":
            self.arguments.append(list(sys.argv))
            made = ModuleType(name)
            made.repatch = self.calls.append
        else:
            assert name == "mindspeed.features_manager.features_manager"
            made = ModuleType(name)
            features = [SimpleNamespace(feature_name=each) for each in self.features]
            made.MindSpeedFeaturesManager = SimpleNamespace(
                FEATURES_LIST=features,
                register_features_args=lambda parser: [
                    parser.add_argument(f"--{each}") for each in self.flags
                ],
            )
        self._monkeypatch.setitem(sys.modules, name, made)
        return made


@pytest.fixture
def recorded(monkeypatch):
    return Recorded(monkeypatch)


def test_it_is_patched_once_for_roles_that_agree_and_sees_no_arguments(recorded, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["siirl-dask", "run", "mine.yaml"])
    for _ in range(3):
        mindspeed.patch(operators(), "npu")
    assert recorded.arguments == [["siirl-dask"]]
    assert sys.argv == ["siirl-dask", "run", "mine.yaml"]
    flags = {"use_fused_rotary_pos_emb": True, "use_fused_rmsnorm": True, "use_fused_swiglu": True}
    assert recorded.calls == [OF_MODEL | flags | {"use_flash_attn": True, "sparse_mode": 2}]


def test_every_operator_that_is_mindspeeds_has_an_option():
    assert {*mindspeed.OPTIONS} == {
        name for name, libraries in OPERATORS.items() if "mindspeed" in libraries
    }
    assert mindspeed.options_of(operators({})) is None
    one = mindspeed.options_of(operators(NORMS))
    assert {name: value for name, value in one.items() if name not in OF_MODEL} == {
        "use_fused_rotary_pos_emb": False, "use_fused_rmsnorm": True, "use_fused_swiglu": False,
        "use_flash_attn": False, "sparse_mode": 0,
    }  # fmt: skip


def test_roles_that_disagree_are_refused(recorded):
    mindspeed.patch(operators(NORMS), "npu")
    for given, said in {
        tuple(ALL): (
            r"with \{'use_fused_rotary_pos_emb': True, .*another role with "
            r"\{'use_fused_rotary_pos_emb': False"
        ),
        (): "another role of this process has it, and it patches the whole process",
    }.items():
        with pytest.raises(ConfigError, match=said):
            mindspeed.patch(operators(dict.fromkeys(given, "mindspeed")), "npu")
    assert len(recorded.calls) == 1


def test_another_device_and_a_late_import_are_refused(recorded, monkeypatch):
    for kind in ("cpu", "cuda"):
        with pytest.raises(
            ConfigError, match=f"mindspeed runs on npu alone, and the role has {kind}: leave it out"
        ):
            mindspeed.patch(operators(), kind)
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(
        ConfigError, match="must be imported before megatron-core, which this process has imported"
    ):
        mindspeed.patch(operators(), "npu")
    assert not recorded.arguments


def test_a_mindspeed_that_fails_or_lacks_something_is_refused(recorded, monkeypatch):
    recorded.flags.remove("use_fused_swiglu")
    recorded.features.clear()
    with pytest.raises(
        ConfigError, match=r"has no option use_flash_attn, use_fused_swiglu; .*core_r0\.16\.0"
    ):
        mindspeed.patch(operators(), "npu")
    assert not recorded.calls
    mindspeed.patch(operators(NORMS), "npu")
    assert len(recorded.calls) == 1, "the options that are asked for are all there"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ImportError("libascendcl.so: cannot open"),
            "ImportError: libascendcl.so: cannot open; source CANN's set_env",
        ),
        (
            AttributeError("no repatch"),
            r"AttributeError: no repatch; mend MindSpeed: install its source, branch",
        ),
    ],
)
def test_what_fails_inside_of_it_is_said_in_one_line(recorded, monkeypatch, error, said):
    def fails(name):
        raise error

    monkeypatch.setattr(mindspeed.importlib, "import_module", fails)
    with pytest.raises(ConfigError, match=f"mindspeed cannot patch megatron-core: {said}"):
        mindspeed.patch(operators(), "npu")


@pytest.mark.parametrize("given", CASES)
def test_libraries_that_megatron_cores_layers_do_not_take_are_refused(given):
    with pytest.raises(ConfigError, match=r"trainer\.operators"):
        TrainerConfig(backend=Backend.megatron, operators=given)


def test_mindspeed_is_for_megatron_and_megatron_has_a_table_of_its_own():
    with pytest.raises(
        ConfigError, match=r"operators\.rms_norm=mindspeed: .*take trainer\.backend=megatron"
    ):
        TrainerConfig(operators=NORMS)
    assert operators({}) == {
        "rotary": "torch", "rms_norm": "torch", "swiglu": "torch", "attention": "torch_npu", "adamw": "torch_npu",
    }  # fmt: skip
    for given in (
        {name: library} for name, libraries in MEGATRON_OPERATORS.items() for library in libraries
    ):
        TrainerConfig(
            backend=Backend.megatron,
            operators=NORMS | given if "torch" not in given.values() else given,
        )


@pytest.fixture
def places(tmp_path):
    """Make packages that are found and not imported."""

    def make(version):
        core = tmp_path / "megatron" / "core"
        core.mkdir(parents=True, exist_ok=True)
        (core / "package_info.py").write_text(f"__version__ = {version!r}")
        return lambda name: (
            SimpleNamespace(origin=str(core / "__init__.py")) if name in found else None
        )

    found = ["mindspeed", "torch_npu", "megatron.core"]
    make.found = found
    return make


def test_what_is_not_installed_or_does_not_go_together_is_said(places, monkeypatch):
    monkeypatch.setattr(mindspeed, "find_spec", places("0.16.1"))
    mindspeed.check_installed()
    monkeypatch.setattr(mindspeed, "find_spec", places("0.12.1"))
    with pytest.raises(
        ConfigError, match=r"goes with megatron-core 0\.16, and 0\.12\.1 is installed"
    ):
        mindspeed.check_installed()
    for name, said in {
        "megatron.core": "needs megatron-core",
        "torch_npu": r"needs torch_npu and CANN, and torch_npu is not installed: pip install 'siirl_dask\[npu\]'",
        "mindspeed": r"mindspeed is not installed; install its source, branch core_r0\.16\.0",
    }.items():
        places.found.remove(name)
        with pytest.raises(ConfigError, match=said):
            mindspeed.check_installed()


def planned(digits_task, tmp_path, *options):
    together = ["cluster.device_memory=64GB", "cluster.workers=2"]
    together.append(
        "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [0, 1], critic: [0, 1]}"
    )
    backends = [f"{group}.backend=megatron" for group in ("trainer", "critic")]
    given = [*digits_overrides(digits_task, tmp_path / "run"), *together, *backends, *options]
    file = load_config_file(shipped("quickstart_ppo.yaml"), given)
    return describe_run(file.config, *dags(file))


def test_a_plan_refuses_roles_of_one_worker_that_disagree(digits_task, tmp_path, monkeypatch):
    for module in (layouts, spec):
        monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setattr(spec, "check_installed", lambda: None)
    norms = [f"{group}.operators={{rms_norm: mindspeed}}" for group in ("trainer", "critic")]
    apart = "cluster.placement={rollout: [0], reward: [0], policy: [0], critic: [1]}"
    for options in (norms, [norms[0], apart]):
        assert "== memory ==" in planned(digits_task, tmp_path, *options)
    said = (
        "'policy' and 'critic' are both on worker .* with MindSpeed's rms_norm and megatron-core "
        "as it is"
    )
    with pytest.raises(PlanError, match=said):
        planned(digits_task, tmp_path, norms[0])
