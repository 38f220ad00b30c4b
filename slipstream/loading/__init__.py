"""Reads models from disk: specs, weights, the demo model. The only place, with rows/, where tensors change
device."""

from slipstream.loading.load import load_model, read_spec

__all__ = ["load_model", "read_spec"]
