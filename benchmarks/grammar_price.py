"""What grammars cost those who have none: time a token of plain requests beside constrained ones, and
beside as many plain ones instead.

    python benchmarks/grammar_price.py FOLDER [--plain 32] [--others 32] [--tokens 256] [--pairs 9]
        [--random-weights] [--json FILE]

Both runs of a pair have the same plain requests, and change places from pair to pair. A constrained answer is
JSON by a schema that does not let it end early. --random-weights: FOLDER has a config.json only; its weights
and vocabulary are made as in server_gpu.py. Ends with 1 where the plain requests' median is more than
3 % higher beside grammars.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from server_gpu import make_folder

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.cli.bench_stats import effect
from slipstream.cli.serve_load import default_text

MOST = 1.03
PROMPT_CHARACTERS = 160
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"], "additionalProperties": False,
}  # fmt: skip
SCHEMA = {"type": "array", "items": PERSON, "minItems": 500}


def tpot(llm: LLM, options: argparse.Namespace, number: int, constrained: bool) -> float:
    """Milliseconds a token after the first, in the median of the plain requests."""
    text, count = default_text(), options.plain + options.others
    begins = [(number * count + i) * PROMPT_CHARACTERS for i in range(count)]
    prompts = [text[begin % (len(text) - PROMPT_CHARACTERS) :][:PROMPT_CHARACTERS] for begin in begins]
    plain = SamplingParams(temperature=0, ignore_eos=True, max_tokens=options.tokens)
    other = plain.clone(structured_outputs=StructuredOutputsParams(json=SCHEMA)) if constrained else plain
    outputs = llm.generate(prompts, [plain] * options.plain + [other] * options.others, use_tqdm=False)
    times = []
    for output in outputs[: options.plain]:
        metrics, (piece,) = output.metrics, output.outputs
        assert len(piece.token_ids) == options.tokens
        assert metrics is not None and metrics.finished_time and metrics.first_token_time
        times.append(1e3 * (metrics.finished_time - metrics.first_token_time) / (options.tokens - 1))
    for output in outputs[options.plain :]:
        assert len(output.outputs[0].token_ids) >= 0.9 * options.tokens, "a grammar ended early"
        assert not constrained or output.outputs[0].text.lstrip().startswith("[")
    return median(times)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = options.folder
        if options.random_weights:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            make_folder(options.folder, folder)
        rows = options.plain + options.others
        load = {"load_format": "dummy"} if options.random_weights else {}
        llm = LLM(str(folder), max_model_len=1024, max_num_seqs=rows, **load)
        stack.callback(llm.close)
        for constrained in (False, True):
            tpot(llm, options, options.pairs, constrained)
        beside: dict[bool, list[float]] = {False: [], True: []}
        for number in range(options.pairs):
            for constrained in (False, True) if number % 2 else (True, False):
                beside[constrained].append(tpot(llm, options, number, constrained))
        backend = llm.info.plan["structured_outputs"]["value"]
    price = effect(beside[False], beside[True])
    return {
        "plain_ms": [round(one, 4) for one in beside[False]],
        "beside_grammars_ms": [round(one, 4) for one in beside[True]],
        "ratio": round(price.ratio, 4), "between": [round(price.low, 4), round(price.high, 4)],
        "holds": price.ratio <= MOST, "structured_outputs": backend,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plain", type=int, default=32)
    parser.add_argument("--others", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    date = time.strftime("%Y-%m-%dT%H:%M:%S")
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    machine = {"date": date, "cores": os.cpu_count(), "device": device, "torch": torch.__version__}
    report = {"command": shlex.join(["python", *sys.argv]), **machine, **measure(options)}
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
