"""Estimated seconds of a step: plain arithmetic holds, schedules follow the DAG, the device that
is named is taken.
"""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.cli import main
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.errors import ConfigError
from siirl_dask.estimates.computing_seconds import StepTokens
from siirl_dask.estimates.performance import lengths_of, splits, step_time
from siirl_dask.estimates.speeds import TABLE, speed_of
from siirl_dask.planner import DAG, Phase
from tests.models.configs import QWEN2_5_7B, QWEN3_30B_A3B, write_config

APART = "cluster.placement={rollout: [0, 1, 2, 3], reward: [0, 1, 2, 3], policy: [4, 5, 6, 7]}"
MEAN = StepTokens(300, 800, 2048)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = write_config(tmp_path_factory.mktemp("7b") / "model", QWEN2_5_7B)

    @cache
    def plan(*overrides):
        given = [
            f"model.path={folder}", "model.dtype=bfloat16", "cluster.workers=8", "data.url=none", "data.batch_size=128",
            "rollout.engine=vllm", "rollout.max_response_length=2048", "trainer.backend=fsdp", *overrides,
        ]  # fmt: skip
        file = load_config_file(shipped("dags/grpo.yaml"), given)
        phases = plan_phases(
            file.config, *dags(file), worker_names(file.config), assume_columns=True
        )
        return file.config, phases[Phase.TRAIN][0]

    return plan


def seconds(planned, *overrides, speed=TABLE["h100"], lengths=MEAN):
    return step_time(*planned(*overrides), speed, lengths)


def test_arithmetic_by_hand_gives_the_same(planned):
    """6 FLOPs a parameter and token in an update, 2 in a pass, at 40 % of 989 TFLOP/s on each of
    four H100.
    """
    found = seconds(planned, APART)
    layers, head = 28 * 233_057_792, 152064 * 3584
    tokens, responses = 128 * 8 * 1100 / 4, 128 * 8 * 800 / 4
    # of a prompt's eight samples two are on each of four workers
    computed = responses + 128 * 8 * 300 / 4 / 2
    attention = 2 * 28 * 3584 * 1100  # two products over half of the pairs
    forward = 2 * layers * computed + attention * tokens + 2 * head * responses
    rate = 989e12 * 0.4
    assert found.nodes["old_logprobs"] == pytest.approx(forward / rate, rel=0.01)
    assert found.nodes["update"] == pytest.approx(
        (3 * forward + 2 * head * responses) / rate, rel=0.03
    )
    # 2,048 steps that read 15.2 GB of weights at 60 % of 3.35 TB/s take 15.5 s, and caches and
    # sampling more
    assert 15.5 < found.nodes["rollout"] < 30
    assert found.bottleneck == "update"


def test_log_probs_that_the_engine_tells_take_no_pass(planned):
    own, told = (
        seconds(planned, APART),
        seconds(planned, APART, "algorithm.old_logprobs=siirl_dask.nodes:rollout_logprobs"),
    )
    assert "old_logprobs" not in told.nodes
    assert told.seconds == pytest.approx(own.seconds - own.nodes["old_logprobs"], rel=0.02)


def test_a_step_is_what_its_critical_path_takes(planned):
    apart, together = seconds(planned, APART), seconds(planned, "cluster.placement={}")
    for found in (apart, together):
        moved = sum(sum(moves.values()) for moves in found.moves.values())
        assert found.seconds == pytest.approx(sum(found.nodes.values()) + moved, rel=0.05), (
            "each waits for the one before"
        )
    assert apart.idle["rollout"] + apart.idle["policy"] == pytest.approx(1, abs=0.05)
    assert together.idle["policy"] < 0.05
    ahead = seconds(planned, APART, "rollout.max_staleness=1")
    assert ahead.seconds < apart.seconds, "generation of the next step runs beside training"
    assert ahead.idle["policy"] < 0.05


@settings(max_examples=25)
@given(st.sampled_from(sorted(TABLE)), st.integers(1, 1024), st.integers(1, 2048))
def test_more_tokens_never_take_less_and_a_faster_device_never_more(
    planned, name, prompt, response
):
    config, plan = planned(APART)
    one = step_time(config, plan, TABLE[name], StepTokens(prompt, response, 2048))
    more = step_time(config, plan, TABLE[name], StepTokens(prompt + 100, response, 2048))
    twice = speed_of(
        name, [f"flops={2 * TABLE[name].flops}", f"memory_rate={2 * TABLE[name].memory_rate}"]
    )
    assert more.seconds >= one.seconds
    assert step_time(config, plan, twice, StepTokens(prompt, response, 2048)).seconds <= one.seconds


def test_the_fastest_split_is_proposed_and_sizes_that_do_not_divide_are_left_out(planned):
    config, plan = planned(APART)
    found = splits(config, plan, TABLE["h100"], MEAN)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    here = next(one for one in found if (one.rollout, one.policy) == (4, 4))
    assert here.seconds == pytest.approx(
        step_time(config, plan, TABLE["h100"], MEAN).seconds, rel=0.01
    )
    assert found[0].together
    config, plan = planned(APART, "rollout.tensor_parallel_size=2", "trainer.fsdp.shard_size=4")
    assert {(one.rollout, one.policy) for one in splits(config, plan, TABLE["h100"], MEAN)} == {
        (4, 4),
        (8, 8),
    }


