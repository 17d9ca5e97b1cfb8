"""Rotary frequencies that would follow the longest row of a pass are the same for all rows of a
run.
"""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from siirl_dask.cli import main
from siirl_dask.config import Backend, Config, DataConfig, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.config.file import shipped
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.models.longest_row import check_frequencies_are_pinned, check_longest_row
from siirl_dask.models.rotary import pin_frequencies
from siirl_dask.rollout import Sampling
from siirl_dask.rollout.sglang_engine.frequencies import check_frequencies_of_sglang
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.rollout.vllm_engine.other_logprobs import check_engine_length, engine_length
from siirl_dask.runs.folder import RunIdentity
from siirl_dask.tasks.tiny_model import VOCABULARY, tiny_model
from siirl_dask.testing.reference_model import pack_samples, plain_scores
from siirl_dask.testing.rows import random_rows
from siirl_dask.training import build_critic, build_reference, build_trainer
from tests.conftest import digits_overrides

LONG = {"short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 48.0]}
ORIGINAL = "original_max_position_embeddings"
LONGROPE = {
    "phi3 of transformers 4": {"rope_scaling": {"type": "longrope", **LONG}, ORIGINAL: 32},
    "phi3 of 2024": {"rope_scaling": {"type": "su", **LONG}, ORIGINAL: 32},
    "phi3 of transformers 5": {"rope_parameters": {"rope_type": "longrope", ORIGINAL: 32, **LONG}},
    "a decoder that sees images": {
        "text_config": {"rope_scaling": {"type": "longrope"}, ORIGINAL: 32}
    },
    "one kind of layers": {
        "rope_parameters": {"full_attention": {"rope_type": "longrope", ORIGINAL: 32}}
    },
}
NEVER_PINNED = {
    "dynamic": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        "max_position_embeddings": 32,
    },
    "phimoe": {
        "rope_scaling": {"type": "longrope", **LONG, "short_mscale": 1.2, "long_mscale": 1.3},
        ORIGINAL: 32,
    },
}
ALIKE = [
    {"rope_parameters": {"rope_type": "llama3", ORIGINAL: 32}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 32}},
    {"rope_scaling": None, "rope_theta": 1000000.0},
    {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
]
BACKENDS = [Backend.torch, Backend.fsdp]


def written(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096} | config))
    return str(folder)


@pytest.mark.parametrize(
    "config", [*LONGROPE.values(), *NEVER_PINNED.values()], ids=[*LONGROPE, *NEVER_PINNED]
)
def test_a_model_that_no_longest_row_is_given_takes_rows_of_its_original_context(config, tmp_path):
    model = ModelConfig(path=written(tmp_path, config))
    check_longest_row(model, 32)
    with pytest.raises(ConfigError, match=r"have up to 33 .* longest_row: \$\{model.longest_row\}"):
        check_longest_row(model, 33)


@pytest.mark.parametrize("config", LONGROPE.values(), ids=LONGROPE)
def test_rows_beyond_those_that_frequencies_are_pinned_for_are_refused(config, tmp_path):
    model = ModelConfig(path=written(tmp_path, config), longest_row=40)
    check_longest_row(model, 40)
    check_frequencies_are_pinned(model)
    with pytest.raises(
        ConfigError, match=r"pinned for model.longest_row=40, .* is 41: expected at most"
    ):
        check_longest_row(model, 41)


@pytest.mark.parametrize("config", NEVER_PINNED.values(), ids=NEVER_PINNED)
def test_frequencies_that_nothing_pins_are_refused_beyond_the_original_context(config, tmp_path):
    path = written(tmp_path, config)
    check_frequencies_are_pinned(ModelConfig(path=path, longest_row=32))
    with pytest.raises(ConfigError, match=r"max_response_length\) is 33: expected at most 32"):
        check_frequencies_are_pinned(ModelConfig(path=path, longest_row=33))


@pytest.mark.parametrize("config", ALIKE, ids=json.dumps)
def test_frequencies_that_are_the_same_for_all_rows_are_no_limit(config, tmp_path):
    for path in (written(tmp_path, config), str(tmp_path / "nothing")):
        check_longest_row(ModelConfig(path=path, longest_row=1), 10**6)
        check_engine_length(ModelConfig(path=path, longest_row=1), 10)
        model = ModelConfig(path=path, longest_row=10**6)
        check_frequencies_are_pinned(model)
        check_frequencies_of_sglang(model)
        assert engine_length(model) is None


