"""SmolLM2-135M, with a real tokenizer, template and weights: sampled by both engines, updated,
exported and loaded.
"""

from importlib.util import find_spec

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from siirl_dask.cli import main
from siirl_dask.testing.real_model import write_smollm2
from siirl_dask.testing.reference_model import load_model, response_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.alone]
QUESTIONS = {
    "What is 2 + 3? Answer with the number alone.": "5",
    "What is the capital of France?": "Paris",
}
RUN = (
    "run.steps=2",
    "cluster.workers=2",
    "cluster.placement={}",
    "data.prepare=null",
    "data.batch_size=2",
    "data.max_prompt_length=64",
    "rollout.n=4",
    "rollout.max_response_length=12",
    "algorithm.minibatches=1",
    "trainer.lr=1e-5",
    "trainer.warmup_steps=0",
    "validation.url=null",
    "validation.test_url=null",
    "checkpoint.every=2",
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    return write_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture
def questions(tmp_path):
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    pq.write_table(
        pa.table({"prompt": prompts, "answer": list(QUESTIONS.values())}),
        tmp_path / "questions.parquet",
    )
    return tmp_path / "questions.parquet"


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_real_model_is_sampled_updated_and_exported_as_it_is(
    engine, smollm2, questions, train, tmp_path
):
    if engine == "vllm" and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    run = train(
        "run", f"model.path={smollm2}", f"data.url={questions}", f"rollout.engine={engine}", *RUN
    )
    model = load_model(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for row in run.table("rollouts", 1).to_pylist():
        messages = [{"role": "user", "content": row["prompt"]}]
        if isinstance(row["prompt"], list):
            messages = row["prompt"]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert row["prompt_ids"] == rendered
        assert row["response"] == tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        with torch.no_grad():
            expected = response_logprobs(model, row["prompt_ids"], row["response_ids"])
        assert (torch.tensor(row["rollout_logprobs"]) - expected).abs().max() < 2e-3
        assert (torch.tensor(row["old_logprobs"]) - expected).abs().max() < 1e-3
    for row in run.table("rollouts", 2).to_pylist():
        assert row["rollout_logprobs"] == pytest.approx(row["old_logprobs"], abs=2e-3)
    main(["export", str(run.url), str(tmp_path / "exported"), "--verify"])
    exported = load_model(tmp_path / "exported")
    changed = [
        name
        for name, tensor in exported.state_dict().items()
        if not torch.equal(tensor, model.state_dict()[name])
    ]
    assert len(changed) > 200
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template
        == tokenizer.chat_template
    )
