"""A prompt reaches the model as its author meant it: special tokens, arguments of the template,
an answer begun.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig

from siirl_dask.config import ModelConfig
from siirl_dask.driver.checks.prompt_rows import tokenizer_here
from siirl_dask.errors import ConfigError, DataError
from siirl_dask.rollout.chat_turns import ChatTurns
from siirl_dask.rollout.model_folder import read_model_folder
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer, load_tokenizer
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.tasks.tiny_model import tiny_model, tiny_tokenizer
from siirl_dask.tasks.vocabulary import VOCABULARY

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|stop|>{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking "
    "%}<think></think>{% endif %}{% endif %}"
)
THINKING = "{% if enable_thinking %}on{% else %}off{% endif %}:" + CHAT
USER = {"role": "user", "content": "2+2?"}
BEGUN = {"role": "assistant", "content": "The sum"}


def with_bos(*, end=False):
    """Return a tokenizer that puts <s> before a text by itself, and with ``end`` its end token
    after it.
    """
    tokenizer = tiny_tokenizer(chat_template=CHAT)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"<s> $A {tokenizer.eos_token}" if end else "<s> $A",
        special_tokens=[("<s>", bos), (tokenizer.eos_token, eos)],
    )
    return tokenizer


def wrapped(tokenizer, **options):
    return HuggingFaceTokenizer(tokenizer, "model", **options)


def shown(tokenizer, prompt, **options):
    return tokenizer.decode(tokenizer.encode(prompt, **options), skip_special=False)


@pytest.mark.parametrize(
    ("adds", "text", "expected"),
    [
        ("auto", "ab", "<s>ab"),
        ("auto", "<s>ab", "<s>ab"),
        ("auto", "", "<s>"),
        (True, "ab", "<s>ab"),
        (True, "<s>ab", "<s><s>ab"),
        (False, "ab", "ab"),
        (False, "<s>ab", "<s>ab"),
    ],
)
def test_a_text_has_the_special_tokens_of_its_tokenizer(adds, text, expected):
    tokenizer = wrapped(with_bos(), add_special_tokens=adds)
    assert shown(tokenizer, text) == expected
    assert tokenizer.lengths([text, "x" * 5]) == [
        len(tokenizer.encode(text)),
        len(tokenizer.encode("x" * 5)),
    ]


def test_what_goes_on_with_a_text_and_what_a_template_writes_has_none():
    tokenizer = wrapped(with_bos())
    assert tokenizer.decode(tokenizer.encode_more("ab"), skip_special=False) == "ab"
    assert shown(tokenizer, [USER]) == "<|user|>2+2?<|stop|><|assistant|>"


@pytest.mark.parametrize("adds", ["auto", True, False])
def test_a_tokenizer_without_special_tokens_around_texts_encodes_as_before(adds):
    plain = tiny_tokenizer(chat_template=CHAT)
    tokenizer = wrapped(plain, add_special_tokens=adds)
    assert tokenizer.encode("ab <x>") == plain("ab <x>", add_special_tokens=False)["input_ids"]
    assert tokenizer.special_tokens_note == ""
    assert tokenizer.identity == wrapped(plain).identity


def test_special_tokens_around_texts_are_said():
    ends = with_bos(end=True)
    own = f"the tokenizer's own special tokens, <s> before and {ends.eos_token} after each"
    said = f"model.add_special_tokens=auto: prompts that are texts get {own}"
    assert wrapped(ends).special_tokens_note == said
    assert (
        "false: prompts that are texts do not get"
        in wrapped(with_bos(), add_special_tokens=False).special_tokens_note
    )


def test_arguments_of_the_template_reach_prompts_turns_and_lengths():
    plain = tiny_tokenizer(chat_template=THINKING)
    on, off = (
        wrapped(plain, template={"enable_thinking": True}),
        wrapped(plain, template={"enable_thinking": False}),
    )
    assert shown(on, [USER]) == "on:<|user|>2+2?<|stop|><|assistant|>"
    assert shown(off, [USER]) == "off:<|user|>2+2?<|stop|><|assistant|><think></think>"
    assert off.lengths([[USER]]) == [len(off.encode([USER]))]
    ids = off.after_turn([USER], [USER], (), off.encode_more("x")[0])
    assert (
        off.decode(ids, skip_special=False)
        == "<|stop|><|user|>2+2?<|stop|><|assistant|><think></think>"
    )
    ids = ChatTurns(plain, "model", {"enable_thinking": True}).after_turn([USER], [USER], (), 5)
    assert "<think>" not in on.decode(ids, skip_special=False)
    assert len({one.identity for one in (on, off, wrapped(plain))}) == 3


@pytest.mark.parametrize(
    ("template", "chat", "said"),
    [
        (
            {"enable_thinkin": True},
            THINKING,
            "does not read 'enable_thinkin'; did you mean 'enable_thinking'?",
        ),
        ({"enable_thinking": True}, None, "the tokenizer of 'model' has no chat template"),
    ],
)
def test_an_argument_that_no_template_reads_is_refused(template, chat, said):
    with pytest.raises(ConfigError) as error:
        wrapped(tiny_tokenizer(chat_template=chat), template=template)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "name", ["tools", "add_generation_prompt", "tokenize", "continue_final_message"]
)
def test_an_argument_that_each_prompt_gives_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is given for each prompt"):
        ModelConfig(path="m", template={name: True})


def test_a_prompt_that_ends_with_an_answer_is_refused_with_its_cure():
    tokenizer = wrapped(tiny_tokenizer(chat_template=CHAT))
    with pytest.raises(DataError, match=r"prompt=messages\[:-1\] --column answer=.*data.continue"):
        tokenizer.encode([USER, BEGUN])


def test_the_model_goes_on_with_an_answer_that_is_begun():
    tokenizer = wrapped(tiny_tokenizer(chat_template=CHAT))
    assert (
        shown(tokenizer, [USER, BEGUN], continue_answer=True)
        == "<|user|>2+2?<|stop|><|assistant|>The sum"
    )
    assert tokenizer.encode([USER], continue_answer=True) == tokenizer.encode([USER])
    assert tokenizer.encode("ab", continue_answer=True) == tokenizer.encode("ab")
    lengths = tokenizer.lengths([[USER], [USER, BEGUN], [USER]])
    assert lengths == [
        len(tokenizer.encode(chat, continue_answer=True))
        for chat in ([USER], [USER, BEGUN], [USER])
    ]


def test_tags_that_are_special_tokens_stay_in_a_response_and_its_end_does_not():
    plain = tiny_tokenizer()
    plain.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|eom|>"]})
    eom = plain.convert_tokens_to_ids("<|eom|>")
    tokenizer = wrapped(plain, generation=GenerationConfig(eos_token_id=[eom]))
    ids = [*tokenizer.encode("<think>two</think>4"), eom, plain.eos_token_id]
    assert tokenizer.decode(ids, skip_special=True) == "<think>two</think>4"
    assert (
        tokenizer.decode(ids, skip_special=False) == f"<think>two</think>4<|eom|>{plain.eos_token}"
    )
    assert tokenizer.end_tokens == {eom, plain.eos_token_id}


def test_the_end_of_a_turn_of_the_chat_template_is_no_text_of_a_response():
    plain = tiny_tokenizer(chat_template=CHAT)
    plain.add_special_tokens(
        {"additional_special_tokens": ["<|stop|>", "<|assistant|>", "<think>"]}
    )
    tokenizer = wrapped(plain)
    ids = tokenizer.encode_more("<think>4<|stop|><|assistant|>")
    assert tokenizer.decode(ids, skip_special=True) == "<think>4<|assistant|>"
    assert (
        wrapped(tiny_tokenizer(chat_template="{{ raise_exception('no') }}")).decode(
            [], skip_special=True
        )
        == ""
    )


@pytest.mark.parametrize("prompt", ["a<extra>", [{"role": "user", "content": "a<extra>"}]])
def test_a_token_that_the_models_embedding_has_not_is_refused(prompt, tmp_path):
    """It was added to the tokenizer alone, and would be an error of a kernel in the first step."""
    tiny_model(tmp_path, chat_template=CHAT)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens([f"<{number}>" for number in range(VOCABULARY - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path)
    load_tokenizer(str(tmp_path), "model").encode(prompt)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path)
    engine = TransformersEngine(ModelConfig(path=str(tmp_path)))
    for own in (load_tokenizer(str(tmp_path), "model"), engine.tokenizer):
        own.encode("a")
        with pytest.raises(
            DataError, match=f"makes token {VOCABULARY} of '<extra>'.*has {VOCABULARY} tokens"
        ):
            own.encode(prompt)
    engine.close()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("ends", [7, [7, 9]])
def test_end_tokens_of_a_config_count_where_there_is_no_generation_config(ends, nested, tmp_path):
    """For every engine: they are those of transformers' own loader."""
    tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": ends}
    if nested:
        config = {"model_type": "llava", "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink()
    expected = {7} | set(ends if isinstance(ends, list) else [])
    found = load_tokenizer(str(tmp_path), "model")
    assert found.end_tokens == expected | {found.eos_token_id}
    if not nested:
        folder = read_model_folder(ModelConfig(path=str(tmp_path)))
        assert set(folder.end_tokens) == found.end_tokens
        engine = TransformersEngine(ModelConfig(path=str(tmp_path)))
        assert engine.tokenizer.end_tokens == found.end_tokens
        engine.close()


def without_tokenizer(folder):
    """As a folder that weights alone were copied to."""
    for file in folder.glob("tokenizer*"):
        file.unlink()


def with_new_end(folder):
    """As a tokenizer that got the end token of a chat format, and a model that did not."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    more = VOCABULARY - len(tokenizer)
    tokenizer.add_tokens([f"<{number}>" for number in range(more)])
    tokenizer.add_special_tokens({"eos_token": "<|new_end|>"})
    tokenizer.save_pretrained(folder)


def writes(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_tokenizer, r"there is no tokenizer \(none of .*tokenizer\.json"),
        (writes("tokenizer.json", "{"), "transformers cannot load it"),
        (writes("generation_config.json", "{"), "generation_config.json' is not a valid JSON"),
        (writes("generation_config.json", '{"eos_token_id": "a"}'), "eos_token_id='a'"),
        (writes("generation_config.json", '{"eos_token_id": [1, "a"]}'), r"eos_token_id=\[1, 'a'"),
        (
            writes("generation_config.json", f'{{"eos_token_id": [1, {VOCABULARY}]}}'),
            f"its generation config ends responses with token {VOCABULARY}, and the model's embeddi",
        ),
        (writes("generation_config.json", '{"eos_token_id": -1}'), "ends responses with token -1"),
        (with_new_end, f"its tokenizer ends responses with token {VOCABULARY}, and the model's"),
    ],
)
def test_a_tokenizer_or_end_tokens_that_cannot_be_read_are_refused(
    change, said, tmp_path, digits_config
):
    """transformers would make an empty tokenizer, or take other end tokens."""
    tiny_model(tmp_path)
    change(tmp_path)
    digits_config.model.path = str(tmp_path)
    for load in (
        lambda: load_tokenizer(str(tmp_path), "model"),
        lambda: TransformersEngine(ModelConfig(path=str(tmp_path))),
        lambda: tokenizer_here(digits_config),
    ):
        with pytest.raises(ConfigError, match=said):
            load()
    (tmp_path / "model.safetensors").unlink()
    if change is without_tokenizer:
        assert tokenizer_here(digits_config) is None


TAGS = ["<think>", "</think>", "<|user|>", "<|stop|>", "<|assistant|>"]


@given(parts=st.lists(st.sampled_from([*TAGS, "4", " two", "\n", "end"]), max_size=8))
def test_the_plain_text_is_what_transformers_writes_without_special_tokens(parts):
    """Rewards of verl and TRL get that text, and an anchored pattern of theirs finds its end."""
    plain = tiny_tokenizer(chat_template=CHAT)
    plain.add_special_tokens({"additional_special_tokens": TAGS})
    tokenizer = wrapped(plain)
    ids: list[int] = []
    for part in parts:
        if part == "end":
            ids.append(plain.eos_token_id)
        else:
            ids += tokenizer.encode_more(part)
    expected = plain.decode(ids, skip_special_tokens=True)
    shown = tokenizer.decode(ids, skip_special=True)
    found = tokenizer.plain_text(ids)
    assert found != shown
    assert (shown if found is None else found) == expected


def test_the_plain_text_keeps_an_end_token_that_is_not_special_and_cleans_up_where_asked():
    plain = tiny_tokenizer()
    plain.add_tokens(["<|eom|>"])
    eom = plain.convert_tokens_to_ids("<|eom|>")
    tokenizer = wrapped(plain, generation=GenerationConfig(eos_token_id=[eom]))
    ids = [*tokenizer.encode("4"), eom]
    assert tokenizer.decode(ids, skip_special=True) == "4"
    assert tokenizer.plain_text(ids) == plain.decode(ids, skip_special_tokens=True) == "4<|eom|>"
    plain.clean_up_tokenization_spaces = True
    plain.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    spaced = tokenizer.encode("no . yes")
    assert tokenizer.plain_text(spaced) == plain.decode(spaced, skip_special_tokens=True)
    assert tokenizer.plain_text(spaced) == "no. yes"
