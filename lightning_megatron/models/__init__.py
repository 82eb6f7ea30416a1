"""Whole models as ordered lists of named parts, ready for any mesh."""

from lightning_megatron.models.gpt import GPTConfig, GPTModel

__all__ = ["GPTConfig", "GPTModel"]
