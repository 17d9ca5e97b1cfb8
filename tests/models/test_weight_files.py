"""Weights are read from the files that transformers reads them from, and a folder whose files are
not those of the model that its config.json describes is refused before anything starts.
"""

import json
import re
import shutil
from uuid import uuid4

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from siirl_storage import open_fs
from transformers import AutoModelForCausalLM

from siirl_dask.cli import main
from siirl_dask.config import Backend, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.models import shapes, weight_files
from siirl_dask.models.cache import FOLDER
from siirl_dask.models.loading import load_pretrained, model_class
from siirl_dask.models.planned_models import check_model, model_here
from siirl_dask.models.remote import find_model
from siirl_dask.models.shapes import INDEX, weight_shapes
from siirl_dask.models.weight_files import check_weights, open_tensors
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.training import build_trainer
from tests.models.configs import write_config
from tests.settings import trainer_config
from tests.training.families import written

WHOLE = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("base") / "tiny", layers=1)


@pytest.fixture
def folder(base, tmp_path):
    return shutil.copytree(base, tmp_path / "model")


def changed_config(folder, **values):
    config = json.loads((folder / "config.json").read_text()) | values
    write_config(folder, config)


def changed_weights(folder, change):
    tensors = change(load_file(folder / WHOLE))
    save_file(tensors, folder / WHOLE, {"format": "pt"})


@st.composite
def forms(draw):
    """Files of a folder: shards that an index names or not, some of them from another model, and
    the whole model in one file.
    """
    shards = draw(st.integers(1, 3))
    return {
        "shards": shards,
        "absent": draw(st.sampled_from([None, *range(shards)])),
        "stale": draw(st.booleans()),
        "index": draw(st.booleans()),
        "whole": draw(st.booleans()),
        "other_library": draw(st.booleans()),
    }


def write_form(folder, form):
    tensors = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    count = form["shards"]
    index = {}
    for shard in range(count):
        file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::count]}
        index |= dict.fromkeys(part, file)
        if shard != form["absent"]:
            save_file(part, folder / file, {"format": "pt"})
    later = {name: tensor + 1 for name, tensor in tensors.items()}
    if form["stale"]:
        save_file(later, folder / "model-00009-of-00009.safetensors", {"format": "pt"})
    if form["index"]:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    if form["whole"]:
        save_file(later, folder / WHOLE, {"format": "pt"})
    if form["other_library"]:
        renamed = {f"layers.{name}": tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "consolidated.safetensors")


@settings(max_examples=40)
@given(form=forms())
def test_weights_are_those_that_transformers_loads_or_the_folder_is_refused(
    base, tmp_path_factory, form
):
    folder = shutil.copytree(base, tmp_path_factory.mktemp("form") / "model")
    write_form(folder, form)
    # a plan may be of a config alone
    assume(form["index"] or any(folder.glob("*.safetensors")))
    url = f"memory://{uuid4().hex}"
    fs, path = open_fs(url)
    fs.put(f"{folder}/", f"{path}/", recursive=True)
    try:
        check_weights(str(folder))
    except ConfigError as error:
        with pytest.raises(ConfigError):
            open_tensors(str(folder))
        with pytest.raises(ConfigError, match=re.escape(str(error).partition(": ")[2])):
            check_weights(url)
        # what is not refused by transformers is what other libraries read otherwise
        assert form["whole"] or form["absent"] is not None or not form["index"]
        return
    check_weights(url)
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    opened = open_tensors(str(folder))
    for name, file in opened.items():
        assert torch.equal(file.get_tensor(name), loaded[name])
    assert opened.keys() == weight_shapes(str(folder)).keys()
    assert loaded.keys() - opened.keys() <= {HEAD}


def test_a_folder_with_several_models_says_which_files_are_in_doubt(folder):
    form = {"shards": 2, "absent": None, "stale": False, "other_library": False}
    write_form(folder, {**form, "index": True, "whole": True})
    with pytest.raises(ConfigError, match=r"names others \(model-00001-of-00002.*delete those"):
        check_weights(str(folder))
    (folder / INDEX).unlink()
    with pytest.raises(ConfigError, match=r"parts of a model \(model-00001-of-00002.*without"):
        check_weights(str(folder))
    (folder / WHOLE).unlink()
    with pytest.raises(ConfigError, match=r"nothing says which of its .* hold the weights"):
        check_weights(str(folder))


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"weight_map": {"a": "model.safetensors"}}', "'metadata'"),
        ('{"metadata": {}, "weight_map": {}}', "names of files were expected"),
        ('{"metadata": {}, "weight_map": {"a": "../b.safetensors"}}', "names of files were"),
        ('{"metadata": {}, "weight_map": {"a": 1}}', "TypeError"),
    ],
)
def test_a_damaged_index_is_refused(folder, index, said):
    (folder / INDEX).write_text(index)
    with pytest.raises(ConfigError, match=f"{INDEX} cannot be read: .*{said}"):
        check_weights(str(folder))


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_file_that_is_not_whole_is_refused(folder, cut):
    data = (folder / WHOLE).read_bytes()
    (folder / WHOLE).write_bytes(data[:-cut])
    with pytest.raises(ConfigError, match="is no whole safetensors file"):
        check_weights(str(folder))


