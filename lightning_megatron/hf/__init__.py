"""Hugging Face models in and out: the one door to safetensors and to the configurations of transformers.

model = from_pretrained("folder")                       # each rank reads the slices that it holds
save_pretrained(model, "other folder")                  # transformers.AutoModelForCausalLM.from_pretrained reads it
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lightning_megatron.hf.llava_parts import llava_from_folders
    from lightning_megatron.hf.load import config_from_pretrained, from_pretrained
    from lightning_megatron.hf.save import save_pretrained
    from lightning_megatron.hf.unchanged import load_unchanged, new_unchanged
else:
    __getattr__, __dir__ = lazy_exports(__name__, __file__)

__all__ = [
    "config_from_pretrained",
    "from_pretrained",
    "llava_from_folders",
    "load_unchanged",
    "new_unchanged",
    "save_pretrained",
]
