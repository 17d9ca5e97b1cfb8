"""A backend outside of the package, the example of docs/training.md: it conforms, trains, and is
checked by name.
"""

import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest

from siirl_dask.cli import main
from siirl_dask.config import ImagesConfig, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.config.file import shipped
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.planner import Role
from siirl_dask.planner.role_contract import specs_of
from siirl_dask.planner.spec.names import receive_specs
from siirl_dask.testing.trainers import TrainerTests
from siirl_dask.training import (
    RoleRequest,
    Trainer,
    build_trainer,
    check_trainer,
    trainer_spec,
)
from siirl_dask.worker.roles.lazy_role import built_when_used
from tests.settings import digits_overrides

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
SOURCE = next(
    block
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    if "SPEC = TrainerSpec(" in block
)
OWN = "trainer.backend=my_trainer:SPEC"
EAGER = "trainer.backend_options={attention: eager}"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A working directory with the user's module, which is on the path of this process alone."""
    (tmp_path / "my_trainer.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_trainer"):
            del sys.modules[name]


class TestOwnTrainer(TrainerTests):
    families = ("qwen3", "llama")

    @classmethod
    def make_trainer(
        cls, folder: Path, config: TrainerConfig, temperature: float, rank: Rank
    ) -> Trainer:
        file = folder / f"my_trainer_{os.getpid()}.py"
        file.write_text(SOURCE)
        model = ModelConfig(path=str(folder))
        request = RoleRequest(
            device=Device("w0"), rank=rank, model=model, trainer=config, temperature=temperature
        )
        return trainer_spec(f"{file}:SPEC").build_policy(request)


def test_a_run_on_workers_elsewhere_learns_what_torch_does(train, written):
    run = train("own", OWN, EAGER, "run.steps=2")
    torch = train("torch", "run.steps=2")
    losses, expected = (
        [record["metrics"]["policy/loss"] for record in each.records()] for each in (run, torch)
    )
    assert losses == pytest.approx(expected, abs=1e-4)
    assert run.summary.status == "complete"


def planned(capsys, digits_task, folder, *options, config="quickstart.yaml"):
    """Return the exit code of ``plan``, what it shows, and what it says of an error."""
    given = [*digits_overrides(digits_task, folder / "run"), *options]
    try:
        main(["plan", str(shipped(config)), *given])
    except SystemExit as ended:
        return ended.code, "", capsys.readouterr().err
    return 0, capsys.readouterr().out, ""


