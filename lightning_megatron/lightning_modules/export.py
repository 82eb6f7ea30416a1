"""A callback that writes the trained model as a Hugging Face directory, which transformers loads."""

from contextlib import nullcontext
from pathlib import Path

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lightning_megatron import hf
from lightning_megatron.hf.adapters import merged_adapters
from lightning_megatron.hf.families import family_of_config
from lightning_megatron.hf.folder import on_disk
from lightning_megatron.hf.shards import has_tokenizer
from lightning_megatron.hub import CONFIG_FILES, TOKENIZER_FILES, model_folder
from lightning_megatron.lightning_modules.causal import CausalModule
from lightning_megatron.lightning_modules.finetune import FinetuneModule
from lightning_megatron.lightning_modules.t5_finetune import T5FinetuneModule
from lightning_megatron.text_files import read_json_table
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.transformer.lora import merged_lora


class ExportPretrained(L.Callback):
    """Writes the model and its tokenizer's files as a Hugging Face directory when training has ended.

    LoRA adapters are merged into the weights that are written; the model itself stays unmerged.

    Args:
        path: Directory to write, which must not exist yet; None writes nothing.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # MegatronStrategy has checked before it started a process; other strategies do not check.
        if faults := self.faults(trainer):
            raise ConfigurationError(faults)

    def faults(self, trainer: L.Trainer) -> list[str]:
        """One sentence for each thing that would keep the model from being written when training is over."""
        if self.path is None or trainer.state.fn != TrainerFn.FITTING:
            return []
        faults, module = [], trainer.lightning_module
        if not isinstance(module, CausalModule | FinetuneModule | T5FinetuneModule):
            faults.append(
                "ExportPretrained writes a CausalModule, a FinetuneModule or a T5FinetuneModule, and this is a"
                f" {type(module).__name__}; leave it out"
            )
        elif _is_upcycled(module):
            try:
                family_of_config(module.config, None)
            except ValueError as error:
                faults += str(error).splitlines()
        try:
            if on_disk(self.path).exists():
                faults.append(f"export path ({self.path}) exists; give one where nothing is, or remove it")
        except ValueError as error:
            faults.append(f"export path: {error}")
        return faults

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The strategy has restored full weights, instead of shards of master weights, already.
        if self.path is None or not isinstance(pl_module, CausalModule | FinetuneModule | T5FinetuneModule):
            return
        assert pl_module.model is not None
        # A name of the hub is a folder, too.
        source = model_folder(pl_module.path, TOKENIZER_FILES)
        tokenizer = source if has_tokenizer(Path(source)) else None
        if isinstance(pl_module, CausalModule):
            merged = nullcontext(pl_module.model) if pl_module.lora is None else merged_adapters(pl_module.model)
            with merged as model:
                hf.save_pretrained(model, self.path, tokenizer_from=tokenizer)
            return
        with merged_lora(pl_module.model):
            hf.save_pretrained(pl_module.model, self.path, family=_family(pl_module), tokenizer_from=tokenizer)


def _is_upcycled(module: L.LightningModule) -> bool:
    return isinstance(module, FinetuneModule) and module.upcycle is not None


def _family(module: FinetuneModule | T5FinetuneModule) -> str | None:
    """The model_type of the trained model's directory; None for an upcycled model."""
    if _is_upcycled(module):
        return None
    return str(read_json_table(Path(model_folder(module.path, CONFIG_FILES), "config.json"))["model_type"])
