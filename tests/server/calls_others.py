"""Calls of litellm and of langchain-openai."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from client_calls import COUNT, TOOL_REPLY, WEATHER, WEEK, Target, refusal, scripted, smol, tiny
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage


@tiny
def litellm_chat(at: Target) -> None:
    answer = litellm.completion(**at.lite(messages=COUNT, max_tokens=8, temperature=0))
    assert answer.choices[0].message.role == "assistant" and answer.usage.completion_tokens <= 8


@tiny
def litellm_chat_stream(at: Target) -> None:
    whole = litellm.completion(**at.lite(messages=COUNT, max_tokens=8, temperature=0))
    chunks = list(litellm.completion(**at.lite(messages=COUNT, max_tokens=8, temperature=0, stream=True)))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content and chunks[-1].choices[0].finish_reason


@tiny
def litellm_chat_async(at: Target) -> None:
    answer = asyncio.run(litellm.acompletion(**at.lite(messages=COUNT, max_tokens=3)))
    assert 1 <= answer.usage.completion_tokens <= 3


@tiny
def litellm_chat_stream_usage(at: Target) -> None:
    ask = at.lite(messages=COUNT, max_tokens=4, stream=True, stream_options={"include_usage": True})
    used = [chunk.usage for chunk in litellm.completion(**ask) if getattr(chunk, "usage", None)]
    assert 1 <= used[-1].completion_tokens <= 4


@smol
def litellm_text(at: Target) -> None:
    ask = at.lite(prompt=WEEK, max_tokens=3, temperature=0)
    ask["model"] = f"text-completion-openai/{at.model}"
    assert "Wednesday" in litellm.text_completion(**ask).choices[0].text


@smol
def litellm_text_stream(at: Target) -> None:
    ask = at.lite(prompt=WEEK, max_tokens=3, temperature=0, stream=True)
    ask["model"] = f"text-completion-openai/{at.model}"
    assert "Wednesday" in "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**ask))


@tiny
def litellm_logprobs(at: Target) -> None:
    answer = litellm.completion(**at.lite(messages=COUNT, max_tokens=2, logprobs=True, top_logprobs=2))
    assert len(answer.choices[0].logprobs.content) == 2


@tiny
def litellm_responses(at: Target) -> None:
    answer = litellm.responses(**at.lite(input="Count from 1 to 10.", max_output_tokens=6))
    assert answer.output[0].content[0].text


@tiny
def litellm_refusal(at: Target) -> None:
    error = refusal(lambda: litellm.completion(**at.lite(messages=COUNT, temperature=-1)))
    assert error.status_code == 400 and "temperature" in str(error)


@scripted
def litellm_tools(at: Target) -> None:
    at.set_reply(TOOL_REPLY)
    message = litellm.completion(**at.lite(messages=COUNT, tools=[WEATHER])).choices[0].message
    assert message.tool_calls[0].function.arguments == '{"city": "Paris"}'


@scripted
def litellm_tools_stream(at: Target) -> None:
    at.set_reply(TOOL_REPLY)
    chunks = list(litellm.completion(**at.lite(messages=COUNT, tools=[WEATHER], stream=True)))
    built = litellm.stream_chunk_builder(chunks, messages=COUNT)
    assert built.choices[0].message.tool_calls[0].function.arguments == '{"city": "Paris"}'


@scripted
def litellm_reasoning(at: Target) -> None:
    at.set_reply("<think>\nHm.\n</think>\n\nYes.")
    message = litellm.completion(**at.lite(messages=COUNT)).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")


@scripted
def litellm_reasoning_stream(at: Target) -> None:
    at.set_reply("<think>\nHm.\n</think>\n\nYes.")
    deltas = [chunk.choices[0].delta for chunk in litellm.completion(**at.lite(messages=COUNT, stream=True))]
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert (thoughts, "".join(delta.content or "" for delta in deltas)) == ("Hm.", "Yes.")


# langchain-openai.


@tiny
def langchain_chat(at: Target) -> None:
    answer = at.chat(temperature=0, max_tokens=8).invoke(
        [SystemMessage("You count."), HumanMessage("To 10.")]
    )
    assert isinstance(answer, AIMessage) and answer.content
    assert answer.usage_metadata["output_tokens"] <= 8 and answer.response_metadata["finish_reason"]


@tiny
def langchain_chat_stream(at: Target) -> None:
    chat = at.chat(temperature=0, max_tokens=8)
    chunks = list(chat.stream("Count from 1 to 10."))
    assert "".join(chunk.content for chunk in chunks) == chat.invoke("Count from 1 to 10.").content


@tiny
def langchain_chat_batch(at: Target) -> None:
    answers = at.chat(max_tokens=3).batch(["One", "Two", "Three"])
    assert all(1 <= answer.usage_metadata["output_tokens"] <= 3 for answer in answers)


@tiny
def langchain_chat_async_stream(at: Target) -> None:
    async def run() -> list[Any]:
        return [chunk async for chunk in at.chat(max_tokens=4).astream("Count.")]

    assert asyncio.run(run())


@tiny
def langchain_chat_logprobs(at: Target) -> None:
    answer = at.chat(max_tokens=2).bind(logprobs=True).invoke("Count.")
    assert len(answer.response_metadata["logprobs"]["content"]) == 2


@tiny
def langchain_responses(at: Target) -> None:
    answer = at.chat(max_tokens=6, use_responses_api=True).invoke("Count from 1 to 10.")
    assert answer.text and answer.usage_metadata["output_tokens"] <= 6


@tiny
def langchain_responses_stream(at: Target) -> None:
    chunks = list(at.chat(max_tokens=6, use_responses_api=True).stream("Count from 1 to 10."))
    assert "".join(chunk.text for chunk in chunks)


@smol
def langchain_text(at: Target) -> None:
    assert "Wednesday" in at.text(temperature=0, max_tokens=3).invoke(WEEK)


@smol
def langchain_text_stream(at: Target) -> None:
    assert "Wednesday" in "".join(at.text(temperature=0, max_tokens=3).stream(WEEK))


@scripted
def langchain_tools(at: Target) -> None:
    at.set_reply(TOOL_REPLY)
    chat = at.chat().bind_tools([WEATHER])
    first = chat.invoke("Weather?")
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("get_weather", {"city": "Paris"})]
    at.set_reply("It rains.")
    result = ToolMessage("rain", tool_call_id=first.tool_calls[0]["id"])
    assert chat.invoke([HumanMessage("Weather?"), first, result]).content == "It rains."


@scripted
def langchain_tools_stream(at: Target) -> None:
    at.set_reply(TOOL_REPLY)
    whole: Any = None
    for chunk in at.chat().bind_tools([WEATHER]).stream("Weather?"):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "Paris"})]
