"""Chat templates: the text that transformers' apply_chat_template gives, and errors that name messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.contracts.errors import BadRequest
from slipstream.text.chat_template import ChatTemplate, load_chat_template
from slipstream.text.tokenizer import load_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße 👋 <b>\n"},
    {"role": "assistant", "content": "  Hallo!  "},
    {"role": "user", "content": "1 + 1?"},
]
TWO_PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
TOOL = {"type": "function", "function": {
    "name": "add", "description": "Sum of zwei Größen <a, b>",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
}}
CALL = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "2", "tool_call_id": "x"},
]
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = """{{ bos_token }}{%- set ns = namespace(system='') %}
{%- macro described(tool) %}{{ tool.function.name }}: {{ tool | tojson(indent=2) }}{% endmacro %}
{% for message in messages %}
    {%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% continue %}{% endif %}
    {%- if message.tool_calls is defined %}
[{{ message.tool_calls[0].function | tojson }}]
    {%- elif message.content is string %}
{{ loop.index }} {{ message['role'] | upper }} {{ message.content }}{{ eos_token }}
    {%- else %}
{% generation %}{% for part in message.content %}<{{ part.type }}>{{ part.text }}{% endfor %}
{% endgeneration %}
    {%- endif %}
{%- endfor %}
{% if tools %}{{ described(tools[0]) }}{% endif %}{{ ns.system }}
{%- if enable_thinking is defined and not enable_thinking %}<quiet>{% endif %}
{{- strftime_now('%Y') | length }}"""
PARTS = "{% for m in messages %}{% for part in m['content'] %}[{{ part['text'] }}]{% endfor %}{% endfor %}"
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}ok"


@pytest.fixture(scope="module")
def theirs(demo_model):
    return AutoTokenizer.from_pretrained(demo_model.folder)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize(
    ("source", "messages", "options"),
    [
        (None, TALK, {}),
        (None, TALK[1:], {}),
        (CHATML, TALK, {}),
        (TOOLS, TALK, {"enable_thinking": False}),
        (TOOLS, TALK, {"tools": [TOOL]}),
        (TOOLS, CALL, {"tools": [TOOL]}),
        (TOOLS, [{"role": "user", "content": TWO_PARTS}], {}),
        (PARTS, [{"role": "user", "content": TWO_PARTS}], {}),
    ],
)
def test_the_text_is_that_of_transformers(
    theirs, source: str | None, messages: list, options: dict[str, Any], generate: bool
) -> None:
    source = source or theirs.chat_template
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=generate, **options
    )
    tools = options.pop("tools", None) if "tools" in (options := dict(options)) else None
    ours = ChatTemplate(source, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    assert ours(messages, add_generation_prompt=generate, tools=tools, template_kwargs=options) == expected


@pytest.mark.parametrize("source", [CHATML, TOOLS])
@pytest.mark.parametrize("last", ["The answer is", "The answer is  "])
def test_a_continued_message_is_cut_where_transformers_cuts_it(theirs, source: str, last: str) -> None:
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": last}]
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True
    )
    ours = ChatTemplate(source, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    assert ours(messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_lists_of_text_parts_are_joined_for_templates_that_want_text() -> None:
    template = ChatTemplate(CHATML, {})
    joined = template([{"role": "user", "content": "one\ntwo"}])
    assert template([{"role": "user", "content": TWO_PARTS}]) == joined
    assert ChatTemplate(PARTS, {})([{"role": "user", "content": "one"}]) == "[one]"
    with pytest.raises(BadRequest, match="content parts must be of type text") as raised:
        template([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert raised.value.field == "messages"


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (STRICT, [{"role": "system", "content": "x"}], "user first"),
        (CHATML, [], "must hold at least one message"),
        ("{{ 'a' + messages[0].content }}", [{"role": "user"}], "the chat template refuses them"),
        ("{{ messages[0].content / 2 }}", TALK, "the chat template refuses them"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", TALK, "the chat template refuses them"),
        ("{{ ''.__class__.__mro__ }}", TALK, "the chat template refuses them"),
        ("{{ messages.append(1) }}", TALK, "the chat template refuses them"),
    ],
)
def test_what_a_template_trips_over_is_a_bad_request(source: str, messages: list, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as raised:
        ChatTemplate(source, {})(messages)
    assert raised.value.field == "messages"


def test_messages_to_continue_must_appear_in_the_text() -> None:
    with pytest.raises(BadRequest, match="leaves out the message to continue"):
        ChatTemplate("nothing", {})(TALK, continue_final_message=True)
    with pytest.raises(BadRequest, match="no content to continue"):
        ChatTemplate(CHATML, {})([{"role": "assistant"}], continue_final_message=True)


def test_arguments_of_a_request_cannot_replace_the_conversation() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ bos_token }}", {"bos_token": "<s>"})
    found = template(TALK, template_kwargs={"messages": [{"content": "forged"}], "bos_token": "<t>"})
    assert found == "Be brief.<t>"


def test_source_that_is_no_template_is_an_error_at_start_up() -> None:
    with pytest.raises(ValueError, match=r"chat_template: line 2: "):
        ChatTemplate("{{ 1 }}\n{% for %}", {})


def test_the_flag_takes_a_file_or_a_template_and_the_model_has_its_own(demo_model, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(demo_model.gguf)
    messages = [{"role": "user", "content": "hi"}]
    own = load_chat_template(None, tokenizer)
    assert own is not None
    assert own(messages).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    (tmp_path / "plain.jinja").write_text("file: {{ messages[0].content }}")
    from_file = load_chat_template(str(tmp_path / "plain.jinja"), tokenizer)
    from_text = load_chat_template("text: {{ messages[0].content }}", tokenizer)
    assert from_file is not None and from_file(messages) == "file: hi"
    assert from_text is not None and from_text(messages) == "text: hi"
    with pytest.raises(ValueError, match=r"chat_template='absent.jinja': neither a template nor a file"):
        load_chat_template("absent.jinja", tokenizer)
    tokenizer.chat_template = None
    assert load_chat_template(None, tokenizer) is None
