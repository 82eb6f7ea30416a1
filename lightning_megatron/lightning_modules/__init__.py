"""Ready LightningModules and data modules: what the recipes train, and what a user copies from."""

from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.chat_data import ChatDataModule
from lightning_megatron.lightning_modules.generate import GenerationConfig, generate
from lightning_megatron.lightning_modules.gpt import GPTModule
from lightning_megatron.lightning_modules.gpt_data import GPTDataModule

__all__ = ["AdamWConfig", "ChatDataModule", "GPTDataModule", "GPTModule", "GenerationConfig", "generate"]
