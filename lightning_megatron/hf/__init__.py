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

    # These are for the rooms above, which are imported where transformers is not installed, too.
    from lightning_megatron.hf.unchanged import deviation_by_later_tokens as deviation_by_later_tokens
    from lightning_megatron.hf.unchanged import deviation_by_other_documents as deviation_by_other_documents
    from lightning_megatron.hf.unchanged import document_positions as document_positions
    from lightning_megatron.hf.unchanged import load_unchanged, new_unchanged
    from lightning_megatron.hf.unchanged import num_positions as num_positions
    from lightning_megatron.hf.unchanged import on_meta as on_meta
    from lightning_megatron.hf.unchanged import read_config as read_config
    from lightning_megatron.hf.unchanged import sees_later_tokens as sees_later_tokens
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