def test_prompts_are_counted_once_for_samples_that_stay_together(planned):
    together = seconds(planned, APART, "rollout.n=32").nodes["update"]
    apart = seconds(
        planned, APART, "rollout.n=32", "algorithm.split_groups=true", "algorithm.minibatches=8"
    )
    whole = seconds(planned, APART, "rollout.n=32", "trainer.fsdp.sequence_parallel=2")
    assert together < apart.nodes["update"]
    assert apart.nodes["update"] == pytest.approx(whole.nodes["update"], rel=0.05)


def test_a_recomputed_pass_and_several_epochs_take_longer(planned):
    plain = seconds(planned, APART).nodes["update"]
    assert seconds(planned, APART, "trainer.gradient_checkpointing=true").nodes[
        "update"
    ] == pytest.approx(4 / 3 * plain, rel=0.05)
    assert seconds(planned, APART, "algorithm.epochs=2").nodes["update"] == pytest.approx(
        2 * plain, rel=0.05
    )


def test_adapters_leave_out_the_gradients_of_frozen_weights_and_travel_alone(planned):
    plain, lora = (
        seconds(planned, APART).nodes,
        seconds(planned, APART, "trainer.lora.rank=16").nodes,
    )
    assert lora["update"] == pytest.approx(2 / 3 * plain["update"], rel=0.05)
    # 40.4 million numbers in float32 instead of 7.6 billion in bfloat16
    for node in ("weights", "load_weights"):
        assert lora[node] == pytest.approx(161.7e6 / 15.23e9 * plain[node], rel=0.01)
    merged = seconds(planned, APART, "trainer.lora.rank=16", "rollout.engine=transformers").nodes
    assert merged["weights"] == lora["weights"]
    assert merged["load_weights"] == plain["load_weights"], (
        "that engine merges adapters into all weights"
    )


def test_muon_multiplies_matrices_and_sends_them_and_has_one_moment(planned):
    """Five iterations of 4 m m n + 2 m m m FLOPs for each matrix [m, n], shared by four workers."""
    layer = [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584)]
    layer += [(3584, 18944), (3584, 18944), (3584, 18944)]
    flops = 28 * sum(5 * (4 * m * m * n + 2 * m * m * m) for m, n in layer)
    parameters = 28 * sum(m * n for m, n in layer)
    computed = flops / 4 / (989e12 * 0.4)
    # rows of whole matrices come together and go back, in float32: three quarters of a worker's
    sent = 2 * 4 * parameters / 4 * 3 / 4 / 450e9
    spared = 8 * parameters / 4 / 3.35e12
    adamw = seconds(planned, APART).nodes["update"]
    muon = seconds(planned, APART, "trainer.optimizer=muon").nodes["update"]
    assert muon - adamw == pytest.approx(computed + sent - spared, rel=1e-3)
    twice = seconds(planned, APART, "trainer.optimizer=muon", "algorithm.minibatches=2")
    more = seconds(planned, APART, "algorithm.minibatches=2").nodes["update"]
    assert twice.nodes["update"] - more == pytest.approx(2 * (muon - adamw), rel=1e-3)


def test_a_head_in_float32_multiplies_at_the_rate_of_float32(planned):
    wide = "model.float32_head=true"
    head = 2 * 152064 * 3584 * 128 * 8 * 800 / 4  # FLOPs of a worker's response tokens
    slower = head * (1 / 67e12 - 1 / 989e12) / 0.4
    plain = seconds(planned, APART).nodes
    found = seconds(planned, APART, wide).nodes
    assert found["old_logprobs"] - plain["old_logprobs"] == pytest.approx(slower, rel=1e-3)
    # forward, backward twice, and once more to have the logits again
    assert found["update"] - plain["update"] == pytest.approx(4 * slower, rel=1e-3)
    # vLLM multiplies in bfloat16 and adds up in float32; the transformers engine widens the head
    assert found["rollout"] == plain["rollout"]
    own = "rollout.engine=transformers"
    assert (
        seconds(planned, APART, own, wide).nodes["rollout"]
        > seconds(planned, APART, own).nodes["rollout"]
    )
    in_float32 = ("model.dtype=float32", APART)
    assert seconds(planned, *in_float32, wide).nodes == seconds(planned, *in_float32).nodes


