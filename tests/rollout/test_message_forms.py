"""A chat template writes each message of a prompt, whatever forms it reads; what it would not write
is refused, and not left out.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.errors import DataError
from siirl_dask.rollout.tokenizer import HuggingFaceTokenizer
from siirl_dask.tasks.tiny_model import tiny_tokenizer

BEGINS = "{% if add_generation_prompt %}<assistant>{% endif %}"
CONTENTS = {
    "joins": "{{ '<' + m.role + '>' + m.content }}",
    "trims": "<{{ m.role }}>{{ m.content | trim }}",
    "prints": "<{{ m.role }}>{{ m.content }}",
    "writes JSON": "<{{ m.role }}>{{ m.content if m.content is string else m.content | tojson }}",
    "texts alone": "<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% endif %}",
    "parts alone": "<{{ m.role }}>{% for c in m.content %}{{ c.text }}{% endfor %}",
    "either": (
        "<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}"
    ),
    "after a system's": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<{{ m.role }}>{{ m.content | trim }}"
    ),
}
CALLS = {
    "of objects": "{{ f.arguments | tojson }}",
    "of JSON": "{{ '' + f.arguments }}",
    "of either": "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}",
    "of items": "{% for k, v in f.arguments | items %}{{ '{\"' + k + '\": ' + v | tojson + '}' }}{% endfor %}",
    "of JSON, printed": "{{ f.arguments }}",
}
WORDS = st.text("ab <'\"{é\n", min_size=1, max_size=8)


def tokenizer_of(template):
    return HuggingFaceTokenizer(tiny_tokenizer(chat_template=template), "model")


def template_of(content, after=BEGINS):
    return "{% for m in messages %}" + content + "{% endfor %}" + after


def shown(tokenizer, chat):
    return tokenizer.decode(tokenizer.encode(chat), skip_special=False)


def said(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize("kind", CONTENTS)
@given(words=st.lists(WORDS, min_size=1, max_size=3))
def test_a_prompt_has_the_words_of_texts_and_of_parts_alike(kind, words):
    tokenizer = tokenizer_of(template_of(CONTENTS[kind]))
    system = said("system", "be kind")
    parts = [
        system,
        said("user", [{"type": "text", "text": text, "image": None} for text in words]),
    ]
    text = [system, said("user", "".join(words))]
    assert shown(tokenizer, parts) == shown(tokenizer, text)
    assert "type" not in shown(tokenizer, text)
    for word in "".join(words).split():
        assert word in shown(tokenizer, text)
    assert tokenizer.lengths([parts, text]) == [len(tokenizer.encode(text))] * 2


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("as_json", [True, False])
def test_arguments_of_a_call_are_written_as_json_however_the_dataset_has_them(kind, as_json):
    calls = "{% for call in m.tool_calls or [] %}{% set f = call.function %}{{ f.name }} "
    content = f"{{{{ m.content }}}}{calls}{CALLS[kind]}{{% endfor %}};"
    arguments = {"x": "é"}
    call = {
        "name": "look",
        "arguments": json.dumps(arguments, ensure_ascii=False) if as_json else arguments,
    }
    asks = said("assistant", None) | {"tool_calls": [{"type": "function", "function": call}]}
    chat = [said("user", "q"), asks, said("tool", "7")]
    assert shown(tokenizer_of(template_of(content)), chat).startswith('q;look {"x": "é"};7;')


def test_arguments_that_are_no_object_stay_the_text_that_they_are():
    content = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.name }} {{ c.arguments | tojson }}{% endfor %};"
    for text in ("no JSON", "[1]", "7"):
        asks = said("assistant", "") | {"tool_calls": [{"name": "f", "arguments": text}]}
        chat = [said("user", "q"), asks, said("tool", "7")]
        assert f"f {json.dumps(text)};" in shown(tokenizer_of(template_of(content)), chat)


DROPS = {
    "a system's message": (
        "{% if m.role == 'user' %}{{ m.content }}{% endif %}",
        [said("system", "be kind"), said("user", "q")],
        "message 0 of its chat (system) says, 'be kind'",
    ),
    "all but the last": (
        "{% if loop.last %}{{ m.content }}{% endif %}",
        [said("user", "first"), said("assistant", "a"), said("user", "second")],
        "message 0 of its chat (user) says, 'first'",
    ),
    "what a tool returned": (
        "{% if m.role != 'tool' %}{{ m.content }}{% endif %}",
        [said("user", "q"), said("tool", "found")],
        "message 1 of its chat (tool) says, 'found'",
    ),
    "calls": (
        "{{ m.content }}",
        [
            said("user", "q"),
            said("assistant", None) | {"tool_calls": [{"function": {"name": "look"}}]},
            said("tool", "7"),
        ],
        "message 1 of its chat (assistant) says, 'look'",
    ),
    "everything": ("", [said("user", "q")], "message 0 of its chat (user) says, 'q'"),
}


@pytest.mark.parametrize("kind", DROPS)
def test_a_template_that_leaves_a_message_out_of_the_prompt_is_refused_with_the_message(kind):
    content, chat, words = DROPS[kind]
    with pytest.raises(DataError) as error:
        tokenizer_of(template_of(content)).encode(chat)
    assert words in str(error.value)


def test_a_template_may_trim_escape_and_leave_out_what_was_thought():
    thoughts = "{{ m.content.split('</think>')[-1] | trim if m.role == 'assistant' else m.content | trim | tojson }}"
    chat = [
        said("user", ' say "a"\nb '),
        said("assistant", "<think>deep</think> c"),
        said("user", "d"),
    ]
    assert shown(tokenizer_of(template_of(thoughts)), chat) == '"say \\"a\\"\\nb"c"d"<assistant>'


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ([], "its chat is []"),
        ({"role": "user", "content": "q"}, "its chat is {'role'"),
        (["q"], "message 0 of its chat is 'q'"),
        ([said("user", "q"), None], "message 1 of its chat is None"),
        ([{"from": "human", "value": "q"}], "message 0 of its chat has the role None"),
        ([said("user", None)], "message 0 of its chat (user) has no content"),
        ([said("user", 5)], "message 0 of its chat (user) has the content 5"),
        ([said("user", [{"type": "image_url"}])], "has the part {'type': 'image_url'}"),
        ([said("user", [{"type": "text", "text": None}])], "has the part {'type': 'text'}"),
    ],
)
def test_what_is_no_chat_is_refused_and_not_written_as_python_prints_it(chat, words):
    for kind in ("joins", "prints", "texts alone"):
        with pytest.raises(DataError) as error:
            tokenizer_of(template_of(CONTENTS[kind])).encode(chat)
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("content", "after", "header"),
    [
        ("<{{ m.role }}>{{ m.content }}<end>", "", "<assistant>"),
        ("<{{ m.role }}>{{ m.content }}<end>", BEGINS, None),
        ("<{{ m.role }}>\n<think>{{ m.content }}", "<assistant>\n<think>\n", None),
        (
            "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content }}",
            "",
            None,
        ),
        ("{{ raise_exception('no') }}", "", None),
    ],
)
def test_a_template_that_does_not_begin_an_answer_is_remarked_on(content, after, header):
    note = tokenizer_of(template_of(content, after)).unbegun_note
    assert (note == "") == (header is None)
    assert str(header) in note or header is None
