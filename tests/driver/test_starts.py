"""A run begins with the policy of another run's checkpoint, and needs that run no more once it
has begun.
"""

import json
import re
import shutil
from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from siirl_storage import open_fs
from transformers import AutoModelForCausalLM

from siirl_dask.cli import main
from siirl_dask.config import LoraConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Device, Rank
from siirl_dask.driver.phases import dags
from siirl_dask.driver.recovery.resume import find_resume_point
from siirl_dask.driver.starts import find_starts
from siirl_dask.errors import ConfigError
from siirl_dask.models.adapter_folder import check_adapter_folder
from siirl_dask.planner import DAG, Role
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.folder import write_identity
from siirl_dask.runs.reader import Run
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.rows import LENGTHS, random_rows
from siirl_dask.training import build_reward_model, build_trainer
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from tests.conftest import digits_overrides

ROWS = random_rows(LENGTHS)


def finished_run(url, base, task, *options, steps=(1, 2), role="policy"):
    """Write a run with checkpoints of ``steps``; return the log-probs of each step's policy."""
    more = [f"model.path={base}", *options]
    file = load_config_file(shipped("quickstart.yaml"), [*digits_overrides(task, url), *more])
    config = file.config
    write_identity(config, dags(file)[0], replace=False)
    trainer = build_trainer(
        Device("w"), Rank(), model=config.model, trainer=config.trainer, rollout=config.rollout
    )
    attempt = take(str(url), 30.0, print)
    checkpoints = Checkpoints(attempt=attempt, keep=9)
    logprobs = {}
    for step in steps:
        for number, weight in enumerate(trainer.state()["model"].values()):
            weight += 0.02 * torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(number)
            )
        folder = checkpoints.folder(step)
        written = (
            DistributedCheckpoint(asynchronous=False)
            .save(f"{folder}/{role}", trainer.state(), None)
            .result()
        )
        files = {f"{role}/{name}": digest for name, digest in written.items()}
        checkpoints.commit(folder, CheckpointState(step=step, roles=[role]), files)
        logprobs[step] = trainer.logprobs(ROWS).logprobs
    return logprobs


@pytest.fixture
def base(tmp_path):
    return tiny_model(tmp_path / "base")


def started(task, tmp_path, path, *more):
    file = load_config_file(
        shipped("quickstart.yaml"),
        [*digits_overrides(task, tmp_path / "new"), f"model.path={path}", *more],
    )
    return file.config, dags(file)[0]


@pytest.mark.parametrize("options", [[], ["trainer.lora.rank=4"]], ids=["weights", "adapters"])
@pytest.mark.parametrize(("name", "step"), [("{}", 2), ("{}@1", 1)])
def test_the_policy_begins_with_the_log_probs_that_the_other_run_ended_with(
    digits_task, base, tmp_path, options, name, step
):
    logprobs = finished_run(tmp_path / "old", base, digits_task, *options)
    config, dag = started(digits_task, tmp_path, name.format(tmp_path / "old"))
    starts = find_starts(config, [dag])
    config, dag, _ = starts.with_folders(config, dag, None)
    assert not starts.are_written
    starts.write(config.run.url, fresh=False)
    assert starts.are_written
    built = {role.name: role.build for role in dag.roles}
    policy = built["policy"](Device("w"), Rank())
    assert (policy.logprobs(ROWS).logprobs - logprobs[step]).abs().max() < 1e-5
    assert config.model.path == built["rollout"].keywords["model"].path, (
        "the engine has the same model"
    )
    assert f"step{step:06d}" in config.model.path


def test_a_run_at_a_url_is_started_from_and_written_to_a_url(digits_task, base, tmp_path):
    old, new = "memory://starts/old", "memory://starts/new"
    finished_run(old, base, digits_task)
    config, dag = started(digits_task, tmp_path, old, f"run.url={new}")
    starts = find_starts(config, [dag])
    starts.write(new, fresh=False)
    (start,) = starts.starts
    assert start.folder.startswith(f"{new}/start/")
    fs, path = open_fs(start.folder)
    written = {name.rpartition("/")[2] for name in fs.ls(path, detail=False)}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= written


def test_a_half_written_folder_is_written_anew_and_fresh_removes_others(
    digits_task, base, tmp_path
):
    finished_run(tmp_path / "old", base, digits_task)
    config, dag = started(digits_task, tmp_path, tmp_path / "old")
    starts = find_starts(config, [dag])
    (start,) = starts.starts
    folder, other = (
        tmp_path / "new" / "start",
        tmp_path / "new" / "start" / "0123456789ab-step000001",
    )
    other.mkdir(parents=True)
    half = folder / start.folder.rpartition("/")[2]
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert not starts.are_written
    starts.write(config.run.url, fresh=False)
    assert (half / "model.safetensors").stat().st_size > 4
    assert other.exists()
    starts.write(config.run.url, fresh=True)
    assert half.exists()
    assert not other.exists()