def test_a_mixture_computes_with_the_experts_that_are_chosen_and_reads_those_that_any_token_chooses(
    planned, tmp_path
):
    """30.5 billion parameters, of which 3.04 billion compute a token, 0.3 billion of them in the
    head.
    """
    mixture = f"model.path={write_config(tmp_path / 'model', QWEN3_30B_A3B)}"
    one = seconds(planned, APART, mixture).nodes
    layers, head = (
        48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048 + 8 * 3 * 2048 * 768),
        151936 * 2048,
    )
    responses, whole = 128 * 8 * 800 / 4, 128 * 8 * 1100 / 4
    computed = responses + 128 * 8 * 300 / 4 / 2
    forward = 2 * layers * computed + 2 * 48 * 4096 * 1100 * whole + 2 * head * responses
    assert one["old_logprobs"] > forward / (989e12 * 0.4)
    arithmetic = seconds(planned, APART, mixture, speed=speed_of("h100", ["link=1e15"])).nodes[
        "old_logprobs"
    ]
    assert arithmetic == pytest.approx(forward / (989e12 * 0.4), rel=0.02)
    # with one row at a time a token reads 6.08 GB instead of 60.4 GB
    alone = seconds(
        planned, APART, mixture, "data.batch_size=4", "rollout.n=1", lengths=StepTokens(1, 100, 100)
    )
    crowd = seconds(
        planned,
        APART,
        mixture,
        "data.batch_size=512",
        "rollout.n=1",
        lengths=StepTokens(1, 100, 100),
    )
    rate = TABLE["h100"].memory_rate * TABLE["h100"].decoding
    assert alone.nodes["rollout"] == pytest.approx(
        100 * (6.08e9 / rate + TABLE["h100"].step), rel=0.01
    )
    assert crowd.nodes["rollout"] > 100 * 60e9 / rate


def test_this_machines_cpu_is_measured_within_what_any_cpu_does():
    speed = speed_of("cpu")
    assert 1e8 < speed.flops < 1e13
    assert 1e8 < speed.memory_rate < 1e12
    assert 1e-7 < speed.operation < 1e-3
    assert speed.cores >= 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--on", "h1000"],
            "--on h1000: expected one of cpu, h100, h200, a100, 4090, 910b; did you mean 'h100'?",
        ),
        (["--on", "h100", "--figure", "flop=4"], "--figure flop=4: expected one of flops"),
        (
            ["--on", "h100", "--figure", "flops=many"],
            "--figure flops=many: expected a number above 0",
        ),
        (["--on", "h100", "--figure", "link=0"], "--figure link=0: expected a number above 0"),
        (
            ["--on", "h100", "--tokens", "300"],
            "--tokens 300: expected mean tokens of a prompt and of a response",
        ),
        (["--on", "h100", "--tokens", "300,0"], "--tokens 300,0: expected mean tokens"),
        (["--on", "h100", "--tokens", "10,99999"], "expected at most data.max_prompt_length=32"),
        (["--tokens", "10,10"], "--tokens and --figure belong to --on"),
    ],
)
def test_options_that_are_none_are_refused(capsys, arguments, said):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(shipped("quickstart.yaml")), *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_the_plan_tells_seconds_as_text_and_as_json(capsys, tmp_path):
    folder = write_config(tmp_path / "model", QWEN2_5_7B)
    asked = [
        "plan",
        str(shipped("quickstart.yaml")),
        f"model.path={folder}",
        "--on",
        "a100",
        "--figure",
        "training=0.5",
    ]
    main(asked)
    text = capsys.readouterr().out.split("== time ==")[1]
    assert (
        "On A100 SXM 80GB (NVIDIA A100 data sheet; training=0.5 by --figure), rows of 32 + 12 "
        "tokens" in text
    )
    for word in ("Longest: ", "Idle: rollout ", "Splits of the workers", "generate, "):
        assert word in text
    main([*asked, "--format", "json"])
    data = json.loads(capsys.readouterr().out)["time"]
    assert set(data) == {"device", "seconds", "nodes", "moves", "idle", "bottleneck", "splits"}
    assert data["bottleneck"] in data["nodes"]
    main(
        ["plan", str(shipped("quickstart.yaml")), "--on", "h100", f"model.path={tmp_path}/nowhere"]
    )
    assert "not known, since the size of a model is not" in capsys.readouterr().out


def test_lengths_are_the_longest_unless_they_are_given(planned):
    config, _ = planned()
    assert lengths_of(config, None) == StepTokens(1024, 2048, 2048)
    assert lengths_of(config, "300,800") == MEAN
    with pytest.raises(ConfigError, match="--tokens 1e3,5"):
        lengths_of(config, "1e3,5")


@pytest.mark.parametrize("name", ["grpo", "grpo_kl", "turns"])
def test_a_step_takes_as_long_in_whatever_order_its_nodes_are_written(planned, name):
    path = planned(APART)[0].model.path
    file = load_config_file(shipped(f"dags/{name}.yaml"), [f"model.path={path}", "data.url=none"])
    dag, _ = dags(file)
    found = []
    for nodes in (dag.ordered(), dag.ordered()[::-1]):
        graph = DAG(dag.roles, nodes)
        phases = plan_phases(
            file.config, graph, None, worker_names(file.config), assume_columns=True
        )
        found.append(
            step_time(file.config, phases[Phase.TRAIN][0], TABLE["h100"], StepTokens(16, 16, 16))
        )
    first, second = found
    assert second.seconds == pytest.approx(first.seconds)
    assert second.idle == pytest.approx(first.idle)
    assert second.nodes == pytest.approx(first.nodes)