BLOCKS = {"index_block_size": 8, "index_topk_blocks": 4}
SPARSE = {"model_type": "minimax_m3_vl_text", "num_hidden_layers": 2}
PUBLISHED = {"sparse_block_size": 8, "sparse_topk_blocks": 4, "sparse_attention_freq": [0, 1]}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "deepseek_v32", "index_topk": 32},
        {"model_type": "glm5", "text_config": {"index_topk": 32}},
        {**SPARSE, **BLOCKS, "layer_types": ["full_attention", "minimax_m3_sparse"]},
        {
            "model_type": "minimax_m3_vl",
            "text_config": {**SPARSE, "sparse_attention_config": PUBLISHED},
        },
    ],
)
def test_rows_longer_than_what_an_indexer_chooses_of_are_refused(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig(path=str(tmp_path))
    check_longest_row(model, 32)
    with pytest.raises(ConfigError, match=r"a token sees 32 .* is 33, expected at most 32"):
        check_longest_row(model, 33)


def test_layers_that_all_see_all_tokens_are_no_limit_where_others_could_choose_blocks(tmp_path):
    layers = ["full_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps({**SPARSE, **BLOCKS, "layer_types": layers}))
    check_longest_row(ModelConfig(path=str(tmp_path)), 10**6)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_positions": 32},
        {"model_type": "opt", "max_position_embeddings": 32},
        {"model_type": "mpt", "max_seq_len": 32},
    ],
)
def test_rows_behind_the_end_of_a_table_of_positions_are_refused(config, tmp_path):
    """Else the first row that is as long ends the run with an error of a kernel."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig(path=str(tmp_path))
    check_longest_row(model, 32)
    with pytest.raises(ConfigError, match=r"it has 32 positions .* is 33: expected at most that"):
        check_longest_row(model, 33)


def test_vllm_is_given_the_longest_row_by_which_it_takes_the_trainers_factors(tmp_path):
    longrope = written(tmp_path / "longrope", LONGROPE["phi3 of transformers 5"])
    assert engine_length(ModelConfig(path=longrope, longest_row=48)) == 48
    assert engine_length(ModelConfig(path=longrope, longest_row=20)) == 20
    dynamic = written(tmp_path / "dynamic", NEVER_PINNED["dynamic"])
    assert engine_length(ModelConfig(path=dynamic, longest_row=20)) is None, (
        "vLLM has one base for all lengths"
    )


@pytest.mark.parametrize(("longest", "length"), [(48, 32), (32, 48)])
def test_a_length_of_vllm_on_the_other_side_of_the_original_context_is_refused(
    longest, length, tmp_path
):
    model = ModelConfig(
        path=written(tmp_path, LONGROPE["phi3 of transformers 5"]), longest_row=longest
    )
    check_engine_length(model, longest)
    with pytest.raises(ConfigError, match=f"max_model_len={length}: .* on the other side of 32"):
        check_engine_length(model, length)


def test_sglang_which_looks_at_each_pass_gets_no_rows_beyond_the_original_context(tmp_path):
    path = written(tmp_path, LONGROPE["phi3 of transformers 5"])
    check_frequencies_of_sglang(ModelConfig(path=path, longest_row=32))
    with pytest.raises(ConfigError, match="no option of SGLang pins"):
        check_frequencies_of_sglang(ModelConfig(path=path, longest_row=33))


def test_the_longest_row_of_a_run_is_that_of_its_prompts_and_longest_responses():
    rollout = RolloutConfig(max_response_length=30)
    assert Config(data=DataConfig(max_prompt_length=20), rollout=rollout).model.longest_row == 50
    given = ModelConfig(longest_row=70)
    assert (
        Config(
            data=DataConfig(max_prompt_length=20), rollout=rollout, model=given
        ).model.longest_row
        == 70
    )
    with pytest.raises(ConfigError, match=r"model\.longest_row=0"):
        ModelConfig(longest_row=0)


def test_a_run_that_recorded_no_longest_row_goes_on(tmp_path):
    def identity(longest):
        return RunIdentity(
            {}, {"roles": {"policy": {"with": {"model": {"path": "m", "longest_row": longest}}}}}
        )

    assert not identity(None).differences(identity(50))
    assert identity(40).differences(identity(50)) == [
        "DAG: roles.policy.with.model.longest_row: 40 -> 50"
    ]


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    base = tiny_model(tmp_path_factory.mktemp("models") / "phi")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0, ORIGINAL: 32, **LONG}
    sizes[ORIGINAL] = 32
    config = Phi3Config(
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        rope_parameters=rope,
        pad_token_id=256,
        eos_token_id=257,
        **sizes,
    )
    torch.manual_seed(0)
    model = Phi3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.12)  # as sharp as a trained one
    model.save_pretrained(base)
    return base


@pytest.fixture(scope="module")
def by_hand(phi):
    """Return the model of ``phi`` with long factors whatever the rows are, as (1 / factor) /
    base^(2i / 16).
    """
    model = AutoModelForCausalLM.from_pretrained(phi).eval()
    rotary = model.model.rotary_emb
    rotary.rope_type = "default"
    rotary.inv_freq = 1 / (torch.tensor(LONG["long_factor"]) * 1e4 ** (torch.arange(0, 16, 2) / 16))
    return model


def test_a_longer_row_in_a_pass_does_change_the_frequencies_of_transformers(phi):
    """Where this fails, transformers has other frequencies for each row, and nothing need be
    pinned.
    """
    model = AutoModelForCausalLM.from_pretrained(phi).eval()
    row = torch.arange(10)
    with torch.no_grad():
        alone = model(row[None]).logits[0]
        beside = model(
            torch.cat([row, torch.arange(40)])[None],
            position_ids=torch.cat([row, torch.arange(40)])[None],
        )
    assert (alone - beside.logits[0, :10]).abs().max() > 1e-4


@pytest.mark.parametrize("longest", [32, 33])
def test_all_places_have_the_cosines_that_transformers_computes_for_the_longest_row(phi, longest):
    model = AutoModelForCausalLM.from_pretrained(phi)
    pin_frequencies(model, longest, "model")
    frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](
        model.config, torch.device("cpu"), seq_len=longest
    )
    for places in (torch.arange(5), torch.arange(longest)):
        cos, sin = model.model.rotary_emb(torch.zeros(1), places[None])
        angles = (places[:, None] * frequencies).repeat(1, 2)
        assert torch.equal(cos[0], angles.cos() * scale)
        assert torch.equal(sin[0], angles.sin() * scale)


def test_each_kind_of_layers_is_pinned_by_itself():
    far = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, ORIGINAL: 32, **LONG}
    near = {"rope_type": "default", "rope_theta": 1e4}
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"full_attention": far, "sliding_attention": near},
    )
    model = Gemma3ForCausalLM(config)
    rotary = model.model.rotary_emb
    before = rotary.sliding_attention_inv_freq.clone()
    pin_frequencies(model, 40, "model")
    cos, _ = rotary(torch.zeros(1), torch.arange(3)[None], "full_attention")
    frequencies = 1 / (torch.tensor(LONG["long_factor"]) * 1e4 ** (torch.arange(0, 16, 2) / 16))
    scale = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=40, layer_type="full_attention")[
        1
    ]
    torch.testing.assert_close(cos[0, 2, :8], (2 * frequencies).cos() * scale)
    assert torch.equal(rotary.sliding_attention_inv_freq, before)


def test_a_module_that_computes_its_own_frequencies_is_refused_and_not_believed():
    class Stubborn(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = Phi3Config(
                rope_parameters={"rope_type": "longrope", ORIGINAL: 4096, "rope_theta": 1e4}
                | {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
            )
            self.rope_type = "longrope"
            self.register_buffer("inv_freq", torch.ones(48))

        def forward(self, x, position_ids):
            cos = (position_ids[..., None] * position_ids.max()).float().cos()
            return cos, cos

    pin_frequencies(Stubborn(), 4096, "model")
    with pytest.raises(ConfigError, match=r"model:  \(Stubborn\) .* cannot be pinned"):
        pin_frequencies(Stubborn(), 4097, "model")


def test_rows_longer_than_the_context_of_dynamic_frequencies_are_refused_by_who_loads(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    model = Phi3ForCausalLM(
        Phi3Config(vocab_size=64, max_position_embeddings=32, pad_token_id=0, **sizes)
    )
    model.model.rotary_emb.rope_type = "dynamic"
    model.config.rope_parameters = rope
    pin_frequencies(model, 32, "model")
    with pytest.raises(ConfigError, match="cannot be pinned"):
        pin_frequencies(model, 33, "model")


LENGTHS = [(5, 9), (5, 3), (2, 1), (3, 15), (5, 40), (20, 30)]


def trainer_of(build, phi, backend=Backend.torch, budget=16384, **options):
    trainer = TrainerConfig(backend=backend, lr=1e-3, max_tokens_per_micro_batch=budget)
    return build(
        Device("w0"),
        Rank(),
        model=ModelConfig(path=str(phi), longest_row=50),
        trainer=trainer,
        **options,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("build", [build_trainer, build_reference])
def test_log_probs_are_those_of_each_row_by_itself_in_the_pinned_model(
    phi, by_hand, build, backend
):
    rows = random_rows(LENGTHS)
    expected = plain_scores(by_hand, rows, 1.0).logprobs
    scores = trainer_of(build, phi, backend, rollout=RolloutConfig()).logprobs(rows)
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs_do_not_depend_on_how_rows_are_packed(phi, backend):
    rows = random_rows(LENGTHS)
    whole = trainer_of(build_trainer, phi, backend, rollout=RolloutConfig()).logprobs(rows).logprobs
    for budget in (1, 30, 64, 100):
        cut = (
            trainer_of(build_trainer, phi, backend, budget, rollout=RolloutConfig())
            .logprobs(rows)
            .logprobs
        )
        torch.testing.assert_close(cut, whole, atol=1e-5, rtol=0)


def test_a_critic_values_a_row_as_it_does_alone(phi):
    from siirl_dask.training.critic import ValueCritic

    critic = trainer_of(build_critic, phi)
    assert isinstance(critic, ValueCritic)
    with torch.no_grad():
        critic._network.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    alone, beside = critic.values(random_rows(LENGTHS[:1])), critic.values(random_rows(LENGTHS))
    torch.testing.assert_close(alone, beside[: len(alone)], atol=1e-5, rtol=0)


@pytest.mark.parametrize("own_loop", [True, False])
def test_samples_that_cross_the_limit_have_the_trainers_log_probs(phi, own_loop, monkeypatch):
    if not own_loop:
        monkeypatch.setattr(
            "siirl_dask.rollout.transformers_engine.engine.use_decoding", lambda model: False
        )
    engine = TransformersEngine(ModelConfig(path=str(phi), longest_row=50))
    prompts = [[7], [1, 2, 3], list(range(11))]
    samples = engine.generate(prompts, range(3), Sampling(temperature=1.0, max_tokens=35))
    assert (
        max(
            len(prompt) + len(sample.token_ids)
            for prompt, sample in zip(prompts, samples, strict=True)
        )
        > 32
    )
    sampled = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
    trainer = trainer_of(build_trainer, phi, rollout=RolloutConfig())
    trained = trainer.logprobs(pack_samples(prompts, samples)).logprobs
    torch.testing.assert_close(sampled, trained, atol=1e-5, rtol=0)


def test_the_folder_is_read_and_not_written_and_an_export_has_its_config(phi, tmp_path):
    from siirl_dask.config import Dtype
    from siirl_dask.training.files.hugging_face import write_hugging_face

    before = {file.name: file.read_bytes() for file in phi.iterdir()}
    trainer = trainer_of(build_trainer, phi, rollout=RolloutConfig())
    write_hugging_face(tmp_path, dict(trainer.weights()), str(phi), Dtype.float32)
    assert {file.name: file.read_bytes() for file in phi.iterdir()} == before
    base, exported = (
        json.loads((folder / "config.json").read_text()) for folder in (phi, tmp_path)
    )
    assert exported["rope_parameters"] == base["rope_parameters"]
    assert set(trainer.state()["model"]) == {name for name, _ in trainer.weights()}, (
        "a checkpoint has no buffers"
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_plan_takes_long_rows_for_phi_and_refuses_those_beyond_a_given_longest_row(
    phi, digits_task, tmp_path, backend, capsys
):
    more = [f"model.path={phi}", f"trainer.backend={backend}", "data.max_prompt_length=20"]
    command = [
        "plan",
        str(shipped("quickstart")),
        *digits_overrides(digits_task, tmp_path / "run"),
        *more,
    ]
    main([*command, "rollout.max_response_length=30"])
    with pytest.raises(SystemExit):
        main([*command, "rollout.max_response_length=30", "model.longest_row=49"])
    assert "pinned for model.longest_row=49" in capsys.readouterr().err
