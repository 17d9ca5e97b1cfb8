"""``siirl-dask export``: the Hugging Face folder holds the trainer's model, for transformers,
vLLM and peft.
"""

import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from siirl_storage import open_fs
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.hub import CHAT_TEMPLATE_DIR

from siirl_dask.cli import main
from siirl_dask.config import Dtype, Engine, ModelConfig, RolloutConfig, VllmConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Device, Rank
from siirl_dask.driver.phases import dags, model_versions
from siirl_dask.errors import CheckpointError, ConfigError
from siirl_dask.models.shapes import description_digests, weights_digest
from siirl_dask.rollout import Sampling, build_engine
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoint_model import write_checkpoint
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import Checkpoints, checkpoint_url, find_checkpoint
from siirl_dask.runs.export import export
from siirl_dask.runs.folder import write_identity
from siirl_dask.runs.whole_checkpoint import with_whole_checkpoint
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.reference_model import load_model, response_logprobs
from siirl_dask.testing.rows import LENGTHS, random_rows, split_rows
from siirl_dask.training import build_trainer
from siirl_dask.training.files import hugging_face
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from tests.conftest import digits_overrides
from tests.training.families import written

ROWS = random_rows(LENGTHS)
KINDS = {
    "tied": ({}, []),
    "untied": ({"tied": False}, []),
    "experts": ({"family": "qwen3_moe"}, []),
    "adapters": ({}, ["trainer.lora.rank=4"]),
}
BIASED = ("glm4_moe", "deepseek_v3")
"""Families whose experts have biases, which are buffers."""


@pytest.fixture
def run(request, digits_task, tmp_path):
    """The folder of a run with checkpoints of steps 1 and 2, and the trainer as it was at step
    2.
    """
    kind = getattr(request, "param", "tied")
    url, base = str(tmp_path / "run"), tmp_path / "base"
    if kind in BIASED:
        written(base, kind)
        options = []
    else:
        model, options = KINDS[kind]
        tiny_model(base, **model)
    more = [f"model.path={base}", "trainer.ema_decay=0.9", *options]
    file = load_config_file(
        shipped("quickstart.yaml"), [*digits_overrides(digits_task, url), *more]
    )
    config = file.config
    write_identity(config, dags(file)[0], replace=False, models=model_versions(config))
    trainer = build_trainer(
        Device("w"), Rank(), model=config.model, trainer=config.trainer, rollout=config.rollout
    )
    attempt = take(url, 30.0, print)
    checkpoints = Checkpoints(attempt=attempt, keep=9)
    for step in (1, 2):
        for number, weight in enumerate(trainer.state()["model"].values()):
            weight += 0.02 * torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(number)
            )
        commit(checkpoints, step, "policy", trainer)
    return url, base, trainer


def commit(checkpoints, step, role, trainer):
    folder = checkpoints.folder(step)
    saving = DistributedCheckpoint(asynchronous=False)
    saved = saving.save(f"{folder}/{role}", trainer.state(), None).result()
    files = {f"{role}/{name}": digest for name, digest in saved.items()}
    checkpoints.commit(folder, CheckpointState(step=step, roles=[role]), files)


@pytest.mark.parametrize("run", ["tied", "untied", "experts"], indirect=True)
def test_the_exported_folder_gives_the_trainers_log_probabilities(run, tmp_path):
    url, base, trainer = run
    assert export(url, str(tmp_path / "out")) == 2
    model = load_model(tmp_path / "out")
    with torch.no_grad():
        given = [
            response_logprobs(model, row[:n].tolist(), row[n:].tolist())
            for row, n in split_rows(ROWS)
        ]
    assert (torch.cat(given) - trainer.logprobs(ROWS).logprobs).abs().max() < 1e-6
    for name, weight in trainer.weights():
        assert torch.equal(model.get_parameter(name), weight), name
    assert GenerationConfig.from_pretrained(tmp_path / "out") == GenerationConfig.from_pretrained(
        base
    )
    text = "Sort: 3 1 2 = \n"
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (base, tmp_path / "out")]
    assert tokenizers[0](text) == tokenizers[1](text)
    assert tokenizers[0].eos_token_id == tokenizers[1].eos_token_id


