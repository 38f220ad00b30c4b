"""Products as measured on an H200 in chains of layers (tests/gpu/time_chain.py, time_linear.py), bfloat16:
the best cut for up to so many rows; None where cuBLAS is faster.

A cut is written as the script prints it: kind (s slab, v vector, d direct, t tile), rows x columns x depth, /
splits, w warps, n stages, h slabs held, then e for early.
"""

from __future__ import annotations

import functools
import re
from typing import Any

# (operation, outputs, inputs) -> rows -> cut. Qwen3-0.6B, Llama-3.1-8B, an EAGLE-3 drafter for that.
MEASURED: dict[tuple[str, int, int], dict[int, str | None]] = {
    ("plain", 4096, 1024): {
        8: "d8x16x256w2n4", 16: "t16x64x128w4n4", 32: "t32x64x64w4n6", 64: "t64x64x64w4n6", 256: None,
    },
    ("add", 1024, 2048): {
        1: "d8x16x1024w8n2", 8: "d8x16x512w4n4", 16: "t16x64x128/4w4n3h2", 32: "t32x64x128/4w4n3h2",
        64: "d16x32x512w4n2", 256: None,
    },
    ("gated", 6144, 1024): {
        1: "d8x16x256w2n4", 8: "d8x32x512w4n2", 16: "t16x64x128w4n4", 32: "t32x64x64w4n6",
        64: "t64x64x128w4n3h2e", 128: "t64x64x64w4n6", 256: "t128x128x64w8n4e",
    },
    ("add", 1024, 3072): {
        8: "d8x16x1024w8n3", 16: "s16x8x1024w4n3", 32: "t32x64x128/4w4n3", 64: "t64x64x128/4w4n3h2",
        256: None,
    },
    ("plain", 151936, 1024): {
        1: "v1x4x1024w4n7", 4: "t16x64x128w4n4", 16: "t16x128x128w8n3", 32: "t32x64x128w4n4",
        64: "t64x64x64w4n6e", 256: None,
    },
    ("plain", 6144, 4096): {
        1: "s1x16x512w4n1", 4: "s4x16x512w4n1", 8: "s8x16x512w4n1", 256: None,
    },
    ("add", 4096, 4096): {
        1: "d8x16x512w4n3", 2: "v2x8x1024w4n3", 4: None, 8: "d8x16x512w4n3", 16: "t16x64x128/4w4n3",
        32: "t32x64x128/4w4n3", 64: None, 128: "t64x64x128w4n4", 256: None,
    },
    ("gated", 28672, 4096): {
        1: "v1x8x1024w4n3", 2: None, 4: "t16x128x64w4n4", 16: None, 32: "t32x128x64w4n4e",
        64: "t64x128x64w4n3h2e", 128: "t128x128x64w8n4", 256: None,
    },
    ("add", 4096, 14336): {
        1: None, 2: "s2x16x1024w4n1", 8: None, 16: "t16x64x128/4w4n3", 32: None,
        64: "t64x64x128/4w4n3e", 256: None,
    },
    ("plain", 128256, 4096): {
        1: "v1x8x1024w4n3", 8: "t16x64x128w4n4", 16: "t16x128x128w8n3", 32: "t32x64x128w4n4",
        64: "t64x128x64w4n3h2", 256: None,
    },
    ("plain", 4096, 12288): {1: "s1x8x1024w4n4", 4: "s4x16x1024w4n1e", 256: None},
    ("plain", 6144, 8192): {1: "v1x8x1024w4n3", 4: "s4x8x1024w4n4", 256: None},
    ("plain", 32000, 4096): {
        1: "v1x8x1024w4n3", 8: None, 16: "t16x64x64w4n3h3", 32: None, 64: "t64x128x64w4n3h2", 256: None,
    },
}  # fmt: skip
CUT = re.compile(r"([svdt])(\d+)x(\d+)x(\d+)(?:/(\d+))?w(\d+)n(\d+)(?:h(\d+))?(e?)")


@functools.cache
def read_cut(text: str) -> dict[str, Any]:
    """Fields of a LinearConfig."""
    match = CUT.fullmatch(text)
    assert match is not None, text
    kind, rows, columns, depth, splits, warps, stages, held, early = match.groups()
    numbers = {"rows": rows, "columns": columns, "depth": depth, "warps": warps, "stages": stages}
    return {
        "kind": {"s": "slab", "v": "vector", "d": "direct", "t": "tile"}[kind],
        **{name: int(value) for name, value in numbers.items()},
        "splits": int(splits or 1),
        "held": int(held or 0),
        "early": bool(early),
    }
