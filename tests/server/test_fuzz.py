"""Bodies drawn from the server's own OpenAPI schema, some of them constrained, then bent: no answer is a 5xx,
no stream just ends, no row stays.

SLIPSTREAM_FUZZ_EXAMPLES sets the number of bodies (50,000 before a release), SLIPSTREAM_FUZZ_BACKEND the
library of grammars.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from constraint_parts import CONSTRAINTS
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from live import Live
from real import real_server
from schemas import SCHEMAS
from text_model import VOCAB, make_text_model
from waiting import wait_for

from slipstream.server.options import ServerOptions

EXAMPLES = int(os.environ.get("SLIPSTREAM_FUZZ_EXAMPLES", "200"))
# The schema of each body, and how many of twenty bodies are for it.
BODIES = {
    "/v1/completions": ("CompletionBody", 7),
    "/v1/chat/completions": ("ChatBody", 6),
    "/v1/responses": ("ResponseBody", 4),
    "/v1/embeddings": ("EmbeddingBody", 1),
    "/tokenize": ("TokenizeBody", 1),
    "/detokenize": ("DetokenizeBody", 1),
}
GRAMMARS = {"backend": os.environ.get("SLIPSTREAM_FUZZ_BACKEND", "auto"), "compile_timeout": 2}
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
READ = ServerOptions(tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser="qwen3")
EDGES = [
    0,
    1,
    -1,
    2,
    16,
    20,
    21,
    63,
    64,
    128,
    129,
    255,
    256,
    257,
    VOCAB - 1,
    VOCAB,
    VOCAB + 7,
    2**31 - 1,
    2**31,
    2**63,
    -(2**63) - 1,
    10**30,
]
TEXTS = [
    "",
    " ",
    "a",
    "hi there",
    "\n\n",
    "\0",
    "caf\u00e9 \U0001f600",
    "\u200d",
    "x" * 300,
    "</s>",
    "<s>",
    "real",
]

HI = {"role": "user", "content": "hi"}
PLAIN: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [{"prompt": "hi"}, {"prompt": [5, 6]}, {"prompt": ["a", "b"]}],
    "/v1/chat/completions": [
        {"messages": [HI]},
        {"messages": [HI, {"role": "assistant", "content": "oh"}, HI], "logprobs": True},
        {"messages": [HI], "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
    ],
    "/v1/responses": [
        {"input": "hi"},
        {"input": [HI, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, HI]},
    ],
    "/v1/embeddings": [{"input": "hi"}],
    "/tokenize": [{"prompt": "hi", "messages": None}, {"messages": [HI], "prompt": None}],
    "/detokenize": [{"tokens": [5, 6]}],
}

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def real(tiny_model: Callable[..., Path]) -> Iterator[Live]:
    flags: dict[str, Any] = {"scheduling_policy": "priority", "structured_outputs_config": GRAMMARS}
    with real_server(make_text_model(tiny_model), READ, **flags) as live:
        yield live


def junk() -> st.SearchStrategy[Any]:
    """A value of any type, most of them at some edge."""
    floats = st.sampled_from([0.0, -0.0, 0.5, 1.0, 1.5, -2.0, 2.0, 1e-310, 1e38, 1e308]) | st.floats(
        allow_nan=False, allow_infinity=False
    )
    plain = st.none() | st.booleans() | st.sampled_from(EDGES) | floats | st.sampled_from(TEXTS)
    return plain | st.recursive(
        plain,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["1", "5", "-1", "x", "type", "role", "content", str(VOCAB + 50)]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=6,
    )


def of_schema(schema: Schema, all_of: Schema) -> st.SearchStrategy[Any]:
    """Values that a schema allows, and near its bounds."""
    if "$ref" in schema:
        return of_schema(all_of[schema["$ref"].rsplit("/", 1)[1]], all_of)
    if "anyOf" in schema or "oneOf" in schema:
        bounds = {key: schema[key] for key in ("minimum", "exclusiveMinimum", "maximum") if key in schema}
        options = schema.get("anyOf") or schema["oneOf"]
        return st.one_of([of_schema(option | bounds, all_of) for option in options])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    low, high = schema.get("minimum", schema.get("exclusiveMinimum", -1)), schema.get("maximum", VOCAB)
    if kind == "integer":
        near = [value for value in (low, low + 1, high - 1, high, *EDGES) if low <= value <= high]
        return st.sampled_from(near) | st.integers(int(low), min(int(high), int(low) + 40))
    if kind == "number":
        return st.floats(float(low), float(high)) | st.sampled_from([float(low), float(high)])
    if kind == "array":
        return st.lists(of_schema(schema.get("items", {}), all_of), max_size=6)
    if kind == "object" and "properties" in schema:
        return of_object(schema, all_of)
    if kind == "object":
        extra = schema.get("additionalProperties")
        inner = extra if isinstance(extra, dict) else {}
        keys = st.integers(0, VOCAB - 1).map(str) | st.sampled_from(TEXTS)
        return st.dictionaries(keys, of_schema(inner, all_of), max_size=4)
    return {
        "string": st.sampled_from(TEXTS) | st.text(max_size=20),
        "boolean": st.booleans(),
        "null": st.none(),
    }.get(str(kind), junk())


def of_object(schema: Schema, all_of: Schema) -> st.SearchStrategy[Any]:
    """Required fields, and some of the others."""
    required = schema.get("required", [])
    fields = {name: of_schema(field, all_of) for name, field in schema["properties"].items()}
    optional = sorted(set(fields) - set(required))
    chosen = st.lists(st.sampled_from(optional), max_size=5, unique=True) if optional else st.just([])
    return chosen.flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in [*required, *names]})
    )


# Half of them are right.
CONSTRAINED = st.sampled_from([
    {"json": SCHEMAS["weather call"]}, {"json": json.dumps(SCHEMAS["tree"])}, {"json_object": True},
    {"regex": "(ab|cd)+"}, {"choice": ["yes", "no", "caf\u00e9"]}, {"grammar": 'root ::= ("<" [ab] ">")+'},
    {"grammar": 'start: "p" /q|r/'},
    {"structural_tag": json.dumps({"structures": [
        {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f>"]})},
]) | CONSTRAINTS  # fmt: skip


def constrained(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Fields that constrain an answer, in each endpoint's words."""

    def as_fields(constraint: dict[str, Any], name: str) -> dict[str, Any]:
        schema = {"name": "x", "schema": constraint.get("json", {})}
        tool = {"name": "f", "parameters": constraint.get("json", {})}
        if path == "/v1/responses":
            asked: dict[str, Any] = {"text": {"format": {"type": "json_schema"} | schema}}
            tool, answer = {"type": "function"} | tool, asked
        else:
            answer = {"response_format": {"type": "json_schema", "json_schema": schema}}
            asked, tool = {"structured_outputs": constraint}, {"type": "function", "function": tool}
        forced = {"tools": [tool], "tool_choice": name} if path != "/v1/completions" else asked
        return {"plain": asked, "answer": answer}.get(name, forced)

    return st.builds(as_fields, CONSTRAINED, st.sampled_from(["plain", "answer", "required", "auto", "none"]))