def test_a_run_that_was_moved_with_the_one_it_began_from_finds_its_model(
    digits_task, base, tmp_path
):
    before = tmp_path / "before"
    after = tmp_path / "after"
    finished_run(before / "old", base, digits_task)
    config, dag = started(digits_task, before, before / "old")
    starts = find_starts(config, [dag])
    starts.write(config.run.url, fresh=False)
    config, dag, _ = starts.with_folders(config, dag, None)
    write_identity(config, dag, replace=False)
    before.rename(after)
    config, dag = started(digits_task, after, after / "old")
    starts = find_starts(config, [dag])
    assert starts.are_written
    config, dag, _ = starts.with_folders(config, dag, None)
    assert find_resume_point(config, dag, fresh=False, force=False).exists
    assert Run(config.run.url).config.model.path == config.model.path


def test_a_run_that_goes_on_stays_with_the_step_that_it_began_with(digits_task, base, tmp_path):
    old = tmp_path / "old"
    finished_run(old, base, digits_task, steps=(1,))
    config, dag = started(digits_task, tmp_path, old)
    starts = find_starts(config, [dag])
    starts.write(config.run.url, fresh=False)
    shutil.rmtree(old)
    finished_run(old, base, digits_task, steps=(1, 2))
    assert find_starts(config, [dag]).starts[0].folder == starts.starts[0].folder
    assert find_starts(config, [dag], fresh=True).starts[0].step == 2
    again, _ = started(digits_task, tmp_path, f"{old}@2")
    assert find_starts(again, [dag]).starts[0].step == 2, (
        "a step that is asked for is not another one"
    )
    shutil.rmtree(old)
    assert find_starts(config, [dag]).starts[0].folder == starts.starts[0].folder, (
        "the run is there no more"
    )


LORA = ["trainer.lora.rank=4", "trainer.lora.targets=[q_proj, v_proj]"]


def begun_with(task, tmp_path, base, path, *options):
    """Return the configuration and the DAG of a run that begins with adapters, as they are when
    roles are built.
    """
    config, dag = started(task, tmp_path, base, *(options or LORA), f"trainer.lora.path={path}")
    starts = find_starts(config, [dag])
    config, dag, _ = starts.with_folders(config, dag, None)
    starts.write(config.run.url, fresh=False)
    return config, dag


@pytest.mark.parametrize("backend", ["torch", "fsdp"])
@pytest.mark.parametrize("source", ["run", "step", "exported", "peft"])
def test_adapters_begin_with_the_log_probs_that_they_were_saved_with(
    digits_task, base, tmp_path, source, backend
):
    old, folder = tmp_path / "old", tmp_path / "adapters"
    logprobs = finished_run(old, base, digits_task, *LORA)
    path = {"run": old, "step": f"{old}@1"}.get(source, folder)
    if source == "exported":
        main(["export", str(old), str(folder), "--adapter"])
    elif source == "peft":
        main(["export", str(old), str(tmp_path / "first"), "--adapter"])
        model = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), tmp_path / "first"
        )
        model.save_pretrained(folder)
    config, dag = begun_with(digits_task, tmp_path, base, path, *LORA, f"trainer.backend={backend}")
    policy = next(role.build for role in dag.roles if role.name == "policy")(Device("w"), Rank())
    found = policy.logprobs(ROWS).logprobs
    assert (found - logprobs[1 if source == "step" else 2]).abs().max() < 1e-5
    fresh = build_trainer(
        Device("w"),
        Rank(),
        model=config.model,
        trainer=replace(config.trainer, lora=LoraConfig()),
        rollout=config.rollout,
    )
    assert (policy.base_logprobs(ROWS).logprobs - fresh.logprobs(ROWS).logprobs).abs().max() < 1e-5
    assert (found - fresh.logprobs(ROWS).logprobs).abs().max() > 1e-3