@pytest.mark.parametrize("run", KINDS, indirect=True)
def test_vllm_and_transformers_agree_on_the_exported_model(run, tmp_path):
    pytest.importorskip(
        "vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it"
    )
    url, base, _ = run
    export(url, str(tmp_path / "out"))
    prompts = [row[:n].tolist() for row, n in split_rows(ROWS)]
    rollout = RolloutConfig(engine=Engine.vllm, vllm=VllmConfig(kv_cache_memory="64MiB"))
    engine = build_engine(
        Device("w"), Rank(), model=ModelConfig(path=str(tmp_path / "out")), rollout=rollout
    )
    try:
        samples = engine.generate(prompts, range(len(prompts)), Sampling(max_tokens=12))
    finally:
        engine.close()
    said = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
    for folder, least, most in ((tmp_path / "out", 0.0, 1e-4), (base, 1e-2, 100.0)):
        model = load_model(folder)
        with torch.no_grad():
            scored = [
                response_logprobs(model, p, s.token_ids)
                for p, s in zip(prompts, samples, strict=True)
            ]
        assert least <= (torch.cat(scored) - said).abs().max() < most, folder


def test_step_average_and_dtype_are_what_is_asked_for(run, tmp_path):
    url, base, trainer = run
    export(url, str(tmp_path / "first"), step=1)
    first = load_model(tmp_path / "first")
    assert not any(
        torch.equal(first.get_parameter(name), weight) for name, weight in trainer.weights()
    )
    export(url, str(tmp_path / "ema"), ema=True)
    # no optimiser step has moved it
    average, began = (load_model(tmp_path / "ema"), load_model(base))
    assert all(
        torch.equal(average.get_parameter(name), weight)
        for name, weight in began.named_parameters()
    )
    main(["export", url, str(tmp_path / "short"), "--dtype", "bfloat16"])
    stored = load_file(tmp_path / "short" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    short = AutoModelForCausalLM.from_pretrained(tmp_path / "short")
    assert all(
        torch.equal(short.get_parameter(name), weight.bfloat16())
        for name, weight in trainer.weights()
    )


@pytest.mark.parametrize("run", ["experts", "adapters"], indirect=True)
def test_verify_loads_what_was_written_and_leaves_nothing_where_it_is_another_model(
    run, tmp_path, capsys
):
    url, base, _ = run
    out = tmp_path / "out"
    config = json.loads((base / "config.json").read_text())
    recorded_by_an_earlier_version(url)
    # refused by transformers
    (base / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    main(["export", url, str(out), "--verify", "--dtype", "bfloat16"])
    assert (
        capsys.readouterr().out
        == f"policy of step 2 is in {out}, and gives the log-probs of its weights\n"
    )
    assert (out / "generation_config.json").read_bytes() == (
        base / "generation_config.json"
    ).read_bytes()
    assert json.loads((out / "config.json").read_text()) == config | {"dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="leave out --verify, or --adapter"):
        export(url, str(tmp_path / "adapter"), verify=True, adapter=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            hugging_face, "_set_dtype", lambda config, dtype: config.update(rms_norm_eps=1.0)
        )
        with pytest.raises(
            ConfigError, match="what was written is another model: its log-probs differ by"
        ):
            export(url, str(tmp_path / "other"), dtype=Dtype.float32, verify=True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("run", BIASED, indirect=True)
@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_verify_finds_biases_of_experts_that_are_not_the_bases(run, dtype, tmp_path):
    url, base, _ = run
    export(url, str(tmp_path / "out"), dtype=dtype, verify=True)
    biases = {
        name: each
        for name, each in load_file(base / "model.safetensors").items()
        if "correction_bias" in name
    }
    name = min(biases)
    planted = {
        f"{name} differs by .* from the base's": {name: torch.zeros_like(biases[name])},
        rf"its weights lack \['{name}": {name: None},
    }
    buffers_of_base = hugging_face._buffers_of
    for said, fault in planted.items():

        def wrong(folder, model, fault=fault):
            buffers = buffers_of_base(folder, model) | fault
            return {name: buffer for name, buffer in buffers.items() if buffer is not None}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hugging_face, "_buffers_of", wrong)
            with pytest.raises(ConfigError, match=said):
                export(url, str(tmp_path / "other"), dtype=dtype, verify=True)
        assert not (tmp_path / "other").exists()


def recorded_by_an_earlier_version(url):
    """Take what a run's record has of the files of its models, but for weights, out of it."""
    record = Path(url) / "identity.json"
    document = json.loads(record.read_text())
    document["model_files"] = {}
    record.write_text(json.dumps(document))


def with_other_weights(base):
    """Replace the weights of a folder by others of the same shapes."""
    file = base / "model.safetensors"
    tensors = {name: tensor + 0.01 for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("run", ["adapters"], indirect=True)
def test_adapters_are_merged_with_the_weights_that_they_learned_on_alone(run, tmp_path):
    url, base, _ = run
    original = (base / "model.safetensors").read_bytes()
    with_other_weights(base)
    for verify in (False, True):
        with pytest.raises(ConfigError, match="has other weights than when run"):
            export(url, str(tmp_path / "out"), verify=verify)
    assert not (tmp_path / "out").exists()
    export(url, str(tmp_path / "adapter"), adapter=True)
    (base / "model.safetensors").write_bytes(original)
    export(url, str(tmp_path / "out"), verify=True)


@pytest.mark.parametrize("run", ["tied"], indirect=True)
def test_a_model_that_learned_whole_needs_no_weights_of_its_base(run, tmp_path):
    url, base, _ = run
    with_other_weights(base)
    export(url, str(tmp_path / "out"), verify=True)
    record = Path(url) / "identity.json"
    document = json.loads(record.read_text())
    assert [*document["models"]] == ["model.path"]
    del document["models"], document["model_files"]
    record.write_text(json.dumps(document))
    export(url, str(tmp_path / "earlier"))  # a run of an earlier version has recorded none


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_base_whose_config_or_tokenizer_was_replaced_is_not_given_to_the_weights(
    run, name, tmp_path, caplog
):
    url, base, _ = run
    (base / "README.md").write_text("says nothing of the weights")
    original = None
    if (base / name).exists():
        original = (base / name).read_text()
    if name == "config.json":
        changed = json.loads((base / name).read_text())
        changed["rope_parameters"]["rope_theta"] = 77.0
        (base / name).write_text(json.dumps(changed))
    else:
        (base / name).write_text((original or "") + " ")
    said = rf"model\.path=.* has another {name} than when run .* was started.*bring back"
    for verify in (False, True):
        with pytest.raises(ConfigError, match=said):
            export(url, str(tmp_path / "out"), verify=verify)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=said):  # as eval does
        write_checkpoint(url, str(tmp_path / "eval"), find_checkpoint(url, 2))
    if original is None:
        (base / name).unlink()
    else:
        (base / name).write_text(original)
    export(url, str(tmp_path / "out"), verify=True)
    assert "has not recorded" not in caplog.text
    recorded_by_an_earlier_version(url)
    (base / name).write_text((original or "") + "\n")
    export(url, str(tmp_path / "earlier"))
    (said,) = [record.message for record in caplog.records if "recorded" in record.message]
    assert said.startswith("the run has not recorded config and tokenizer of model.path")


@pytest.mark.parametrize("at_url", [False, True])
def test_a_model_is_known_by_what_says_how_its_weights_are_used_and_by_no_other_file(
    tmp_path, at_url
):
    url = f"memory://{uuid4().hex}" if at_url else str(tmp_path)
    fs, path = open_fs(url)
    assert description_digests(url) == {}
    described = [
        f"{CHAT_TEMPLATE_DIR}/tools.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "tokenizer.model",
    ]
    others = ["README.md", "eval_results.json", "model.safetensors.index.json", "tokenization_x.py"]
    for name in (*described, *others):
        fs.makedirs(f"{path}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{path}/{name}", b"one")
    digests = description_digests(url)
    assert [*digests] == described
    for name in (*described, *others):
        fs.pipe_file(f"{path}/{name}", b"other")
    now = description_digests(url)
    assert [name for name in described if now[name] == digests[name]] == []


@pytest.mark.parametrize("run", ["untied"], indirect=True)
def test_each_tensor_has_the_type_that_it_has_in_the_bases_files(run, tmp_path):
    """As norms and routers of float32 in a model of bfloat16; a finer type of the run stays."""
    url, base, trainer = run
    file = base / "model.safetensors"
    kept = ("norm.weight", "layers.0.mlp.down_proj.weight")
    mixed = {
        name: tensor if name.endswith(kept) else tensor.bfloat16()
        for name, tensor in load_file(file).items()
    }
    save_file(mixed, file, {"format": "pt"})
    in_float32 = {name for name in mixed if name.endswith(kept)}
    config = (base / "config.json").read_text()
    written = {}
    for dtype in (Dtype.bfloat16, Dtype.float32):
        record = Path(url, "config.yaml")
        record.write_text(re.sub("(?m)^  dtype: .*", f"  dtype: {dtype}", record.read_text()))
        export(url, str(tmp_path / dtype), verify=True)
        written[dtype] = load_file(tmp_path / dtype / "model.safetensors")
    for name, tensor in written[Dtype.bfloat16].items():
        expected = torch.float32 if name in in_float32 else torch.bfloat16
        assert tensor.dtype is expected, name
        assert torch.equal(tensor, trainer.state()["model"][name].to(expected)), name
    assert (tmp_path / "bfloat16" / "config.json").read_text() == config
    assert {tensor.dtype for tensor in written[Dtype.float32].values()} == {torch.float32}
    export(url, str(tmp_path / "named"), dtype=Dtype.bfloat16, verify=True)
    named = load_file(tmp_path / "named" / "model.safetensors")
    assert {tensor.dtype for tensor in named.values()} == {torch.bfloat16}


@contextmanager
def spoiled_exports(spoil):
    """Have ``spoil`` change the tensors of a folder that was written, by name."""
    copy_others = hugging_face.copy_others

    def copy_and_spoil(base, folder, dtype):
        copy_others(base, folder, dtype)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        spoil(tensors)
        save_file(tensors, file, {"format": "pt"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hugging_face, "copy_others", copy_and_spoil)
        yield


@pytest.mark.parametrize("run", ["untied"], indirect=True)
def test_verify_finds_a_tensor_of_another_type_than_in_the_base(run, tmp_path):
    url, *_ = run

    def spoil(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()

    with (
        spoiled_exports(spoil),
        pytest.raises(
            ConfigError, match=r"model\.norm\.weight is BF16, where torch\.float32 was expected"
        ),
    ):
        export(url, str(tmp_path / "out"), verify=True)


def test_adapters_of_an_agent_are_merged_with_weights_of_its_own_model(tmp_path):
    """The run's model, which is that of the other agent, may have any others."""
    url = str(tmp_path / "run")
    bases = {name: tiny_model(tmp_path / name) for name in ("a", "b")}
    with_other_weights(bases["b"])
    file = load_config_file(
        shipped("quickstart_agents.yaml"),
        [
            f"run.url={url}",
            f"model.path={bases['a']}",
            f"agents.b.model.path={bases['b']}",
            "trainer.lora.rank=4",
        ],
    )
    config = file.config
    models = model_versions(config)
    assert models.keys() == {"model.path", "agents.a.model.path", "agents.b.model.path"}
    assert models["model.path"] == models["agents.a.model.path"] != models["agents.b.model.path"]
    write_identity(config, dags(file)[0], replace=False, models=models)
    agent = config.agents["b"]
    trainer = build_trainer(
        Device("w"), Rank(), model=agent.model, trainer=agent.trainer, rollout=agent.rollout
    )
    commit(Checkpoints(attempt=take(url, 30.0, print), keep=9), 1, "policy_b", trainer)
    with_other_weights(bases["a"])
    export(url, str(tmp_path / "out"), role="policy_b", verify=True)
    with_other_weights(bases["b"])
    with pytest.raises(ConfigError, match=r"agents\.b\.model\.path=.* has other weights than when"):
        export(url, str(tmp_path / "other"), role="policy_b")


def test_the_digest_of_weights_at_a_url_is_of_what_its_store_says_of_them(s3):
    url = f"{s3}/{uuid4().hex}/model"
    fs, path = open_fs(url)
    assert weights_digest(url) == "", "nothing is there"
    fs.pipe_file(f"{path}/config.json", b"{}")
    assert weights_digest(url) == "", "no weights are there"
    fs.pipe_file(f"{path}/model.safetensors", b"weights")
    digest = weights_digest(url)
    fs.pipe_file(f"{path}/model.safetensors", b"weights")
    fs.pipe_file(f"{path}/config.json", b"{ }")
    assert weights_digest(url) == digest
    fs.pipe_file(f"{path}/model.safetensors", b"Weights")
    assert weights_digest(url) not in (digest, "")


def test_the_digest_of_weights_is_of_their_content(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        content = {"weight": torch.arange(2_000_000, dtype=torch.float32)}
        save_file(content, tmp_path / name / "model.safetensors")
    digest = weights_digest(str(tmp_path / "a"))
    assert digest == weights_digest(str(tmp_path / "b"))
    (tmp_path / "b" / "config.json").write_text("{}")
    assert digest == weights_digest(str(tmp_path / "b")), "of weights alone"
    content["weight"][1_000_000:] += 1.0
    save_file(content, tmp_path / "b" / "model.safetensors")
    assert digest != weights_digest(str(tmp_path / "b"))
    assert weights_digest(str(tmp_path)) == ""


@pytest.mark.parametrize("run", ["adapters"], indirect=True)
@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_verify_finds_adapters_that_were_merged_with_another_factor(run, dtype, tmp_path):
    url, *_ = run
    export(url, str(tmp_path / "out"), dtype=dtype, verify=True)
    merged = hugging_face.merged
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            hugging_face,
            "merged",
            lambda named, scaling, device: merged(named, 1.5 * scaling, device),
        )
        with pytest.raises(ConfigError, match=r"proj\.weight differs by .* from the checkpoint's"):
            export(url, str(tmp_path / "other"), dtype=dtype, verify=True)


@pytest.mark.parametrize("run", ["experts"], indirect=True)
def test_verify_finds_one_number_of_an_expert_that_is_off(run, tmp_path):
    url, *_ = run

    def spoil(tensors):
        name = max(name for name in tensors if ".experts." in name)
        tensors[name][-1, -1] += 1e-3

    said = r"experts.* differs by 0\.001 from the checkpoint's"
    with spoiled_exports(spoil), pytest.raises(ConfigError, match=said):
        export(url, str(tmp_path / "out"), verify=True)


@pytest.mark.parametrize("run", ["tied"], indirect=True)
@pytest.mark.parametrize("to", ["local", "memory"])
def test_chat_templates_with_names_of_their_own_are_exported_too(run, tmp_path, to):
    """They lie in a folder of the base; without it transformers takes such a name for a template."""
    url, base, _ = run
    recorded_by_an_earlier_version(url)
    templates = base / CHAT_TEMPLATE_DIR
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    out = str(tmp_path / "out") if to == "local" else f"memory://export-{uuid4().hex}"
    export(url, out)
    if to == "memory":
        fs, path = open_fs(out)
        fs.get(f"{path}/", f"{tmp_path}/out/", recursive=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.get_chat_template("tool_use") == "{{ tools }}"


def test_it_goes_to_any_store_and_never_over_something(run, tmp_path):
    url, *_ = run
    export(url, str(tmp_path / "here"))
    fs = fsspec.filesystem("memory")
    to = f"memory://export-{tmp_path.name}"
    export(url, to)
    copied = {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.ls(to, detail=False)}
    assert copied == {file.name: file.read_bytes() for file in (tmp_path / "here").iterdir()}
    for taken in (to, str(tmp_path / "here"), str(tmp_path / "here" / "config.json")):
        with pytest.raises(ConfigError, match="already: choose another DEST"):
            export(url, taken)
    (tmp_path / "empty").mkdir()
    export(url, str(tmp_path / "empty"))


def test_what_is_not_there_is_refused_by_name_and_nothing_is_written(run, tmp_path, capsys):
    url, base, _ = run
    to = tmp_path / "out"
    wrong = {
        "no run: expected a folder with a config.yaml": [str(base), str(to)],
        "no checkpoint of step 3 (there are: [1, 2])": [url, str(to), "--step", "3"],
        "no role 'polcy' (there are: ['policy']); did you mean 'policy'?": [
            url,
            str(to),
            "--role",
            "polcy",
        ],
    }
    for said, arguments in wrong.items():
        with pytest.raises(SystemExit, match="2"):
            main(["export", *arguments])
        assert said in capsys.readouterr().err
    recorded_by_an_earlier_version(url)
    tiny_model(base, hidden=32)
    with pytest.raises(
        ConfigError,
        match=r"embed_tokens.weight has shape \[264, 64\] in the checkpoint and \[264, 32\]",
    ):
        export(url, str(to))
    tiny_model(base, layers=3)
    with pytest.raises(
        ConfigError, match=r"the checkpoint lacks \['model.layers.2.*another model by now"
    ):
        export(url, str(to))
    assert not to.exists()


def test_a_run_that_kept_no_average_has_none_to_export(run, tmp_path):
    url, *_ = run
    file = Path(url, "config.yaml")
    file.write_text(file.read_text().replace("ema_decay: 0.9", "ema_decay: 0.0"))
    with pytest.raises(
        ConfigError, match=r"kept no moving average of the weights \(trainer.ema_decay\)"
    ):
        export(url, str(tmp_path / "out"), ema=True)


def test_a_checkpoint_that_is_damaged_or_removed_meanwhile_is_not_exported(run, tmp_path, caplog):
    url, *_ = run
    good, damaged = (
        export(url, str(tmp_path / "one"), step=1),
        Path(checkpoint_url(url, 2), "policy", "__0_0.distcp"),
    )
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"of step 2 of .* cannot be used: .*__0_0\.distcp has the SHA-256"
    ):
        export(url, str(tmp_path / "two"), step=2)
    assert export(url, str(tmp_path / "two")) == good == 1
    assert "the checkpoint of step 2 is passed over" in caplog.text
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_a_reader_whose_checkpoint_is_pruned_takes_the_next_newest(run):
    """Both were there when it looked, and the run removes them while it reads."""
    url, *_ = run
    seen = []

    def read(found):
        seen.append(found.step)
        if found.step == 2:
            shutil.rmtree(found.url)
            raise CheckpointError("a file is gone")

    assert with_whole_checkpoint(url, None, ["policy"], read) == 1
    assert seen == [2, 1]
    shutil.rmtree(checkpoint_url(url, 1))
    with pytest.raises(CheckpointError, match="has no checkpoint that can be used"):
        with_whole_checkpoint(url, None, ["policy"], read)