def bodies(path: str, all_of: Schema) -> st.SearchStrategy[str]:
    """JSON texts: fields by the schema, a few of them bent, and now and then the text itself."""
    name, _ = BODIES[path]
    fields = sorted(all_of[name]["properties"])

    valid, bent, held = of_object(all_of[name], all_of), junk(), constrained(path)

    @st.composite
    def body(draw: Any) -> str:
        value = draw(valid)
        if draw(st.integers(0, 3)):
            value |= draw(st.sampled_from(PLAIN[path]))
        if path in STREAMED and draw(st.integers(0, 3)) == 0:
            value |= draw(held) | draw(st.sampled_from(PLAIN[path][:2]))
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
            value[draw(st.sampled_from(fields) | st.sampled_from(TEXTS))] = draw(bent)
        if draw(st.integers(0, 9)):
            value.pop("model", None)
        if path in STREAMED and draw(st.integers(0, 19)) < 19:
            most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            value.setdefault(most, draw(st.integers(0, 8)))
        text = json.dumps(value)
        if draw(st.integers(0, 9)) == 0:
            cut = draw(st.integers(0, len(text)))
            text = (
                text[:cut]
                + draw(st.sampled_from(["", "NaN", "-Infinity", "}", "\\ud800", "[" * 100, ","]))
                + text[cut + draw(st.integers(0, 3)) :]
            )
        return text

    return body()


