"""Products as measured on an H200 in chains of layers (tests/gpu/time_linear.py), bfloat16: the best cut for
up to so many rows; None where cuBLAS is faster.

A cut is written as the script prints it: kind (s slab, v vector, d direct, t tile), rows x columns x depth, /
splits, w warps, n stages, h slabs held, then e for early, a for a norm apart.
"""

from __future__ import annotations

import functools
import re
from typing import Any

# (operation, outputs, inputs) -> rows -> cut. Qwen3-0.6B, then Llama-3.1-8B.
MEASURED: dict[tuple[str, int, int], dict[int, str | None]] = {
    ("plain", 4096, 1024): {
        1: "d8x32x512w4n2a", 8: "d8x16x512w4n2a", 16: "t16x64x128w4n4a", 256: None,
    },
    ("add", 1024, 2048): {
        1: "v1x4x1024w4n2a", 8: "d8x16x1024w8n2a", 16: None, 32: "t32x64x128/4w4n3a", 64: "d16x32x512w4n2a",
        256: None,
    },
    ("gated", 6144, 1024): {
        1: "d8x8x512w4n2a", 8: "d8x32x512w4n2a", 16: "t16x64x128w4n4a", 32: "t32x64x64w4n6a",
        64: "t64x64x128w4n3h2ea", 128: "t64x64x64w4n6a", 256: "t128x128x64w8n4ea",
    },
    ("add", 1024, 3072): {
        1: "v1x8x1024w4n3a", 8: "d8x16x512w4n6a", 16: "s16x8x1024w4n3", 32: "t32x64x128/4w4n3a",
        64: "t64x64x128/4w4n3h2a", 256: None,
    },
    ("plain", 151936, 1024): {
        1: "v1x4x1024w4n7a", 4: "t16x64x128w4n4a", 16: "t16x128x128w8n3a", 32: "t32x64x128w4n4a",
        64: "t64x64x64w4n6ea", 256: None,
    },
    ("plain", 6144, 4096): {
        1: "s1x16x512w4n1", 4: "s4x16x512w4n1", 8: "s8x16x512w4n1a", 256: None,
    },
    ("add", 4096, 4096): {
        1: "v1x8x1024w4n3a", 2: None, 4: "s4x16x1024w4n1", 8: "d8x16x512w4n3a", 16: "t16x64x128w4n4a",
        32: "t32x64x128/4w4n3a", 64: None, 128: "t64x64x128w4n4a", 256: None,
    },
    ("gated", 28672, 4096): {
        1: "v1x8x2048w8n2a", 2: None, 4: "t16x128x64w4n4a", 16: None, 32: "t32x128x64w4n4a",
        64: "t64x128x64w4n3h2ea", 128: "t128x128x64w8n4a", 256: None,
    },
    ("add", 4096, 14336): {
        1: "v1x4x2048w8n4a", 2: "s4x16x1024w4n1", 4: None, 8: "d8x16x256w4n6a", 16: "t16x64x128/4w4n3a",
        32: None, 64: "t64x64x128/4w4n3ea", 256: None,
    },
    ("plain", 128256, 4096): {
        1: "v1x8x1024w4n3a", 8: "t16x64x128w4n4a", 16: "t16x128x128w8n3a", 32: "t32x64x128w4n4a",
        64: "t64x128x64w4n3h2a", 256: None,
    },
}  # fmt: skip
CUT = re.compile(r"([svdt])(\d+)x(\d+)x(\d+)(?:/(\d+))?w(\d+)n(\d+)(?:h(\d+))?(e?)(a?)")


@functools.cache
def read_cut(text: str) -> dict[str, Any]:
    """Fields of a LinearConfig."""
    match = CUT.fullmatch(text)
    assert match is not None, text
    kind, rows, columns, depth, splits, warps, stages, held, early, apart = match.groups()
    numbers = {"rows": rows, "columns": columns, "depth": depth, "warps": warps, "stages": stages}
    return {
        "kind": {"s": "slab", "v": "vector", "d": "direct", "t": "tile"}[kind],
        **{name: int(value) for name, value in numbers.items()},
        "splits": int(splits or 1),
        "held": int(held or 0),
        "early": bool(early),
        "folds": not apart,
    }
