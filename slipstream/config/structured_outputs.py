"""--structured-outputs-config as one frozen object. Keys and meaning follow vLLM; what cannot be honoured is
a ValueError that names the key."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.config.args import EngineArgs
from slipstream.config.json_flag import read_object
from slipstream.config.plan import Choice

FLAG = "--structured-outputs-config"
DECISION = "structured_outputs"
AUTO, GUIDANCE, XGRAMMAR, NONE = "auto", "guidance", "xgrammar", "none"
# The package of each library.
PACKAGES = {GUIDANCE: "llguidance", XGRAMMAR: "xgrammar"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """backend: a key of PACKAGES, or "none" where requests are not constrained. disable_any_whitespace: JSON
    has the spaces of json.dumps alone; disable_additional_properties: objects have the properties that their
    schema names. compile_timeout: seconds that a request's grammar may take to compile."""

    backend: str
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    compile_timeout: float = 10.0


NOTHING = StructuredOutputsConfig(backend=NONE)


def is_installed(backend: str) -> bool:
    """Whether the library is there; it is loaded when an engine is made."""
    return importlib.util.find_spec(PACKAGES[backend]) is not None


def read_structured_outputs(args: EngineArgs) -> StructuredOutputsConfig:
    """Raises ValueError."""
    given = read_object("structured_outputs_config", args.structured_outputs_config)
    asked = given.pop("backend", AUTO)
    if asked not in (AUTO, *PACKAGES):
        raise ValueError(f"{FLAG}: backend={asked!r}: must be one of {', '.join((AUTO, *PACKAGES))}")
    for key, value in given.items():
        if key in ("disable_any_whitespace", "disable_additional_properties"):
            if type(value) is not bool:
                raise ValueError(f"{FLAG}: {key}={value!r}: must be true or false")
        elif key != "compile_timeout":
            known = ("backend", *list(asdict(NOTHING))[1:])
            raise ValueError(f"{FLAG}: {key}={value!r}: unknown key; keys are {', '.join(known)}")
        elif type(value) not in (int, float) or not 0 < value <= 600:
            raise ValueError(f"{FLAG}: {key}={value!r}: must be a number of seconds, over 0 and at most 600")
    if args.skip_tokenizer_init:
        if given or asked != AUTO:
            raise ValueError(f"{FLAG}: grammars need a tokenizer, and --skip-tokenizer-init leaves it out")
        return NOTHING
    backend = GUIDANCE if asked == AUTO else asked
    if not is_installed(backend):
        if asked != AUTO:
            needed = PACKAGES[asked]
            raise ValueError(f"{FLAG}: backend={asked!r}: {needed} is not installed: pip install {needed}")
        return NOTHING
    return StructuredOutputsConfig(backend=backend, **given)


def structured_outputs_choice(args: EngineArgs) -> Choice:
    """value: the config's fields. Raises ValueError."""
    config = read_structured_outputs(args)
    if config.backend == NONE and args.skip_tokenizer_init:
        reason = "a grammar is made of tokens' texts, and there is no tokenizer"
        return Choice(value={"backend": NONE}, reason=reason, flag="--skip-tokenizer-init")
    if config.backend == NONE:
        return Choice(value={"backend": NONE}, reason="llguidance is not installed", flag=FLAG)
    reason = (
        f"{PACKAGES[config.backend]}: masks are computed on the host while other rows' steps run; a "
        "constrained row waits for its own mask and takes part in the next step after that; its drafts are "
        "what the grammar forces"
    )
    return Choice(value=asdict(config), reason=reason, flag=FLAG)


def config_of(choices: Mapping[str, Mapping[str, Any]]) -> StructuredOutputsConfig:
    """What an engine's plan (EngineInfo.plan) says."""
    choice = choices.get(DECISION)
    return NOTHING if choice is None else StructuredOutputsConfig(**choice["value"])