def check(path: str, body: str, answer: httpx.Response) -> None:
    """Whatever was asked, the answer is whole."""
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], error
        assert len(answer.content) < 4000
    elif answer.headers["content-type"].startswith("text/event-stream") and path == "/v1/responses":
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        parsed = [json.loads(line) for line in data]
        assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
        assert parsed[-1]["type"] in ("response.completed", "response.incomplete"), (body, parsed[-1])
        items = [event["item"] for event in parsed if event["type"] == "response.output_item.done"]
        assert items == parsed[-1]["response"]["output"] and items
    elif answer.headers["content-type"].startswith("text/event-stream"):
        *events, end, nothing = answer.text.split("\n\n")
        assert (end, nothing) == ("data: [DONE]", "")
        parsed = [json.loads(event.removeprefix("data: ")) for event in events]
        assert not any("error" in event for event in parsed), (body, parsed[-1])
        started = {choice["index"] for event in parsed for choice in event["choices"]}
        ended = [
            choice["index"] for event in parsed for choice in event["choices"] if choice["finish_reason"]
        ]
        assert sorted(ended) == sorted(started) and started
    elif path == "/v1/responses":
        assert answer.json()["status"] in ("completed", "incomplete")
    elif path.startswith("/v1/"):
        reasons = {choice["finish_reason"] for choice in answer.json()["choices"]}
        assert reasons <= {"stop", "length", "tool_calls"}


@pytest.mark.parametrize("path", BODIES)
def test_no_body_causes_a_server_error(real: Live, path: str) -> None:
    schemas = real.http.get("/openapi.json").json()["components"]["schemas"]
    statuses: dict[int, int] = {}

    @settings(
        max_examples=max(10, EXAMPLES * BODIES[path][1] // 20),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(bodies(path, schemas))
    def run(body: str) -> None:
        answer = real.raw(path, body.encode("utf-8", "surrogatepass"))
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        check(path, body, answer)

    run()
    print(f"{path}: {statuses}", file=sys.stderr)
    assert (statuses.get(200) or path == "/v1/embeddings") and statuses.get(400), statuses
    plain = real.raw_json("/v1/completions", {"prompt": "still here", "max_tokens": 3, "temperature": 0})
    assert plain["usage"]["completion_tokens"] >= 1
    assert wait_for(lambda: real.metric("num_requests_running") == 0)
    assert wait_for(lambda: real.metric("kv_blocks_free") == real.metric("kv_blocks_total"))


def test_no_query_and_no_method_causes_a_server_error(real: Live) -> None:
    """Every path of the schema, those with bodies too, by methods that it has and has not."""
    paths = real.http.get("/openapi.json").json()["paths"]
    assert set(BODIES) < set(paths) and "/metrics" in paths
    odd = ["", "?a=1", "?limit=-1&after=%00", "?x=" + "y" * 3000, "?%ff%fe", "?a[]=1&a[]=2"]
    for path in sorted(paths):
        for name in ("real", "%2e%2e%2f%2e%2e", "x" * 2000, "%00", "caf%C3%A9", "?"):
            for query in odd:
                for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
                    url = path.replace("{name}", name) + query
                    assert real.http.request(method, url).status_code < 500, (method, url)
            if "{name}" not in path:
                break
