"""Tests of conversations that are continued token by token: sampled ids stay, and no word
between turns is missing.
"""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.errors import ConfigError
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer
from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_tokenizer
from tests.rollout.templates import CHATML, FAMILIES, tokenizer_of

WORDS = st.text("abc \n{}<>é", min_size=1, max_size=12).map(
    lambda text: f"x{text}y"
) | st.sampled_from(
    ["siirlsentinelturn", "siirlsentinelturn1x and siirlsentinelturn", "anothersentinelturn"]
)
FAMILY = {name: tokenizer_of(name) for name in FAMILIES}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("family", FAMILY)
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), first=WORDS)
def test_appended_ids_are_those_of_the_whole_conversation(family, turns, first):
    """Where a template rewrites no turn, ids that were appended turn by turn are its rendering,
    token by token.
    """
    plain, end = FAMILY[family]
    tokenizer, chat = HuggingFaceTokenizer(plain, "model"), [user(first)]
    ids = tokenizer.encode(chat)
    for said, heard in turns:
        before = len(ids)
        # which that template writes around a turn, and so does its model
        white = " " if family == "llama2" else ""
        sampled = [*tokenizer.encode(white + said + white), end]
        ids += sampled
        ids += tokenizer.after_turn(chat[:1], [user(heard)], (), end)
        chat += [assistant(said), user(heard)]
        assert ids[before : before + len(sampled)] == sampled
    assert tokenizer.decode(ids, skip_special=False) == plain.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False
    )
    assert ids == tokenizer.encode(chat)


@given(thought=WORDS, said=WORDS, heard=WORDS)
def test_thoughts_that_a_template_strips_stay_in_what_was_sampled(thought, said, heard):
    plain, end = FAMILY["qwen3"]
    tokenizer, chat = HuggingFaceTokenizer(plain, "model"), [user("why")]
    sampled = [*tokenizer.encode(f"<think>\n{thought}\n</think>\n\n{said}"), end]
    ids = [*tokenizer.encode(chat), *sampled, *tokenizer.after_turn(chat, [user(heard)], (), end)]
    text = tokenizer.decode(ids, skip_special=False)
    whole = [*chat, assistant(f"<think>\n{thought}\n</think>\n\n{said}"), user(heard)]
    rendered = plain.apply_chat_template(whole, add_generation_prompt=True, tokenize=False)
    assert thought in text
    assert "<think>" not in rendered
    assert text.replace(f"<think>\n{thought}\n</think>\n\n", "") == rendered


def test_results_of_several_tools_are_one_message_as_the_template_has_it():
    plain, end = FAMILY["qwen3"]
    tokenizer = HuggingFaceTokenizer(plain, "model")
    results = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "9"}]
    tools = [{"type": "function", "function": {"name": "square"}}]
    prompt = tokenizer.encode([user("2 and 3")], tools)
    assert "square" in tokenizer.decode(prompt, skip_special=False)
    text = tokenizer.decode(
        tokenizer.after_turn([user("2 and 3")], results, tools, end), skip_special=False
    )
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n9\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("family", FAMILY)
def test_a_turn_that_was_cut_gets_the_end_that_the_template_writes(family):
    plain, end = FAMILY[family]
    tokenizer = HuggingFaceTokenizer(plain, "model")
    cut = tokenizer.encode("abc")
    ids = tokenizer.after_turn([user("x")], [user("y")], (), cut[-1])
    assert ids.count(end) >= 1
    assert ids[ids.index(end) + 1 :] == tokenizer.after_turn([user("x")], [user("y")], (), end)


def test_a_template_without_an_end_of_turn_keeps_the_one_that_was_sampled():
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer(chat_template=CHAT_TEMPLATE), "model")
    ids = tokenizer.after_turn([user("x")], [user("y")], (), tokenizer.eos_token_id)
    assert tokenizer.decode(ids, skip_special=False) == "\nuser: y\nassistant:"


REFUSED = {
    "none": (None, "no chat template"),
    "drops turns": (
        CHATML.replace("{{ message.content }}", "{{ message.content if message.role == 'user' }}"),
        "0 times",
    ),
    "repeats": (CHATML + "{{ messages[1].content if messages|length > 1 }}", "2 times"),
    "reorders": (
        CHATML.replace(
            "in messages",
            "in (messages | selectattr('role', 'ne', 'assistant') | list) "
            "+ (messages | selectattr('role', 'equalto', 'assistant') | list)",
        ),
        "before the turn that it answers",
    ),
    "depends on the turn": (
        CHATML + "{{ messages[1].content | length if messages|length > 1 }}",
        "for other words",
    ),
    "fails": (
        "{{ raise_exception('only one turn') if messages|length > 1 }}" + CHATML,
        "only one turn",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_template_that_cannot_be_continued_is_refused_by_name(kind):
    template, said = REFUSED[kind]
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer(chat_template=template), "model")
    with pytest.raises(ConfigError, match=rf"model\.path='model'.*{said}"):
        tokenizer.check_turns()


FIELDS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system"]), "content": WORDS},
    optional={"name": WORDS, "reasoning_content": WORDS},
)
NAMED = (
    "{% for m in messages %}{% if 'name' in m %}{{ m.name }}: {% endif %}{{ m.content }}{% endfor "
    "%}"
)
PARTS = (
    "{% for m in messages %}{% for part in m.content %}"
    "{% if 'image' in part %}<picture>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


@given(st.lists(st.lists(FIELDS, min_size=1, max_size=3), min_size=1, max_size=4))
def test_fields_that_only_other_messages_of_a_table_have_change_no_prompt(chats):
    """Arrow gives every message every field that any message of the column has, null where it
    has none.
    """
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer(chat_template=NAMED), "model")
    from_arrow = pa.array(chats).to_pylist()
    for chat, written in zip(from_arrow, chats, strict=True):
        assert tokenizer.encode(chat) == tokenizer.encode(written)
    assert tokenizer.lengths(from_arrow) == tokenizer.lengths(chats)


def test_a_text_part_with_a_null_image_is_a_text():
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer(chat_template=PARTS), "model")
    chat = [{"role": "user", "content": [{"type": "text", "text": "how many?", "image": None}]}]
    assert tokenizer.decode(tokenizer.encode(chat), skip_special=False) == "how many?"


def test_null_arguments_of_a_tool_call_that_other_calls_have_are_left_out():
    template = (
        "{{ messages[0].tool_calls[0].function.name }} "
        "{{ messages[0].tool_calls[0].function.arguments | tojson }} {{ messages[1].content }}"
    )
    tokenizer = HuggingFaceTokenizer(tiny_tokenizer(chat_template=template), "model")
    call = {"function": {"name": "f", "arguments": {"city": "Rome", "day": None}}}
    ids = tokenizer.encode(
        [{"role": "assistant", "content": None, "tool_calls": [call]}, user("and")]
    )
    assert tokenizer.decode(ids, skip_special=False) == 'f {"city": "Rome"} and'