def changed_adapters(folder, change):
    """Give a folder of adapters other contents."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 4)
    elif change == "shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif change == "pickled":
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    elif change == "huge":
        config["padding"] = "x" * 2**20
    elif change == "no json":
        config = "{"
    else:
        config |= change
    (folder / "adapter_config.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    if change != "pickled":
        save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"r": 8}, r"r=8, and trainer.lora.rank is 4"),
        ({"lora_alpha": 32}, r"lora_alpha=32, and trainer.lora.alpha is 16"),
        ({"use_dora": True}, "use_dora=True"),
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens=\[1, 2\]"),
        ({"bias": "all"}, "bias='all'"),
        ({"peft_type": "VERA"}, "are VERA; expected LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"base_model_name_or_path": "OTHER"}, "were trained on another model, .* hidden_size"),
        (
            "missing",
            r"lacks 1 of the policy's adapters, such as "
            r"model.layers.0.self_attn.q_proj.lora_A.weight",
        ),
        ("extra", "has 1 tensors that the policy has not, such as lm_head"),
        ("shape", r"q_proj.lora_A.weight has shape .*; expected"),
        ("pickled", "are pickled"),
        ("huge", "more than 1048576 bytes"),
        ("no json", "cannot be read"),
    ],
    ids=str,
)
def test_plan_refuses_adapters_that_are_not_the_policys_by_name(
    digits_task, base, tmp_path, change, text, capsys
):
    finished_run(tmp_path / "old", base, digits_task, *LORA)
    folder = tmp_path / "adapters"
    main(["export", str(tmp_path / "old"), str(folder), "--adapter"])
    if isinstance(change, dict) and "base_model_name_or_path" in change:
        change = {"base_model_name_or_path": str(tiny_model(tmp_path / "other", hidden=96))}
    changed_adapters(folder, change)
    command = [
        "plan",
        str(shipped("quickstart")),
        *digits_overrides(digits_task, tmp_path / "new"),
        *LORA,
    ]
    with pytest.raises(SystemExit):
        main([*command, f"model.path={base}", f"trainer.lora.path={folder}"])
    said = capsys.readouterr().err
    assert re.search(text, said), said
    assert f"trainer.lora.path='{folder}'" in said


def test_adapters_in_8_bits_are_refused_which_would_be_taken_as_they_are(tmp_path):
    """Their scales are elsewhere, if anywhere."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16}))
    layer = "model.layers.0.self_attn.q_proj"
    halves = {f"base_model.model.{layer}.lora_A.weight": torch.ones(4, 8, dtype=torch.int8)}
    save_file(halves, tmp_path / "adapter_model.safetensors")
    lora = LoraConfig(rank=4, alpha=16, path=str(tmp_path))
    expected = {f"{layer}.lora_A.weight": (4, 8)}
    with pytest.raises(ConfigError, match=r"q_proj.lora_A.weight is I8 where one of F32"):
        check_adapter_folder(lora, "base", expected)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["trainer.lora.rank=8"], r"trainer.lora.rank=4, and this one 8"),
        (
            ["trainer.lora.rank=4", "trainer.lora.alpha=8"],
            r"trainer.lora.alpha=16.0, and this one 8.0",
        ),
        (
            ["trainer.lora.rank=4"],
            r"trainer.lora.targets=\['q_proj', 'v_proj'\], and this one \[\]",
        ),
    ],
)
def test_adapters_of_a_run_with_other_options_are_refused_before_they_are_written(
    digits_task, base, tmp_path, options, text
):
    finished_run(tmp_path / "old", base, digits_task, *LORA)
    config, dag = started(
        digits_task, tmp_path, base, *options, f"trainer.lora.path={tmp_path / 'old'}"
    )
    with pytest.raises(ConfigError, match=text):
        find_starts(config, [dag])


def test_adapters_of_another_base_or_of_a_run_without_any_are_refused(digits_task, base, tmp_path):
    finished_run(tmp_path / "old", base, digits_task, *LORA)
    finished_run(tmp_path / "whole", base, digits_task)
    other = tiny_model(tmp_path / "other", hidden=96)
    config, dag = started(
        digits_task, tmp_path, other, *LORA, f"trainer.lora.path={tmp_path / 'old'}"
    )
    with pytest.raises(ConfigError, match="were trained on another model"):
        find_starts(config, [dag])
    config, dag = started(
        digits_task, tmp_path, base, *LORA, f"trainer.lora.path={tmp_path / 'whole'}"
    )
    with pytest.raises(ConfigError, match="that run has no adapters"):
        find_starts(config, [dag])
    with pytest.raises(ConfigError, match=r"trainer.lora.rank=0; give the rank"):
        LoraConfig(path="adapters")


