"""Calls of the official client."""

from __future__ import annotations

import asyncio
from typing import Any

from client_calls import COUNT, TOOL_REPLY, WEATHER, WEEK, Target, refusal, scripted, smol, tiny
from openai import AsyncOpenAI


@tiny
def openai_models_list(at: Target) -> None:
    assert [(card.id, card.object) for card in at.openai.models.list()] == [(at.model, "model")]


@tiny
def openai_models_retrieve(at: Target) -> None:
    assert at.openai.models.retrieve(at.model).id == at.model


@smol
def openai_chat(at: Target) -> None:
    answer = at.openai.chat.completions.create(model=at.model, messages=COUNT, temperature=0, max_tokens=12)
    assert answer.object == "chat.completion" and answer.choices[0].index == 0
    assert answer.choices[0].message.role == "assistant" and "1" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@tiny
def openai_chat_stream(at: Target) -> None:
    ask: Any = {"model": at.model, "messages": COUNT, "temperature": 0, "max_completion_tokens": 12}
    chunks = list(at.openai.chat.completions.create(**ask, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == at.openai.chat.completions.create(**ask).choices[0].message.content
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


@tiny
def openai_chat_stream_usage(at: Target) -> None:
    *chunks, last = at.openai.chat.completions.create(
        model=at.model, messages=COUNT, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == [] and last.usage is not None and 1 <= last.usage.completion_tokens <= 4
    assert all(chunk.usage is None for chunk in chunks)


@tiny
def openai_chat_stream_helper(at: Target) -> None:
    ask: Any = {"stop": [chr(n) for n in range(97, 113)], "seed": 1}  # the helper raises where length ends it
    with at.openai.chat.completions.stream(model=at.model, messages=COUNT, **ask) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == text


@tiny
def openai_chat_n(at: Target) -> None:
    answer = at.openai.chat.completions.create(
        model=at.model, messages=COUNT, n=3, temperature=1.5, max_tokens=8, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3


@tiny
def openai_chat_seed(at: Target) -> None:
    ask: Any = {"model": at.model, "messages": COUNT, "temperature": 1.2, "max_tokens": 8, "seed": 7}
    texts = {at.openai.chat.completions.create(**ask).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


@smol
def openai_chat_logprobs(at: Target) -> None:
    answer = at.openai.chat.completions.create(
        model=at.model, messages=COUNT, max_tokens=3, temperature=0, logprobs=True, top_logprobs=4
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 3 and all(len(entry.top_logprobs) == 4 for entry in entries)
    for entry in entries:
        assert entry.logprob <= 0 and entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert bytes(entry.bytes).decode() == entry.token


@tiny
def openai_chat_logprobs_stream(at: Target) -> None:
    chunks = at.openai.chat.completions.create(
        model=at.model, messages=COUNT, max_tokens=3, logprobs=True, top_logprobs=0, stream=True
    )
    found = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert sum(len(logprobs.content) for logprobs in found) == 3


@smol
def openai_chat_stop(at: Target) -> None:
    answer = at.openai.chat.completions.create(
        model=at.model, messages=COUNT, temperature=0, max_tokens=30, stop=["3"]
    )
    assert "3" not in (answer.choices[0].message.content or "") and answer.choices[0].finish_reason == "stop"


@tiny
def openai_chat_system_and_parts(at: Target) -> None:
    parts = [{"type": "text", "text": "Count from 1 to 10."}]
    turns: Any = [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": parts, "name": "u"},
    ]
    answer = at.openai.chat.completions.create(model=at.model, messages=turns, max_tokens=3, user="me")
    assert answer.choices[0].message.content


@tiny
def openai_chat_second_turn(at: Target) -> None:
    first = at.openai.chat.completions.create(model=at.model, messages=COUNT, max_tokens=4)
    turns = [*COUNT, first.choices[0].message, {"role": "user", "content": "Go on."}]
    assert at.openai.chat.completions.create(model=at.model, messages=turns, max_tokens=3).choices


@smol
def openai_chat_logit_bias(at: Target) -> None:
    free = at.openai.completions.create(model=at.model, prompt=WEEK, temperature=0, max_tokens=1, logprobs=1)
    ids = at.openai.post("/../tokenize", body={"prompt": free.choices[0].text}, cast_to=dict[str, Any])
    banned = {str(ids["tokens"][0]): -100}
    other = at.openai.completions.create(
        model=at.model, prompt=WEEK, temperature=0, max_tokens=1, logit_bias=banned
    )
    assert other.choices[0].text != free.choices[0].text


@tiny
def openai_chat_penalties_and_extras(at: Target) -> None:
    answer = at.openai.chat.completions.create(
        model=at.model, messages=COUNT, max_tokens=4, presence_penalty=1.0, frequency_penalty=0.5, top_p=0.9,
        metadata={"k": "v"}, store=False, service_tier="auto", response_format={"type": "text"},
        extra_body={"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "ignore_eos": True},
    )  # fmt: skip
    assert answer.usage.completion_tokens == 4 and answer.choices[0].finish_reason == "length"


@smol
def openai_completion(at: Target) -> None:
    answer = at.openai.completions.create(model=at.model, prompt=WEEK, temperature=0, max_tokens=3)
    assert answer.object == "text_completion" and "Wednesday" in answer.choices[0].text


@tiny
def openai_completion_stream(at: Target) -> None:
    ask: Any = {"model": at.model, "prompt": WEEK, "temperature": 0, "max_tokens": 8}
    text = "".join(chunk.choices[0].text for chunk in at.openai.completions.create(**ask, stream=True))
    assert text == at.openai.completions.create(**ask).choices[0].text


@tiny
def openai_completion_batch(at: Target) -> None:
    answer = at.openai.completions.create(model=at.model, prompt=[WEEK, "Once upon"], n=2, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


@smol
def openai_completion_echo_logprobs(at: Target) -> None:
    answer = at.openai.completions.create(
        model=at.model, prompt="One two", echo=True, logprobs=2, max_tokens=2, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith("One two") and choice.logprobs.token_logprobs[0] is None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset[0] == 0 and all(top for top in choice.logprobs.top_logprobs[1:])


@smol
def openai_completion_score_of_a_prompt(at: Target) -> None:
    def score(prompt: str) -> float:
        answer = at.openai.completions.create(
            model=at.model, prompt=prompt, echo=True, logprobs=0, max_tokens=0
        )
        assert answer.choices[0].text == prompt and answer.usage.completion_tokens == 0
        return sum(answer.choices[0].logprobs.token_logprobs[1:])

    assert score("Monday, Tuesday, Wednesday") > score("Monday, Tuesday, giraffe")


@tiny
def openai_completion_token_ids(at: Target) -> None:
    ids = at.openai.post("/../tokenize", body={"prompt": WEEK}, cast_to=dict[str, Any])["tokens"]
    by_ids = at.openai.completions.create(model=at.model, prompt=ids, temperature=0, max_tokens=4)
    by_text = at.openai.completions.create(model=at.model, prompt=WEEK, temperature=0, max_tokens=4)
    assert by_ids.choices[0].text == by_text.choices[0].text


@tiny
def openai_completion_best_of_is_refused(at: Target) -> None:
    error = refusal(lambda: at.openai.completions.create(model=at.model, prompt="a", best_of=3))
    assert error.status_code == 400 and error.param == "best_of"


@tiny
def openai_async_chats_at_once(at: Target) -> None:
    async def run() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{at.url}/v1", api_key="none", max_retries=0) as client:
            asks = [
                client.chat.completions.create(model=at.model, messages=COUNT, max_tokens=3) for _ in range(8)
            ]
            return await asyncio.gather(*asks)

    assert len({answer.id for answer in asyncio.run(run())}) == 8


@tiny
def openai_raw_response_headers(at: Target) -> None:
    raw = at.openai.chat.completions.with_raw_response.create(model=at.model, messages=COUNT, max_tokens=1)
    assert raw.headers["content-type"].startswith("application/json") and raw.parse().choices


@tiny
def openai_unknown_model(at: Target) -> None:
    error = refusal(lambda: at.openai.chat.completions.create(model="gpt-9", messages=COUNT))
    assert error.status_code == 404 and error.code == "model_not_found"


@tiny
def openai_bad_value(at: Target) -> None:
    error = refusal(lambda: at.openai.chat.completions.create(model=at.model, messages=COUNT, top_p=2))
    assert error.status_code == 400 and error.param == "top_p" and error.type == "invalid_request_error"


@tiny
def openai_embeddings_are_refused(at: Target) -> None:
    error = refusal(lambda: at.openai.embeddings.create(model=at.model, input="a"))
    assert error.status_code == 400 and "embeddings" in str(error)


@tiny
def openai_response(at: Target) -> None:
    answer = at.openai.responses.create(
        model=at.model, input="Count from 1 to 10.", temperature=0, max_output_tokens=12
    )
    assert answer.object == "response" and answer.output_text == answer.output[0].content[0].text
    assert answer.status == ("incomplete" if answer.usage.output_tokens == 12 else "completed")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


@tiny
def openai_response_stream(at: Target) -> None:
    ask: Any = {"model": at.model, "input": COUNT, "temperature": 0, "max_output_tokens": 8}
    found = list(at.openai.responses.create(**ask, stream=True))
    assert found[0].type == "response.created" and found[-1].type in (
        "response.completed",
        "response.incomplete",
    )
    text = "".join(event.delta for event in found if event.type == "response.output_text.delta")
    assert text == found[-1].response.output_text == at.openai.responses.create(**ask).output_text


@tiny
def openai_response_instructions(at: Target) -> None:
    answer = at.openai.responses.create(
        model=at.model, instructions="You count.", input="To 3.", max_output_tokens=4, store=False
    )
    assert answer.instructions == "You count." and answer.output[0].role == "assistant"


@scripted
def openai_tools(at: Target) -> None:
    at.set_reply(TOOL_REPLY)
    answer = at.openai.chat.completions.create(model=at.model, messages=COUNT, tools=[WEATHER])
    [call] = answer.choices[0].message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == (
        "function",
        "get_weather",
        '{"city": "Paris"}',
    )
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None


@scripted
def openai_tools_stream_helper(at: Target) -> None:
    at.set_reply(TOOL_REPLY)
    with at.openai.chat.completions.stream(model=at.model, messages=COUNT, tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert message.tool_calls[0].function.arguments == '{"city": "Paris"}'


@scripted
def openai_tools_round_trip(at: Target) -> None:
    at.set_reply(TOOL_REPLY)
    first = (
        at.openai.chat.completions.create(model=at.model, messages=COUNT, tools=[WEATHER]).choices[0].message
    )
    at.set_reply("It rains.")
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    answer = at.openai.chat.completions.create(
        model=at.model, messages=[*COUNT, first, result], tools=[WEATHER]
    )
    assert answer.choices[0].message.content == "It rains." and answer.choices[0].finish_reason == "stop"


@scripted
def openai_response_tools(at: Target) -> None:
    at.set_reply(TOOL_REPLY)
    tool: Any = {"type": "function", "strict": None, **WEATHER["function"]}
    [item] = at.openai.responses.create(model=at.model, input="x", tools=[tool]).output
    assert (item.type, item.name, item.arguments) == ("function_call", "get_weather", '{"city": "Paris"}')
    with at.openai.responses.stream(model=at.model, input="x", tools=[tool]) as stream:
        kinds = [event.type for event in stream]
    assert "response.function_call_arguments.delta" in kinds and kinds[-1] == "response.completed"
