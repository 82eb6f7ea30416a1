"""Models as ordered lists of named parts, ready for any mesh."""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lightning_megatron.models.bert import BertConfig, BertLogits, BertModel
    from lightning_megatron.models.generation import generate
    from lightning_megatron.models.gpt import GPTConfig, GPTModel
    from lightning_megatron.models.llava import LlavaConfig, LlavaModel
    from lightning_megatron.models.sampling import GenerationConfig
    from lightning_megatron.models.t5 import T5Model
    from lightning_megatron.models.t5_config import T5Config
    from lightning_megatron.models.t5_generation import generate_t5
    from lightning_megatron.models.vision import VisionConfig
else:
    __getattr__, __dir__ = lazy_exports(__name__, __file__)

__all__ = [
    "BertConfig",
    "BertLogits",
    "BertModel",
    "GPTConfig",
    "GPTModel",
    "GenerationConfig",
    "LlavaConfig",
    "LlavaModel",
    "T5Config",
    "T5Model",
    "VisionConfig",
    "generate",
    "generate_t5",
]