def test_the_engine_samples_with_the_first_adapters_before_the_first_step(
    digits_task, base, tmp_path, capsys
):
    """Where the engine had the base alone, its log-probs would differ from the policy's by much
    in the first step.
    """
    finished_run(tmp_path / "old", base, digits_task, *LORA)
    command = [
        "run",
        str(shipped("quickstart")),
        *digits_overrides(digits_task, tmp_path / "new"),
        *LORA,
    ]
    command += [f"model.path={base}", f"trainer.lora.path={tmp_path / 'old'}", "checkpoint.every=1"]
    command += ["cluster.workers=1", "cluster.placement={}"]
    main([*command, "run.steps=1"])
    records = [
        json.loads(line) for line in (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
    ]
    first = next(each["metrics"] for each in records if each["phase"] == "train")
    assert 0 <= first["mismatch/kl"] < 1e-6
    shutil.rmtree(tmp_path / "old")
    main([*command, "run.steps=2", "observe.progress=true"])
    assert "going on after step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("{0}/nothing@3", r"no run is at '.*nothing'.* expected RUN or RUN@STEP"),
        ("{0}/old@7", r"no checkpoint of step 7 \(there are: \[1, 2\]\)"),
        ("{0}/empty", "has no checkpoint"),
        ("{0}/agents", r"no role 'policy' \(there are: \['policy_a'\]\)"),
        ("{0}/new", "is run.url itself"),
    ],
)
def test_plan_refuses_what_is_not_there_by_name(digits_task, base, tmp_path, path, text):
    finished_run(tmp_path / "old", base, digits_task)
    finished_run(tmp_path / "agents", base, digits_task, role="policy_a")
    finished_run(tmp_path / "empty", base, digits_task, steps=())
    finished_run(tmp_path / "new", base, digits_task)
    config, dag = started(digits_task, tmp_path, path.format(tmp_path))
    with pytest.raises(ConfigError, match=text) as told:
        find_starts(config, [dag])
    assert str(told.value).startswith(f"model.path='{path.format(tmp_path)}'")


def test_a_base_that_is_gone_is_refused_before_anything_starts(digits_task, base, tmp_path):
    finished_run(tmp_path / "old", base, digits_task)
    shutil.rmtree(base)
    config, dag = started(digits_task, tmp_path, tmp_path / "old")
    with pytest.raises(
        ConfigError, match="which is not there, and has the config and the tokenizer"
    ):
        find_starts(config, [dag])


def test_a_policy_is_no_reward_model(digits_task, base, tmp_path):
    from functools import partial

    finished_run(tmp_path / "old", base, digits_task)
    config, dag = started(digits_task, tmp_path, tmp_path / "old")
    scoring = Role("judge", partial(build_reward_model, model=config.model))
    with pytest.raises(ConfigError, match=r"role 'judge': .* neither a reward model"):
        find_starts(config, [DAG((*dag.roles, scoring), dag.nodes)])


def test_plan_says_what_the_run_begins_with_and_writes_nothing(digits_task, base, tmp_path, capsys):
    finished_run(tmp_path / "old", base, digits_task)
    command = ["plan", str(shipped("quickstart")), *digits_overrides(digits_task, tmp_path / "new")]
    main([*command, f"model.path={tmp_path / 'old'}"])
    assert f"is the policy of step 2 of the run at {tmp_path / 'old'}" in " ".join(
        capsys.readouterr().out.split()
    )
    assert not (tmp_path / "new").exists()
    with pytest.raises(SystemExit):
        main(
            [
                *command,
                f"model.path={tmp_path / 'old'}@2",
                "trainer.lora.rank=4",
                "trainer.lora.targets=[nothing]",
            ]
        )
    assert "has no linear layer 'nothing'" in capsys.readouterr().err


def test_a_started_run_goes_on_from_its_own_checkpoint_when_the_other_is_gone(
    digits_task, base, tmp_path, capsys
):
    finished_run(tmp_path / "old", base, digits_task)
    command = ["run", str(shipped("quickstart")), *digits_overrides(digits_task, tmp_path / "new")]
    command += [
        f"model.path={tmp_path / 'old'}",
        "checkpoint.every=1",
        "cluster.workers=1",
        "cluster.placement={}",
    ]
    main([*command, "run.steps=1"])
    folder = Run(str(tmp_path / "new")).config.model.path
    assert json.loads((tmp_path / "new" / "start").joinpath(folder, "config.json").read_text())
    shutil.rmtree(tmp_path / "old")
    shutil.rmtree(base)
    main([*command, "run.steps=2", "observe.progress=true"])
    assert "going on after step 1" in capsys.readouterr().out
    assert Run(str(tmp_path / "new")).steps == [1, 2]
