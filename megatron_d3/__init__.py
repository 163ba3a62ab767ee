"""Megatron-D3: decide the mixture and the order of pretraining data while the model learns."""

__version__ = "0.1.0"
