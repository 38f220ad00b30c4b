"""From flags to an EnginePlan on this machine: reads the model's spec and the device's facts, then
resolve()."""

from __future__ import annotations

import torch

from slipstream.config.args import EngineArgs
from slipstream.config.device import DeviceFacts
from slipstream.config.plan import EnginePlan
from slipstream.config.resolve import resolve
from slipstream.kernels.backend import INTERPRETED, triton
from slipstream.loading import read_spec
from slipstream.runner.memory_cpu import total_memory


def device_facts() -> DeviceFacts:
    """The best device of this machine."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return DeviceFacts(
            kind="cuda",
            name=properties.name,
            memory_bytes=properties.total_memory,
            has_triton=triton is not None and not INTERPRETED,
            capability=(properties.major, properties.minor),
        )
    return DeviceFacts(
        kind="cpu",
        name="no CUDA device",
        memory_bytes=total_memory(),
        has_triton=triton is not None and INTERPRETED,
    )


def make_plan(args: EngineArgs) -> EnginePlan:
    """Raises ValueError naming the flag or the file that cannot be honoured."""
    return resolve(args, read_spec(args.model), device_facts())
