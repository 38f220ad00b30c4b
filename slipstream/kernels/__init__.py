"""Kernels know tensors only: torch reference and shape-checking launcher, one file a topic. Imports only
torch."""
