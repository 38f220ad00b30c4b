"""From flags to an EnginePlan on this machine: reads the model's spec and the device's facts, then
resolve()."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from slipstream.config.args import EngineArgs
from slipstream.config.device import DeviceFacts
from slipstream.config.plan import EnginePlan
from slipstream.config.resolve import DTYPES, resolve
from slipstream.kernels.backend import INTERPRETED, triton
from slipstream.kernels.flash_attention import installed_build
from slipstream.layers.linear import planned_activations
from slipstream.loading import read_spec
from slipstream.loading.drafter_facts import read_drafter_facts
from slipstream.loading.templates import check_template, find_template
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
            cpu_activations=_cpu_activations(),
            flash_lacks=installed_build(),
        )
    return DeviceFacts(
        kind="cpu",
        name="no CUDA device",
        memory_bytes=total_memory(),
        has_triton=triton is not None and INTERPRETED,
        cpu_activations=_cpu_activations(),
    )


def _cpu_activations() -> dict[str, str]:
    kinds = {kind: getattr(torch, kind) for kind in DTYPES}
    cpu = torch.device("cpu")
    return {
        kind: str(planned_activations(dtype, cpu)).removeprefix("torch.") for kind, dtype in kinds.items()
    }


def make_plan(
    args: EngineArgs, facts: DeviceFacts | None = None, env: Mapping[str, str] = os.environ
) -> EnginePlan:
    """facts: of this machine, unless given. Reads no weights. Raises ValueError naming the flag or the file
    that cannot be honoured."""
    spec = read_spec(args.model)
    template = ""
    if not args.skip_tokenizer_init:
        template = find_template(args.tokenizer or args.model)
        if args.chat_template is not None:
            check_template(args.chat_template)
    drafter = read_drafter_facts(args.speculative_config)
    return resolve(args, spec, facts or device_facts(), env, template, drafter)
