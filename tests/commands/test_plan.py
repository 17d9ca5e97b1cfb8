"""``siirl-dask plan``: for any number of workers, with memory, in three formats; a run that does
not fit is refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from siirl_dask.cli import main
from siirl_dask.config import Dtype
from siirl_dask.config.file import load, load_config_file, shipped
from siirl_dask.context import Device, Rank
from siirl_dask.driver.checks.number_type import with_dtype_in_dag
from siirl_dask.driver.checks.preflight import check
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.driver.run import run
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.models.planned_models import loop_note, rows_note
from siirl_dask.models.shapes import ModelSize, count_parameters
from siirl_dask.planner import dag_from_spec
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.testing.rows import flat
from siirl_dask.training import build_trainer
from siirl_dask.wording import readable_bytes
from tests.conftest import digits_overrides
from tests.models.configs import QWEN2_5_7B, QWEN2_5_HALF_B, QWEN2_5_VL_3B, write_config
from tests.training.families import written

KL = str(shipped("grpo_kl.yaml"))


@pytest.fixture
def digits(digits_task, tmp_path):
    return digits_overrides(digits_task, tmp_path / "run")


def planned(capsys, *arguments):
    main(["plan", KL, *arguments])
    return capsys.readouterr().out


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", KL, *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_workers_replace_those_of_the_config(capsys, digits):
    text = planned(capsys, "--workers", "6", *digits)
    assert "4 roles on 6 workers" in text
    assert (
        "note: workers 4, 5 have nothing to do: cluster.placement gives every role other ones"
        in text
    )
    assert "have nothing to do" not in planned(capsys, *digits)
    everywhere = planned(capsys, "--workers", "2", "cluster.placement={}", *digits)
    assert "rollout, reward, policy, reference" in everywhere
    assert "cluster.placement.policy=[2]: no worker 2; cluster.workers=2 gives 0 to 1" in refused(
        capsys, "--workers=2"
    )
    assert "cluster.workers=0: expected at least 1" in refused(
        capsys, "--workers=0", "cluster.placement={}"
    )


def test_data_that_is_not_there_yet_is_assumed_and_noted(capsys, digits, tmp_path):
    absent = ["data.url=none/train", "validation.url=none/validation", "validation.test_url=null"]
    (note, *_) = json.loads(
        planned(capsys, "--format=json", *digits, *absent, "data.prepare=null")
    )["notes"]
    here = Path.cwd()
    assert note == (
        f"no dataset is at {here}/none/train, {here}/none/validation yet; assumed the columns that "
        "the config names "
        "(prompt: string, answer: string), and 8 rows to validate on; a run needs that data"
    )
    made = planned(
        capsys, *digits, "data.url=none", "data.prepare=m:make", "rollout.expected_length_column=n"
    )
    expected = (
        f"no dataset is at {here}/none yet; assumed the columns that the config names (prompt: "
        "string, answer"
    )
    assert expected in made
    assert "n: int64); a run calls data.prepare=m:make first" in made
    assert "no dataset" not in planned(capsys, *digits)


def test_json_is_answered_with_the_command_that_makes_a_table(capsys, digits, tmp_path):
    (tmp_path / "my rows.jsonl").write_text('{"prompt": "1 + 1?", "answer": 2}')
    for key in ("data.url", "validation.url"):
        said = refused(capsys, *digits, f"{key}={tmp_path}/my rows.jsonl")
        assert f"siirl-dask data import '{tmp_path}/my rows.jsonl' '{tmp_path}/my rows'" in said


def test_a_folder_with_other_files_is_no_dataset_that_is_still_to_come(capsys, digits, tmp_path):
    """Such as the model's: a plan said that no dataset was there yet, and a run that none is."""
    (tmp_path / "other").mkdir()
    assert "no dataset is at" in planned(capsys, *digits, f"data.url={tmp_path}/other")
    (tmp_path / "other" / "notes.md").write_text("x")
    said = refused(capsys, *digits, f"data.url={tmp_path}/other")
    assert f"no table at {tmp_path}/other" in said


