"""Draws a few steps of a trace that `--trace FILE` wrote: scheduler, runner, device and output, one below the
other, so that the overlap of host and device can be seen without opening Perfetto.

    python benchmarks/draw_trace.py TRACE PNG [--first STEP] [--steps 6]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"scheduler": "#4c72b0", "runner": "#8172b3", "device": "#55a868", "output": "#c47f3d"}
HEIGHT = 0.62


def draw(events: list[dict[str, Any]], first: int, steps: int, file: Path) -> None:
    """first: the first step shown; its submission is time 0. Raises ValueError for steps that the trace does
    not hold."""
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = list(lanes.values())
    begins = {e["args"]["step"]: e["ts"] for e in events if e["name"] == "submit"}
    if steps < 1 or not {first, first + steps} <= begins.keys():
        held = f"{min(begins)} to {max(begins)}, of which the last is not drawn" if begins else "none"
        raise ValueError(f"--first={first} --steps={steps}: the trace's steps are {held}")
    origin, end = begins[first], begins[first + steps]
    figure, axes = plt.subplots(figsize=(10, 2.4), dpi=150)
    for event in events:
        if event["ph"] != "X" or event["ts"] + event["dur"] < origin or event["ts"] > end:
            continue
        lane, step = lanes[event["tid"]], event["args"].get("step")
        left, width = (event["ts"] - origin) / 1e3, max(event["dur"] / 1e3, (end - origin) / 1e3 / 700)
        axes.barh(
            order.index(lane), width, HEIGHT, left, color=COLOURS[lane], edgecolor="white", linewidth=0.4,
            alpha=1.0 if (step or 0) % 2 else 0.65,
        )
        if step is not None and lane == "device":
            axes.text(
                left + width / 2, order.index(lane), f"step {step - first + 1}", ha="center", va="center",
                color="white", fontsize=8, clip_on=True,
            )
    axes.set_xlim(0, (end - origin) / 1e3)
    axes.set_yticks(range(len(order)), order)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("png", type=Path)
    parser.add_argument("--first", type=int, default=20, help="the first step shown (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="default: %(default)s")
    args = parser.parse_args()
    try:
        events = json.loads(args.trace.read_text("utf-8"))["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"TRACE={args.trace}: is no trace: {error}")
    try:
        draw(events, args.first, args.steps, args.png)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