def without_projection(tensors):
    """As of AutoGPTQ's first releases, whose config.json says nothing."""
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name.replace("weight", "qweight")] = torch.zeros(4, 4, dtype=torch.int32)
    del tensors[name]
    return tensors


def packed_in(dtype):
    """As of weights in 8 bits whose config.json has lost its quantization_config."""

    def change(tensors):
        for name in [name for name in tensors if "_proj.weight" in name]:
            scale = tensors[name].abs().max() / 100
            tensors[name] = (tensors[name] / scale).to(dtype)
        return tensors

    return change


def with_tensor(name):
    def change(tensors):
        return tensors | {f"model.layers.0.{name}": torch.ones(8)}

    return change


@pytest.mark.parametrize(
    ("config", "weights", "said"),
    [
        ({"num_hidden_layers": 2, "layer_types": None}, None, r"layers\.1\..* is not there.* more"),
        ({"intermediate_size": 96}, None, r"has shape \[128, 64\] where \[96, 64\] was expected"),
        ({"num_key_value_heads": None}, None, "k_proj.weight has shape"),
        ({"tie_word_embeddings": False}, None, f"describes: {HEAD} is not there$"),
        ({"head_dim": None}, None, "config.json cannot be read: .*head_dim"),
        ({"torch_dtype": "auto", "dtype": None}, None, "config.json cannot be read: .*auto"),
        (
            {"rope_parameters": None, "rope_scaling": {"rope_type": "its_own"}},
            None,
            "cannot be read: looked for 'its_own', and there is nothing of that name",
        ),
        ({}, without_projection, "q_proj.weight is not there"),
        ({}, packed_in(torch.float8_e4m3fn), "_proj.weight is F8_E4M3 where one of F32, BF16"),
        ({}, packed_in(torch.int8), "_proj.weight is I8 where one of F32.* no quantization_config"),
        ({}, with_tensor("self_attn.q_proj.bias"), "q_proj.bias is there, and the layer of that"),
        ({}, with_tensor("mlp.up_proj.weight_scale_inv"), "weight_scale_inv is there, and the la"),
        ({}, with_tensor("self_attn.rotary_emb.inv_freq"), None),
        ({}, lambda tensors: {name: tensors[name].half() for name in tensors}, None),
        ({"model_type": "its_own"}, None, "no generating model of the model_type 'its_own'"),
        ({"model_type": None}, None, "no generating model of the model_type None"),
        ({"model_type": "vit"}, None, "no generating model of the model_type 'vit'"),
        (
            {"model_type": "its_own", "auto_map": {"AutoConfig": "own.Config"}},
            None,
            "and code in a model's folder is not run",
        ),
        ({"auto_map": {"AutoConfig": "own.Config"}}, None, None),
        ({"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 4.0}}, None, None),
        ({"architectures": ["Qwen3Model"]}, None, None),
    ],
)
def test_files_that_are_not_of_the_model_of_the_config_are_refused(folder, config, weights, said):
    changed_config(folder, **config)
    if weights is not None:
        changed_weights(folder, weights)
    if said is None:
        check_weights(str(folder))
        return
    with pytest.raises(ConfigError, match=said):
        check_weights(str(folder))


def test_a_mixture_without_gates_of_its_idle_experts_is_refused_as_transformers_cannot_load_it(
    tmp_path,
):
    """As LongCat-Flash is published: 4 of its 6 experts compute something."""
    written(tmp_path, "longcat_flash")
    check_weights(str(tmp_path))
    idle = re.compile(r".*\.experts\.[45]\..*")
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not idle.fullmatch(name)}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj has shape \[4, .* where \[6"):
        check_weights(str(tmp_path))


@pytest.mark.parametrize("weights", [True, False])
def test_adapters_beside_weights_are_refused_which_some_loaders_would_add(folder, weights):
    """transformers adds them, or wants their weights; fsdp and engines do not look at them."""
    layer = "model.layers.0.self_attn.q_proj"
    _, columns = load_file(folder / WHOLE)[f"{layer}.weight"].shape
    options = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    if weights:
        halves = {f"base_model.model.{layer}.lora_A.weight": torch.ones(2, columns)}
        save_file(halves, folder / "adapter_model.safetensors")
    kind = model_class(str(folder), "the model")
    for refused in (
        lambda: check_weights(str(folder)),
        lambda: load_pretrained(kind, str(folder), torch.float32, "the model"),
    ):
        with pytest.raises(ConfigError, match=r"has adapter_config.json beside .* trainer.lora.pa"):
            refused()


def test_a_model_is_checked_again_once_its_files_have_changed(folder, monkeypatch):
    checked = []
    monkeypatch.setattr(weight_files, "check_weights", lambda path, use: checked.append(path))
    check_model(str(folder))
    check_model(str(folder))
    assert checked == [str(folder)]
    changed_weights(folder, lambda tensors: {name: tensors[name].half() for name in tensors})
    check_model(str(folder))
    changed_config(folder, tie_word_embeddings=False)
    check_model(str(folder))
    assert checked == 3 * [str(folder)]
    check_model(str(folder / "nothing"))
    assert checked == 3 * [str(folder)]


def with_head(factor):
    return lambda tensors: {**tensors, HEAD: factor * tensors[EMBEDDING]}


def with_other_row(tensors):
    """One row differs, as of a token that was added later, which samples may miss."""
    head = tensors[EMBEDDING].clone()
    head[1] += 1
    return {**tensors, HEAD: head}


def test_a_model_at_a_url_is_checked_where_it_is_and_where_its_files_have_come(
    folder, tmp_path, monkeypatch
):
    """vLLM would take one of two parameters, without a word."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))

    def url_of(change):
        changed_weights(folder, change)
        url = f"memory://{uuid4().hex}"
        fs, path = open_fs(url)
        fs.put(f"{folder}/", f"{path}/", recursive=True)
        return url

    def model_of(url):
        return model_here(ModelConfig(path=url), Device("w0", models={url: find_model(url)}))

    said = f"{EMBEDDING} and {HEAD} are one parameter"
    equal = url_of(with_head(1))
    check_weights(equal)
    assert model_of(equal).path.startswith(str(tmp_path))
    differing = url_of(with_head(2))
    with pytest.raises(ConfigError, match=rf"model.path='{differing}'.*{said}"):
        check_weights(differing)
    monkeypatch.setattr(shapes, "_SAMPLES", 1)
    monkeypatch.setattr(shapes, "_SAMPLE", 4)
    barely = url_of(with_other_row)
    check_weights(barely)
    with pytest.raises(ConfigError, match=said):
        model_of(barely)
    # whoever plans on that host looks at what has come
    with pytest.raises(ConfigError, match=said):
        check_weights(barely)


@pytest.mark.parametrize("backend", [Backend.torch, Backend.fsdp])
def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(folder, backend):
    """transformers would load two parameters, fsdp and vLLM one of them."""

    def build():
        return build_trainer(
            Device("w0"),
            Rank(),
            model=ModelConfig(path=str(folder)),
            trainer=trainer_config(backend=backend),
            rollout=RolloutConfig(),
        )

    changed_weights(folder, with_head(1))
    check_weights(str(folder))
    assert HEAD not in dict(build().weights())
    changed_weights(folder, with_head(2))
    for refused in (lambda: check_weights(str(folder)), build):
        with pytest.raises(ConfigError, match=f"{EMBEDDING} and {HEAD} are one parameter"):
            refused()
    changed_config(folder, tie_word_embeddings=False)
    check_weights(str(folder))
    assert HEAD in dict(build().weights())


def test_plan_refuses_what_its_backend_does_not_read(folder, digits_task, capsys):
    words = [
        "plan",
        "configs/quickstart.yaml",
        f"model.path={folder}",
        f"data.url={digits_task.train}",
        "validation.url=null",
        "validation.test_url=null",
        "rollout.engine=transformers",
    ]
    torch.save(load_file(folder / WHOLE), folder / "pytorch_model.bin")
    (folder / WHOLE).unlink()
    main(words)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*words, "trainer.backend=fsdp"])
    assert "weights are in pytorch_model.bin, and trainer.backend=fsdp" in capsys.readouterr().err
    changed_config(folder, model_type="its_own")
    with pytest.raises(SystemExit):
        main(words)
    assert "no generating model of the model_type 'its_own'" in capsys.readouterr().err