def test_columns_within_one_struct_are_assumed_together(capsys, digits):
    paths = [
        "data.url=none",
        "data.answer=a",
        "validation.source_column=a.b.c",
        "rollout.expected_length_column=a.n",
    ]
    text = planned(capsys, *digits, *paths)
    assert "(prompt: string, a: struct<b: struct<c: string>, n: int64>)" in text
    assert "column 'a.': expected a name" in refused(
        capsys, *digits, "data.url=none", "data.answer=a."
    )
    misread = refused(capsys, *digits, "data.url=none", "nodes.reward.reads=[anwser]")
    assert "node 'reward' reads ['anwser']" in misread
    assert "did you mean 'answer'?" in misread


def test_what_only_a_run_needs_is_a_note_of_a_plan(capsys, digits, monkeypatch):
    """A configuration of ``migrate`` is planned where neither the model nor wandb is."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("siirl_dask.observe.backends._is_installed", lambda package: False)
    options = [*digits, "model.path=hf://org/nowhere", "observe.backends=[wandb]"]
    said = planned(capsys, *options)
    assert "note: observe.backends names wandb, and its package is not installed here" in said
    assert "its memory is not counted, and a run needs it" in said
    with pytest.raises(SystemExit, match="2"):
        main(["run", KL, *options])
    assert "observe.backends names wandb" in capsys.readouterr().err


def test_storage_that_cannot_be_reached_is_named(capsys, digits, monkeypatch):
    def fail(url):
        raise RuntimeError("no credentials")

    monkeypatch.setattr("siirl_dask.coordinator.source.open_table", fail)
    said = refused(capsys, *digits, "data.url=s3://bucket/rows")
    assert (
        "dataset 's3://bucket/rows': its storage cannot be reached: RuntimeError: no credentials"
        in said
    )


def test_a_model_that_is_not_there_yet_bounds_no_weights(capsys, digits):
    text = " ".join(planned(capsys, *digits, "model.path=none").split())
    assert "weights -> load_weights ? replicated in parts" in text
    assert "role 'policy': its model is not on this machine" in text


PADDED_ROWS = (
    "note: roles 'policy', 'reference': rows: with padding (bloom: its attention cannot be "
    "replaced), which takes longer"
)


@pytest.mark.parametrize(
    ("family", "rows", "loop"),
    [
        (
            "bloom",
            PADDED_ROWS,
            "note: role 'rollout': loop: transformers' generate (bloom), which takes longer",
        ),
        (
            "stablelm",
            None,
            "note: role 'rollout': loop: transformers' generate (stablelm), which takes longer",
        ),
        ("qwen2", None, None),
    ],
)
def test_a_plan_says_which_families_take_a_slower_way(capsys, digits, tmp_path, family, rows, loop):
    written(tmp_path / "model", family)
    path = f"model.path={tmp_path / 'model'}"
    lines = planned(capsys, *digits, path, "rollout.engine=transformers").splitlines()
    assert [line for line in lines if "rows: " in line] == ([] if rows is None else [rows])
    assert [line for line in lines if "loop: " in line] == ([] if loop is None else [loop])
    assert "loop: " not in planned(capsys, *digits, path, "rollout.engine=vllm")


def test_the_text_of_an_image_text_model_is_known_by_its_own_kind(tmp_path):
    write_config(tmp_path, {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}})
    assert (
        rows_note(str(tmp_path))
        == "rows: with padding (llama4_text: it attends in chunks), which takes longer"
    )
    assert (
        loop_note(str(tmp_path)) == "loop: transformers' generate (llama4_text), which takes longer"
    )


def test_a_family_that_no_trainer_computes_is_refused_before_the_start(capsys, digits, tmp_path):
    write_config(tmp_path, {"model_type": "recurrent_gemma"})
    said = refused(capsys, *digits, f"model.path={tmp_path}", "rollout.engine=transformers")
    assert "trainers do not compute the log-probs of recurrent_gemma as transformers does" in said


def test_rows_that_are_not_packed_are_refused_before_the_start_where_ranks_are_to_divide_them(
    capsys, digits, tmp_path
):
    written(tmp_path / "model", "bloom")
    shares = ["trainer.backend=fsdp", "trainer.fsdp.sequence_parallel=2", "cluster.placement={}"]
    said = refused(capsys, *digits, f"model.path={tmp_path / 'model'}", *shares)
    assert "trainer.fsdp.sequence_parallel=2: the rows of " in said
    assert (
        "are computed with padding (bloom: its attention cannot be replaced) and are not divided"
        in said
    )


def test_options_may_stand_anywhere_and_others_are_refused(capsys, digits):
    assert planned(capsys, *digits, "--workers", "8") == planned(capsys, "--workers", "8", *digits)
    for wrong in (["--wrokers", "8"], ["--format", "pdf"]):
        with pytest.raises(SystemExit):
            main(["plan", KL, *digits, *wrong])
    with pytest.raises(SystemExit):
        main(["rollouts", "run", "SELECT 1", "key=value"])


def test_hosts_show_their_roles_and_the_bytes_of_each_link(capsys, digits):
    text = planned(capsys, "--hosts", "2,2", *digits)
    hosts = text.split("== hosts in train ==")[1].split("\n\n== ")[0]
    assert "host0  0, 1     rollout, reward" in hosts
    assert "host1  2, 3     policy on 1 of 2, reference on 1 of 2" in hosts
    assert "weights -> load_weights" in hosts
    assert "host1 -> host0" in hosts
    data = json.loads(planned(capsys, "--hosts=2x2", "--format=json", *digits))["phases"]["train"]
    assert data["hosts"] == {"host0": ["0", "1"], "host1": ["2", "3"]}
    total = sum(link["bytes"] for link in data["links"])
    assert f"Between hosts: {readable_bytes(total)} a step" in hosts
    (weights,) = (link for link in data["links"] if link["edge"] == "weights->load_weights")
    (edge,) = (edge for edge in data["edges"] if edge["source"] == "weights")
    assert weights["bytes"] == edge["bytes"] / 2, "two engines are on the host"
    assert "hosts" not in json.loads(planned(capsys, "--format=json", *digits))["phases"]["train"]


def test_engines_over_two_hosts_are_noted_and_those_of_one_are_not(capsys, digits):
    apart = [
        "cluster.placement={}",
        "rollout.engine=vllm",
        "rollout.tensor_parallel_size=2",
        *digits,
    ]
    apart = [override for override in apart if override != "rollout.engine=transformers"]
    assert "on several hosts" in planned(capsys, "--hosts", "3,3", *apart)
    assert "on several hosts" not in planned(capsys, "--hosts", "2,4", *apart)


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (
            "4x",
            "--hosts 4x: expected hosts x workers on each, such as 4x8, or the workers of each "
            "host",
        ),
        ("0x8", "--hosts 0x8: expected"),
        ("8,,4", "--hosts 8,,4: expected"),
        ("99999x99999", "is 9999800001 workers: expected at most 65536"),
    ],
)
def test_hosts_that_are_none_are_refused(capsys, digits, hosts, said):
    assert said in refused(capsys, "--hosts", hosts, *digits)


def test_hosts_with_another_number_of_workers_are_refused(capsys, digits):
    assert "--hosts 2x2 has 4 workers, and --workers is 8" in refused(
        capsys, "--hosts=2x2", "--workers=8", *digits
    )


@pytest.mark.alone
def test_a_thousand_workers_are_planned_within_two_seconds(capsys, digits):
    half = list(range(512))
    rest = {"policy": list(range(512, 768)), "reference": list(range(768, 1024))}
    placed = json.dumps({"rollout": half, "reward": half, **rest})
    planned(capsys, *digits)  # what names the functions is imported by now
    start = time.perf_counter()
    text = planned(capsys, "--workers", "1024", f"cluster.placement={placed}", *digits)
    assert time.perf_counter() - start < 2
    assert "0..511 (512)" in text
    assert len(text.splitlines()) < 150


def test_memory_is_shown_for_each_group_of_roles(capsys, digits, digits_task):
    text = " ".join(
        planned(capsys, *digits, "data.memory_limit=1MiB").split("== memory ==")[1].split()
    )
    parameters = count_parameters(str(digits_task.model))
    assert f"role policy {16 * parameters.total / 1e6:.1f}"[:-1] in text
    for group in ("0, 1 rollout, reward 45", "2 policy 46", "3 reference 4"):
        assert group in text
    assert "moving rows" in text
    assert "process 450.0 MB" in text


def test_parameters_are_counted_from_headers(digits_task, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(digits_task.model)
    sizes = [parameter.numel() for parameter in model.parameters()]
    found = count_parameters(str(digits_task.model))
    assert found == ModelSize(sum(sizes), len(sizes), max(sizes), found.layer)
    assert 0 < 2 * found.layer < found.total, "of two equal layers, and embeddings besides"
    assert count_parameters(str(tmp_path)) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(
        ConfigError, match=r"model.safetensors is no whole safetensors file: a header of"
    ):
        count_parameters(str(tmp_path))


def memories(overrides):
    file = load_config_file(KL, overrides)
    dag, validation = dags(file)
    phases = plan_phases(file.config, dag, validation, worker_names(file.config))
    return {tuple(one.roles): one for one in check(file.config, phases).memory}


@pytest.mark.parametrize("options", [[], ["trainer.ema_decay=0.9"], ["trainer.lora.rank=4"]])
def test_an_asynchronous_checkpoint_counts_as_the_trainers_state(digits, options):
    found, config = memories([*digits, *options]), load(KL, [*digits, *options])
    trainer = build_trainer(
        Device("w"), Rank(), model=config.model, trainer=config.trainer, rollout=config.rollout
    )
    tensors = [tensor for tensor in flat(trainer.state()).values() if tensor.ndim]
    assert found["policy",].checkpoint == sum(4 * tensor.numel() for tensor in tensors)
    assert found["reference",].checkpoint == found["rollout", "reward"].checkpoint == 0
    two = [
        "cluster.placement={rollout: [0], reward: [0], policy: [1, 2], reference: [3]}",
        "trainer.backend=fsdp",
    ]
    assert memories([*digits, *options, *two])["policy",].checkpoint == -(
        -found["policy",].checkpoint // 2
    )
    for none in ("checkpoint.asynchronous=false", "checkpoint.every=0"):
        assert memories([*digits, *options, none])["policy",].checkpoint == 0


def test_vllm_counts_with_the_cache_that_it_has_on_a_cpu(digits):
    def rollout(*options):
        return memories([*digits, *options])["rollout", "reward"].roles["rollout"]

    weights = rollout()
    assert rollout("rollout.engine=vllm") == weights + 2**30
    assert rollout("rollout.engine=vllm", "rollout.vllm.kv_cache_memory=64MiB") == weights + 2**26


def test_a_larger_batch_takes_more_and_moving_rows_are_capped(digits):
    small, large = (
        memories(digits),
        memories([*digits, "data.batch_size=800", "data.memory_limit=1MiB"]),
    )
    assert large["policy",].tables > 5 * small["policy",].tables
    assert (
        memories([*digits, "data.memory_limit=2MiB"])["policy",].moving
        == small["policy",].moving
        < 2 * 2**20
    )
    assert large["policy",].moving == 2**20
    assert small["rollout", "reward"].roles["reward"] == 0
    halved = memories([*digits, "model.dtype=bfloat16"])
    for group, role in ((("rollout", "reward"), "rollout"), (("policy",), "policy")):
        wide, narrow = (found[group].roles[role] for found in (small, halved))
        # what learns is float32 in any case
        assert narrow == (wide // 2 if role == "rollout" else wide)
    cached = memories([*digits, "rollout.vllm.kv_cache_memory=1GiB"])["rollout", "reward"].roles[
        "rollout"
    ]
    assert cached == small["rollout", "reward"].roles["rollout"] + 2**30


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["cluster.memory_limit=450.5MB"],
            ["'450.5MB'", "moving rows", "role rollout 364", "process 450.0 MB", "lower"],
        ),
        (
            ["data.memory_limit=1MiB", "cluster.memory_limit=500MB", "data.batch_size=99999"],
            [
                "tables (at reward of train)",
                "lower data.batch_size, rollout.n",
                "workers 0, 1 (rollout, reward)",
            ],
        ),
        (
            ["cluster.memory_limit=100MB"],
            ["process 450.0 MB", "a process takes that much, or raise cluster.memory"],
        ),
    ],
)
def test_what_cannot_fit_is_refused_by_plan_and_by_run(capsys, digits, tmp_path, overrides, parts):
    error = refused(capsys, *digits, *overrides)
    for part in (*parts, "may each come to need"):
        assert part in error
    file = load_config_file(KL, [*digits, *overrides])
    with pytest.raises(PlanError, match="may each come to need"):
        run(file.config, *dags(file))
    assert not (tmp_path / "run").exists()


def test_what_fits_is_not_refused(capsys, digits):
    assert "(1GB)" in planned(capsys, *digits, "cluster.memory_limit=1GB")
    assert "cluster.memory_limit='much': expected a number of bytes" in refused(
        capsys, "cluster.memory_limit=much"
    )


SEVEN = {
    "apart": [
        "cluster.placement={rollout: [0, 1, 2, 3], reward: [0, 1, 2, 3], policy: [4, 5, 6, 7]}"
    ],
    "colocated": ["cluster.placement={}"],
}


def seven_billion(capsys, tmp_path, *overrides, memory="80GB", workers=8):
    """Plan GRPO of Qwen2.5-7B, of which a config.json is all there is."""
    folder = write_config(tmp_path / "Qwen2.5-7B", QWEN2_5_7B)
    main(
        [
            "plan", str(shipped("dags/grpo.yaml")), f"--workers={workers}", "--format=json",
            f"--device-memory={memory}", f"model.path={folder}", "model.dtype=bfloat16", "data.url=none",
            "data.batch_size=128", "rollout.engine=vllm", "rollout.max_response_length=2048",
            "algorithm.minibatches=4", "trainer.backend=fsdp", "trainer.gradient_checkpointing=true", *overrides,
        ]
    )  # fmt: skip
    return json.loads(capsys.readouterr().out)["devices"]


def test_seven_billion_parameters_fit_on_eight_cards_of_80_gb_apart(capsys, tmp_path):
    engines, trainers = seven_billion(capsys, tmp_path, *SEVEN["apart"])
    (engine,) = (worker["roles"]["rollout"] for worker in engines["workers"].values())
    (policy,) = (worker["roles"]["policy"] for worker in trainers["workers"].values())
    parameters = 7_615_616_512
    assert engine["held"]["weights"] == 2 * parameters
    assert sum(policy["held"].values()) == 4 * parameters  # 16 bytes over four shards
    assert engines["fits"]
    assert trainers["fits"]
    token = 2 * 28 * 4 * 128 * 2  # keys and values of a token
    assert 800_000 < engine["held"]["KV cache"] // token < 1_000_000


def test_seven_billion_parameters_fit_colocated_and_the_engine_leaves_the_trainer_its_room(
    capsys, tmp_path
):
    (card,) = seven_billion(capsys, tmp_path, *SEVEN["colocated"])
    (worker,) = card["workers"].values()
    assert card["fits"]
    assert sum(worker["roles"]["policy"]["held"].values()) == 2 * 7_615_616_512
    assert max(worker["moments"].values()) <= card["usable"] < 80 * 10**9
    (apart, _) = seven_billion(capsys, tmp_path, *SEVEN["apart"])
    (engine,) = (other["roles"]["rollout"] for other in apart["workers"].values())
    assert worker["roles"]["rollout"]["held"]["KV cache"] < engine["held"]["KV cache"]


def test_one_card_of_24_gb_trains_adapters_with_the_weights_in_the_hosts_memory(capsys, tmp_path):
    adapters = ["cluster.placement={}", "trainer.lora.rank=16"]
    (card,) = seven_billion(
        capsys, tmp_path, *adapters, "trainer.backend=torch", memory="24GB", workers=1
    )
    assert not card["fits"]
    assert card["remedies"][-1]["setting"] == "trainer.backend=fsdp trainer.fsdp.offload=true"
    offloaded = [*adapters, "trainer.fsdp.offload=true", "data.batch_size=16"]
    (card,) = seven_billion(capsys, tmp_path, *offloaded, memory="24GB", workers=1)
    assert card["fits"]


def test_a_base_that_agents_have_in_common_counts_once(capsys, tmp_path):
    folder = write_config(tmp_path / "Qwen2.5-7B", QWEN2_5_7B)
    common = [
        f"model.path={folder}",
        f"agents.b.model.path={folder}",
        "model.dtype=bfloat16",
        "data.url=none",
    ]
    common += [
        "cluster.placement={}",
        "trainer.lora.rank=16",
        "rollout.engine=vllm",
        "data.batch_size=16",
    ]
    cards = {}
    for name, base in {"each": [], "one": ["agents.b.base=a"]}.items():
        arguments = ["--workers=1", "--format=json", "--device-memory=80GB", *common, *base]
        main(["plan", str(shipped("quickstart_agents")), *arguments])
        (cards[name],) = json.loads(capsys.readouterr().out)["devices"]
    each, one = (
        {role: own["held"] for role, own in card["workers"]["0"]["roles"].items()}
        for card in cards.values()
    )
    frozen = "frozen weights in float32"
    assert one["policy_a"] == each["policy_a"]
    assert one["rollout_a"]["weights"] == each["rollout_b"]["weights"] == 2 * 7_615_616_512
    assert one["policy_b"] == {
        part: size for part, size in each["policy_b"].items() if part != frozen
    }
    assert not one["rollout_b"]
    assert cards["one"]["fits"]
    assert not cards["each"]["fits"]


def test_what_the_plan_proposes_fits_when_it_is_done(capsys, tmp_path):
    full = [
        "cluster.placement={}",
        "trainer.gradient_checkpointing=false",
        "rollout.vllm.sleep_level=0",
    ]
    (card,) = seven_billion(capsys, tmp_path, *full, memory="48GB")
    assert not card["fits"]
    proposed = [word for remedy in card["remedies"] for word in remedy["setting"].split()]
    (after,) = seven_billion(capsys, tmp_path, *full, *proposed, memory="48GB")
    assert after["fits"]


def test_fewer_tokens_at_once_are_proposed_before_layers_that_are_computed_again(capsys, tmp_path):
    """16,384 tokens of Qwen2.5-7B keep 107 GB of activations; the update is a quarter shorter
    without recomputation.
    """
    parked = ["cluster.placement={}", "trainer.gradient_checkpointing=false", "trainer.park=true"]
    (card,) = seven_billion(capsys, tmp_path, *parked)
    assert not card["fits"]
    last = card["remedies"][-1]["setting"]
    assert last == "trainer.max_tokens_per_micro_batch=8192"
    assert not [remedy for remedy in card["remedies"] if "checkpointing" in remedy["setting"]]
    (after,) = seven_billion(capsys, tmp_path, *parked, last)
    assert after["fits"]
    (more,) = seven_billion(capsys, tmp_path, *parked, "trainer.max_tokens_per_micro_batch=10240")
    assert not more["fits"]


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [((), False), (("rollout.vllm.sleep_level=1",), True), (("trainer.lora.rank=16",), True)],
    ids=["weights follow", "level 1", "adapters follow"],
)
def test_the_host_has_a_sleeping_engines_weights_only_where_they_are_needed_again(
    capsys, tmp_path, overrides, kept
):
    folder = write_config(tmp_path / "Qwen2.5-7B", QWEN2_5_7B)
    main(
        [
            "plan", str(shipped("dags/grpo.yaml")), "--device-memory=80GB", "--workers=8", "--format=json",
            f"model.path={folder}", "model.dtype=bfloat16", "data.url=none", "rollout.engine=vllm",
            "trainer.backend=fsdp", *SEVEN["colocated"], *overrides,
        ]
    )  # fmt: skip
    (memory,) = json.loads(capsys.readouterr().out)["memory"]
    weights = 2 * 7_615_616_512
    assert (memory["roles"]["rollout"] >= weights) == kept
    assert kept or memory["loading"] >= weights, (
        "while the roles are built, nothing has followed yet"
    )


def test_parking_gives_the_engine_what_the_policy_held_and_takes_it_of_the_host(capsys, tmp_path):
    (card,) = seven_billion(capsys, tmp_path, *SEVEN["colocated"])
    (parked,) = seven_billion(capsys, tmp_path, *SEVEN["colocated"], "trainer.park=true")
    caches = [
        worker["roles"]["rollout"]["held"]["KV cache"]
        for one in (card, parked)
        for worker in one["workers"].values()
    ]
    assert caches[1] > caches[0] + 10 * 10**9
    (worker,) = parked["workers"].values()
    assert worker["moments"]["weights move"] < worker["moments"]["rollout"]


def test_parking_is_proposed_where_the_engine_lacks_room_beside_the_policy(capsys, tmp_path):
    both = "cluster.placement={rollout: [0, 1, 2, 3], reward: [0, 1, 2, 3], policy: [0, 1, 2, 3]}"
    (card,) = seven_billion(capsys, tmp_path, both, memory="48GB")
    proposed = [word for remedy in card["remedies"] for word in remedy["setting"].split()]
    assert not card["fits"]
    assert "trainer.park=true" in proposed
    (after,) = seven_billion(capsys, tmp_path, both, *proposed, memory="48GB")
    assert after["fits"]


SHIPPED = sorted(path.name for path in shipped("quickstart.yaml").parent.glob("*.yaml"))


@pytest.mark.parametrize("memory", ["24GB", "80GB"])
@pytest.mark.parametrize("name", SHIPPED)
def test_no_shipped_configuration_needs_more_than_its_card_has(tmp_path, name, memory):
    """Models of texts have half a billion parameters, one that sees images as many as its
    configuration is for; an engine takes what is left.
    """
    # on the card that it is for, Ascend 910B
    memory = {"grpo_deepscaler_npu.yaml": "64GB"}.get(name, memory)
    if name == "quickstart_vlm.yaml":
        folder = tiny_vlm(tmp_path / "model")
    else:
        known = {"grpo_geometry3k.yaml": QWEN2_5_VL_3B, "grpo_deepscaler_npu.yaml": QWEN2_5_7B}
        folder = write_config(tmp_path / "model", known.get(name, QWEN2_5_HALF_B))
    absent = [
        "data.url=none",
        "validation.url=null",
        "validation.test_url=null",
        "rollout.engine=vllm",
    ]
    overrides = [*absent, f"model.path={folder}", f"cluster.device_memory={memory}"]
    if name in ("quickstart_agents.yaml", "quickstart_marft.yaml"):
        overrides.append(f"agents.b.model.path={folder}")
    file = load_config_file(shipped(name), overrides)
    phases = plan_phases(file.config, *dags(file), worker_names(file.config), assume_columns=True)
    agents = [f"_{agent}" for agent in file.config.agents] or [""]
    roles = {role + agent for role in ("rollout", "policy") for agent in agents}
    assert roles <= set(check(file.config, phases).footprints)
    assert file.config.rollout.vllm.gpu_memory_utilization is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "note: model.dtype=auto takes float32: this machine has no accelerator"),
        (
            ["--device-memory=24GB"],
            "is expected to take bfloat16: cluster.device_memory=24GB is an accelerator's",
        ),
        (["--on=h100"], "note: model.dtype=auto takes bfloat16: the plan is for h100"),
        (
            ["cluster.address=tcp://10.0.0.1:8786"],
            "is expected to take bfloat16: the cluster's workers are elsewhere",
        ),
    ],
)
def test_a_plan_says_in_which_type_its_models_compute(capsys, digits, arguments, said):
    assert said in planned(capsys, *digits, *arguments)
    assert "model.dtype=auto" not in planned(capsys, *digits, *arguments, "model.dtype=bfloat16")


def test_the_cards_on_which_it_fits_are_named_and_a_cpu_needs_none(capsys, digits):
    text = planned(capsys, *digits)
    assert "workers  roles            24 GB" in text
    assert "Memory of a worker on a CPU" in text
    forced = planned(capsys, *digits, "cluster.device=cpu", "--device-memory=24GB")
    assert "device memory" not in forced
    assert "Memory of a worker on a CPU" in forced
    shared = planned(capsys, *digits, "--device-memory=24GB", "--devices=1")
    assert "on 24.0 GB, which 4 workers share" in shared
    assert "It fits: " in shared
    assert "for a worker with an accelerator" in shared


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device-memory", "24XB"], "cluster.device_memory='24XB': expected a number of bytes"),
        (
            ["--device-memory", "1kB"],
            "cluster.device_memory='1kB': expected at least 1GiB, such as 80GB",
        ),
        (["--devices", "0"], "--devices 0: expected at least 1"),
        (["cluster.device=gpu"], "cluster.device=gpu"),
    ],
)
def test_accelerators_that_are_none_are_refused(capsys, digits, arguments, said):
    assert said in refused(capsys, *digits, *arguments)


def test_a_run_whose_roles_do_not_fit_is_refused_before_the_start_with_what_to_change(
    digits, tmp_path
):
    folder = write_config(tmp_path / "7B", QWEN2_5_7B)
    exact = ["model.dtype=float32", "cluster.device_memory=24GB"]
    file = load_config_file(KL, [*digits, f"model.path={folder}", *exact])
    with pytest.raises(PlanError, match=r"(?s)Workers 0, 1 need .*model\.dtype=bfloat16"):
        check(file.config, plan_phases(file.config, *dags(file), worker_names(file.config)))
    with pytest.raises(PlanError, match=r"accelerator with 24\.0 GB"):
        run(file.config, *dags(file))
    assert not (tmp_path / "run").exists()


def test_json_reads_back_and_agrees_with_the_plan(capsys, digits):
    given = json.loads(planned(capsys, "--format", "json", *digits))
    assert set(given) == {"version", "notes", "warnings", "phases", "memory", "first_prompt"}
    train = given["phases"]["train"]
    assert set(train) == {"prompts", "workers", "placement", "dag", "contracts", "chains", "edges"}
    dag, _ = dags(load_config_file(KL, digits))
    assert dag_from_spec(**train["dag"]) == with_dtype_in_dag(dag, Dtype.float32)
    assert train["workers"] == ["0", "1", "2", "3"]
    assert train["placement"]["rollout"] == ["0", "1"]
    assert train["contracts"]["old_logprobs"] == {
        "reads": ["prompt_ids", "response_ids"],
        "writes": {"old_logprobs": "large_list<item: float>"},
    }
    chain = next(chain for chain in train["chains"] if chain["workers"] == ["3"])
    assert [(link["do"], link["what"]) for link in chain["links"]] == [
        ("receive", "rollout->reference_logprobs"),
        ("run", "reference_logprobs"),
        ("send", "reference_logprobs->advantage"),
    ]
    edges = {(edge["source"], edge["target"]): edge for edge in train["edges"]}
    moved = edges["rollout", "old_logprobs"]
    assert set(moved) == {
        "source", "target", "moves", "rows_policy", "by_minibatch", "by_group", "guide", "columns", "rows", "bytes",
        "unknown",
    }  # fmt: skip
    assert moved["moves"]
    assert moved["columns"] == ["prompt_ids", "response_ids"]
    assert moved["rows"] == 8 * 4
    assert edges["rollout", "reward"]["bytes"] == 0
    assert {tuple(one["workers"]) for one in given["memory"]} == {("0", "1"), ("2",), ("3",)}
    for one in given["memory"]:
        parts = ("process", "checkpoint", "tables", "moving", "computing")
        assert one["total"] == sum(one[part] for part in parts) + sum(one["roles"].values())
    assert set(given["phases"]) == {"train"}  # the digits task has no validation


def test_an_error_in_a_node_names_the_file_and_the_line(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"base: {KL}\nnodes:\n  update:\n    rows: balanced\n    with: {{minibatch: 2}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "siirl_dask.cli", "plan", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {config}:3, over ")
    assert ": node 'update' has no option 'minibatch'" in done.stderr
    assert "did you mean 'minibatches'?" in done.stderr


def test_published_weights_are_shared_by_those_that_publish_them(digits):
    placed = "cluster.placement={rollout: [0], reward: [0], reference: [0], policy: %s}"
    one, many = (
        memories(
            [*digits, "cluster.workers=33", placed % list(range(1, 1 + count)), "data.batch_size=8"]
        )["policy",]
        for count in (1, 32)
    )
    assert (one.largest, one.tables > 2 * many.tables) == ("weights of train", True)


def test_shipped_weights_are_streamed_also_where_a_later_step_loads_them(capsys, digits):
    given = json.loads(planned(capsys, "--format", "json", *digits))["phases"]["train"]
    links = {worker: chain["links"] for chain in given["chains"] for worker in chain["workers"]}
    assert links["2"][-1] == {"do": "give in parts", "what": "weights"}
    assert links["0"][-1] == {"do": "take in parts", "what": "load_weights"}
    late = " ".join(planned(capsys, *digits, "rollout.max_staleness=1").split())
    assert "load_weights, 1 step behind (in parts from weights)" in late
    assert "weights (in parts to load_weights)" in late


def test_a_smaller_bucket_takes_less_memory(digits):
    whole, parts, buffers = (
        memories(
            [*digits, "data.batch_size=2", "rollout.n=2", *(f"rollout.weight_{key}" for key in how)]
        )["policy",]
        for how in (["bucket=1GiB"], ["bucket=8KiB"], ["bucket=8KiB", "sync=broadcast"])
    )
    assert whole.tables > 300_000  # 91k parameters in float32
    assert 140_000 < parts.tables < 290_000  # four of the largest
    assert 68_000 < buffers.tables < 150_000  # two
