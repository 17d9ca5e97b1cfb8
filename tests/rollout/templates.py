"""Chat templates as models have them, on a tokenizer whose tokens are bytes, and special tokens
of each family.
"""

from siirl_dask.tasks.tiny_model import tiny_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}<|start_header_id|>{{ message.role "
    "}}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}<s>[INST] {{ message.content | trim }} [/INST]"
    "{% else %} {{ message.content | trim }} </s>{% endif %}{% endfor %}"
)
QWEN3 = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
{%- set index = messages|length - 1 - loop.index0 %}
{%- if not ns.found and message.role == 'user' %}{%- set ns.found = true %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role in ('user', 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- set thoughts = '' %}
{%- if '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last %}
{{- '<|im_start|>assistant\\n<think>\\n' + thoughts + '\\n</think>\\n\\n' + content }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

FAMILIES = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
    ),
    "llama2": (LLAMA2, ["<s>", "</s>"], "</s>"),
    "qwen3": (QWEN3, ["<|im_start|>", "<|im_end|>", "<think>", "</think>"], "<|im_end|>"),
}


def tokenizer_of(family):
    """A tokenizer with the family's template, and the id of its end of turn."""
    template, special, end = FAMILIES[family]
    tokenizer = tiny_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": special, "eos_token": end})
    return tokenizer, tokenizer.convert_tokens_to_ids(end)
