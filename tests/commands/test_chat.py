"""``siirl-dask chat``: its most likely answer is the one that the run's validation scored, a chat
keeps what was said, and mistakes are refused by name.
"""

import io
import json

import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from siirl_dask.cli import main
from siirl_dask.commands.chat import StreamedText
from siirl_dask.config import ModelConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.rollout.engine import Sampling
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.runs.folder import write_identity
from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from tests.conftest import digits_overrides

LIMIT = 6


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "model"
    # not tied: one with tied weights repeats the last token, whatever was said before
    return str(tiny_model(folder, chat_template=CHAT_TEMPLATE, tied=False))


@pytest.fixture
def chat(capsys, monkeypatch):
    """Type ``chat ARGUMENTS`` with lines of input; gives standard output and error."""

    def start(*arguments, lines=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        main(["chat", *map(str, arguments)])
        return capsys.readouterr()

    return start


def likeliest(model, *chats):
    """The most likely response to each list of messages, as an engine gives it to a run."""
    engine = TransformersEngine(ModelConfig(path=model))
    prompts = [engine.tokenizer.encode(messages) for messages in chats]
    sampling = Sampling(max_tokens=LIMIT, temperature=0.0)
    generations = engine.generate(prompts, [0] * len(prompts), sampling)
    return [engine.tokenizer.decode(one.token_ids, skip_special=True) for one in generations]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_a_run_s_answers_are_those_that_its_validation_scored(digits_task, train, chat):
    run = train("run", f"validation.url={digits_task.test}", "validation.every=3").url
    scored = pq.read_table(run / "validation" / "step=000003").slice(0, 3).to_pylist()
    prompts = [row["prompt"] for row in scored]
    shown = chat(run, lines="".join(f"{prompt}\n" for prompt in prompts))
    assert shown.out == "".join(row["response"] + "\n" for row in scored)
    assert f"{run}, step 3: each prompt is a text that it continues, by itself" in shown.err
    alone = chat(run, "--step", 3, "--prompt", prompts[1])
    assert alone.out == scored[1]["response"] + "\n"


def test_a_conversation_is_kept_and_begun_again(chat_model, chat):
    (first,) = likeliest(chat_model, [user("one")])
    second, anew = likeliest(
        chat_model, [user("one"), assistant(first), user("two")], [user("two")]
    )
    options = ["--max-tokens", LIMIT]
    shown = chat(chat_model, *options, lines="one\n\ntwo\n/new\ntwo\n")
    assert shown.out == f"{first}\n{second}\n{anew}\n"
    assert second != anew
    system = [{"role": "system", "content": "be short"}, user("one")]
    (told,) = likeliest(chat_model, system)
    assert chat(chat_model, *options, "--system", "be short", "--prompt", "one").out == f"{told}\n"
    (plain,) = likeliest(chat_model, "one")
    assert chat(chat_model, *options, "--raw", "--prompt", "one").out == f"{plain}\n"


def test_a_sampled_answer_is_another_for_each_prompt_and_the_same_in_each_conversation(
    chat_model, chat
):
    options = [chat_model, "--raw", "--temperature", 1, "--max-tokens", LIMIT]
    first, second = chat(*options, lines="one\n/new\none\n").out, chat(*options, lines="one\n").out
    assert first.startswith(second)
    assert first != second * 2
    assert chat(*options, "run.seed=5", lines="one\n").out != second


def test_a_full_context_is_said_and_the_conversation_goes_on(chat_model, chat):
    context = TransformersEngine(ModelConfig(path=chat_model)).context_length
    lines = f"one\n{'x' * context}\ntwo\n"
    (first,) = likeliest(chat_model, [user("one")])
    (second,) = likeliest(chat_model, [user("one"), assistant(first), user("two")])
    shown = chat(chat_model, "--max-tokens", LIMIT, lines=lines)
    assert shown.out == f"{first}\n{second}\n"
    assert f"the model's context is {context}: there is no room for an answer; /new" in shown.err
    room = 4
    begun = "x" * (context - room)
    shown = chat(chat_model, "--raw", "--max-tokens", LIMIT, "--prompt", begun)
    assert f"(cut after {room} tokens: the model's context of {context})" in shown.err


def test_ctrl_c_ends_an_answer_whose_beginning_stays(chat_model, chat, monkeypatch):
    whole = StreamedText.add

    def interrupted(self, token):
        whole(self, token)
        if len(self.token_ids) == 2 and not stopped:
            stopped.append(token)
            raise KeyboardInterrupt

    stopped = []
    monkeypatch.setattr(StreamedText, "add", interrupted)
    (first,) = likeliest(chat_model, [user("one")])
    (second,) = likeliest(chat_model, [user("one"), assistant(first[:2]), user("two")])
    shown = chat(chat_model, "--max-tokens", LIMIT, lines="one\ntwo\n")
    assert shown.out == f"{first[:2]}\n{second}\n"
    assert "(stopped)" in shown.err


REFUSED = {
    "neither a run, with a config.yaml, nor a Hugging Face folder": ["nowhere"],
    "has no step 3: leave out --step": ["model", "--step", "3"],
    "has no role 'critic': leave out --role": ["model", "--role", "critic"],
    "chat takes the model as its first argument": ["model", "model.path=other"],
    "--system 'x': prompts of 'model' are texts": ["model", "--raw", "--system", "x"],
    "rollout.max_response_length=0: expected at least 1": ["model", "--max-tokens", "0"],
    "there is no room for an answer": ["model", "--prompt", "x" * 10_000],
    "did you mean 'rollout'?": ["model", "rolout.n=3"],
    "the prompt '' has no tokens": ["model", "--raw", "--prompt", ""],
}


@pytest.mark.parametrize(("said", "arguments"), REFUSED.items(), ids=REFUSED)
def test_a_mistake_is_refused_by_name_and_prints_nothing(
    said, arguments, chat_model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(chat_model)
    prompt = [] if "--prompt" in arguments else ["--prompt", "one"]
    with pytest.raises(SystemExit, match="2"):
        main(["chat", *arguments, *prompt])
    shown = capsys.readouterr()
    assert said in shown.err
    assert not shown.out


def test_a_run_without_a_checkpoint_and_a_critic_are_refused(digits_task, tmp_path, capsys):
    url = tmp_path / "run"
    overrides = digits_overrides(digits_task, url)
    loaded = load_config_file(shipped("quickstart_ppo.yaml"), overrides)
    write_identity(loaded.config, dags(loaded)[0], replace=False)
    said = {"policy": "has no checkpoint", "critic": "is a critic, which gives values and no text"}
    for role, text in said.items():
        with pytest.raises(SystemExit, match="2"):
            main(["chat", str(url), "--role", role, "--prompt", "x"])
        assert text in capsys.readouterr().err


def test_code_in_a_model_s_folder_is_not_run_whatever_is_typed(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    tiny_tokenizer().save_pretrained(folder)
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(SystemExit, match="2"):
        main(["chat", str(folder)])
    assert "contains custom code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_pieces_of_a_text_are_the_text(text):
    # a special token is no text
    assume(not any(token in text for token in tiny_tokenizer().all_special_tokens))
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer(), "tiny")
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", written)
        streamed = StreamedText(tokenizer)
        for token in tokenizer.encode(text):
            streamed.add(token)
        assert streamed.end() == text
    assert written.getvalue() == f"{text}\n"
