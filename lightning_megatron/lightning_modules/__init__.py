"""Ready LightningModules and data modules: what the recipes train, and what a user copies from."""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lightning_megatron.lightning_modules.adamw import AdamWConfig
    from lightning_megatron.lightning_modules.bert import BertModule
    from lightning_megatron.lightning_modules.bert_data import BertDataConfig, BertDataModule
    from lightning_megatron.lightning_modules.causal import CausalModule
    from lightning_megatron.lightning_modules.chat_data import ChatDataConfig, ChatDataModule
    from lightning_megatron.lightning_modules.distill import DistillModule
    from lightning_megatron.lightning_modules.dpo import DpoModule
    from lightning_megatron.lightning_modules.gpt import GPTModule
    from lightning_megatron.lightning_modules.gpt_data import GPTDataConfig, GPTDataModule, StreamingConfig
    from lightning_megatron.lightning_modules.llava import LlavaModule
    from lightning_megatron.lightning_modules.llava_data import LlavaDataConfig, LlavaDataModule
    from lightning_megatron.lightning_modules.preference_data import PreferenceDataConfig, PreferenceDataModule
    from lightning_megatron.lightning_modules.t5 import T5Module
    from lightning_megatron.lightning_modules.t5_chat_data import T5ChatDataConfig, T5ChatDataModule
    from lightning_megatron.lightning_modules.t5_data import T5DataConfig, T5DataModule
    from lightning_megatron.lightning_modules.t5_finetune import T5FinetuneModule
    from lightning_megatron.lightning_modules.text_sources import BlendSource
    from lightning_megatron.models.generation import generate
    from lightning_megatron.models.sampling import GenerationConfig
    from lightning_megatron.models.t5_generation import generate_t5
else:
    __getattr__, __dir__ = lazy_exports(__name__, __file__)

__all__ = [
    "AdamWConfig",
    "BertDataConfig",
    "BertDataModule",
    "BertModule",
    "BlendSource",
    "CausalModule",
    "ChatDataConfig",
    "ChatDataModule",
    "DistillModule",
    "DpoModule",
    "GPTDataConfig",
    "GPTDataModule",
    "GPTModule",
    "GenerationConfig",
    "LlavaDataConfig",
    "LlavaDataModule",
    "LlavaModule",
    "PreferenceDataConfig",
    "PreferenceDataModule",
    "StreamingConfig",
    "T5ChatDataConfig",
    "T5ChatDataModule",
    "T5DataConfig",
    "T5DataModule",
    "T5FinetuneModule",
    "T5Module",
    "generate",
    "generate_t5",
]
