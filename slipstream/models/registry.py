"""Architecture name, as config.json states it, to class."""

from __future__ import annotations

from slipstream.models.base import ModelClass
from slipstream.models.llama import Llama
from slipstream.models.mistral import Mistral
from slipstream.models.qwen2 import Qwen2
from slipstream.models.qwen3 import Qwen3

MODELS: dict[str, ModelClass] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
}