def test_a_plan_estimates_its_memory(capsys, digits_task, written):
    code, shown, said = planned(
        capsys, digits_task, written, OWN, EAGER, "cluster.device_memory=80GB"
    )
    assert (code, said) == (0, "")
    assert "optimizer state" in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            [OWN, "trainer.backend_options={attentoin: eager}"],
            "backend_options.attentoin='eager': expected attention",
        ),
        (
            [OWN, "trainer.backend_options={attention: flash}"],
            "backend_options.attention='flash': expected attention",
        ),
        (
            [OWN, "trainer.compile=true"],
            "trainer.compile=True with trainer.backend=my_trainer:SPEC: plain transformers",
        ),
        (
            [OWN, "trainer.lora.rank=4"],
            "trainer.lora.rank=4 with trainer.backend=my_trainer:SPEC: plain tra",
        ),
        (
            [OWN, "trainer.fsdp.offload=true"],
            "the backend my_trainer:SPEC does not have it; take trainer.backend=fsdp",
        ),
        (
            [OWN, "trainer.operators={rms_norm: mindspeed}"],
            "MindSpeed replaces functions of megatron-core",
        ),
        (
            [OWN, "trainer.operators={rms_norm: liger}"],
            "trainer.backend=my_trainer:SPEC: expected one of torch",
        ),
        (
            ["trainer.backend=fdsp"],
            "trainer.backend='fdsp': expected one of ['torch', 'fsdp', 'megatron'], or module",
        ),
        (["trainer.backend=fdsp"], "did you mean 'fsdp'?"),
        (
            ["trainer.backend=my_trainr:SPEC"],
            "trainer.backend: 'my_trainr:SPEC': there is no module 'my_trainr'",
        ),
        (["trainer.backend=my_trainer.py:SPCE"], "has no TrainerSpec 'SPCE'; did you mean 'SPEC'?"),
        (
            ["trainer.backend=my_trainer:check"],
            "'my_trainer:check': module 'my_trainer' has no TrainerSpec 'check'",
        ),
        (
            ["trainer.backend=my_trainer:"],
            "names no TrainerSpec: expected 'module:NAME' or 'file.py:NAME'",
        ),
        ([EAGER], "trainer.backend_options={'attention': 'eager'}: the backend torch reads none"),
    ],
)
def test_a_plan_refuses_by_name(capsys, digits_task, written, options, said):
    code, _, error = planned(capsys, digits_task, written, *options)
    assert code == 2
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (
            "quickstart_ppo.yaml",
            ["critic.backend=my_trainer:SPEC"],
            "builds no critic; take trainer.backend=fsdp",
        ),
        (
            "grpo_kl.yaml",
            [OWN],
            "plain transformers builds no reference; take trainer.backend=fsdp",
        ),
    ],
)
def test_roles_that_it_does_not_build_are_refused(
    capsys, digits_task, written, config, options, said
):
    code, _, error = planned(capsys, digits_task, written, *options, config=config)
    assert code == 2
    assert said in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"images": ImagesConfig(column="picture")},
            r"SPEC with images\.column='picture': it sees no images",
        ),
        (
            {"rollout": RolloutConfig(router_replay=True)},
            r"router_replay=true with .*SPEC: it replays no routes",
        ),
    ],
)
def test_rows_that_it_does_not_take_are_refused(digits_config, written, options, said):
    with pytest.raises(ConfigError, match=said):
        check_trainer(
            {"trainer": TrainerConfig(backend="my_trainer:SPEC"), **options}, ["w0"], digits_config
        )


def test_a_spec_is_not_imported_before_its_name_is_whole(written):
    (written / "harmful.py").write_text("raise SystemError")
    with pytest.raises(ConfigError, match="names no TrainerSpec"):
        trainer_spec("harmful:SP-EC")


def test_settings_that_need_less_memory_are_its_own_and_no_other_backends(written, digits_config):
    reading = (
        'reads=frozenset({*OPTIMIZING, "gradient_checkpointing", "max_tokens_per_micro_batch", '
    )
    text = SOURCE.replace("reads=frozenset({*OPTIMIZING, ", reading)
    assert text != SOURCE
    (written / "my_trainer.py").write_text(text)
    trainer = TrainerConfig(backend="my_trainer:SPEC", backend_options={"attention": "eager"})
    cost = check_trainer({"trainer": trainer}, ["w0", "w1"], digits_config)
    settings = [remedy.setting for remedy in cost.device.remedies]
    assert settings
    assert not [each for each in settings if "backend" in each or "offload" in each]


def test_specs_of_its_roles_are_sent_also_where_they_are_built_when_used(written):
    trainer = TrainerConfig(backend="my_trainer:SPEC")
    build = partial(build_trainer, model=ModelConfig(path="m"), rollout=RolloutConfig())
    role = Role("policy", partial(build, trainer=trainer))
    spec = trainer_spec("my_trainer:SPEC")
    assert specs_of(role.build) == {"my_trainer:SPEC": spec}
    assert specs_of(built_when_used(role).build) == {"my_trainer:SPEC": spec}
    assert specs_of(partial(build, trainer=TrainerConfig())) == {}


def test_a_run_gets_no_spec_of_an_earlier_one(written):
    try:
        receive_specs({"gone:SPEC": trainer_spec("torch")})
        assert trainer_spec("gone:SPEC") is trainer_spec("torch")
        receive_specs({})
        with pytest.raises(ConfigError, match="there is no module 'gone'"):
            trainer_spec("gone:SPEC")
    finally:
        receive_specs({})
