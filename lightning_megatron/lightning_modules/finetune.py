"""`FinetuneModule`: a Hugging Face model from a local directory, fine-tuned in full or by LoRA adapters.

`finetune_module` makes one, or a `CausalModule` for the causal models that this package has no layers for.
"""

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron import hf
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.causal import CausalModule
from lightning_megatron.lightning_modules.gpt import GPTModule
from lightning_megatron.lightning_modules.text_data import require_fitting_tokenizer
from lightning_megatron.models.gpt import GPTConfig, GPTModel
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.trainer import ConfigurationError, MegatronStrategy
from lightning_megatron.transformer.lora import LoraConfig, add_lora

_ADAMW = AdamWConfig(lr=1e-5, weight_decay=0.0, betas=(0.9, 0.999))
_GENERATION = GenerationConfig()


class FinetuneModule(GPTModule):
    """Fine-tunes a pretrained GPT: all of its weights, or LoRA adapters on its frozen weights.

    Each rank reads its slices of the weights when training starts. Steps, logs and predictions are those of GPTModule.

    Args:
        path: Directory of the Hugging Face model.
        lora: LoRA adapters, which alone are trained; None trains all weights.
        optimizer: AdamW and its learning-rate curve.
        generation: Sampling of text in prediction.
        upcycle: Experts that the MLPs of a dense model become; the upcycled model computes the same at first.
    """

    def __init__(
        self,
        path: str,
        lora: LoraConfig | None = None,
        optimizer: AdamWConfig = _ADAMW,
        generation: GenerationConfig = _GENERATION,
        upcycle: MoEConfig | None = None,
    ) -> None:
        config = hf.config_from_pretrained(path, upcycle=upcycle)
        # A LlavaConfig is one, too.
        if type(config) is not GPTConfig:
            raise ValueError(
                f"FinetuneModule trains models that write text alone, and the model in {path} has a "
                f"{type(config).__name__}; a LLaVA trains on by LlavaModule(path=...), a T5 by T5FinetuneModule"
            )
        super().__init__(config, optimizer, generation)
        self.save_hyperparameters()
        self.path = path
        self.lora = lora
        if lora is not None and (unknown := lora.unknown_targets()):
            raise ValueError("\n".join(unknown))
        self.upcycle = upcycle
        if lora is not None and upcycle is not None:
            raise ValueError(
                "lora and upcycle do not go together: lora freezes the experts, which would stay copies of each other; "
                "leave one of the two out"
            )

    @property
    def _folder(self) -> str:
        return self.path

    def setup(self, stage: str) -> None:
        strategy = self.trainer.strategy
        fp8 = strategy.fp8 if isinstance(strategy, MegatronStrategy) else None
        if self.lora is not None and fp8 is not None and fp8.engine == "transformer_engine":
            raise ConfigurationError(
                "lora and Transformer Engine do not go together, which runs whole linears; use "
                "MegatronStrategy(fp8=Fp8Config(engine='torch')), or leave one of the two out"
            )
        require_fitting_tokenizer(self.trainer.datamodule, self.path, self.config.vocab_size)  # type: ignore[attr-defined]

    def _build(self) -> GPTModel:
        model = hf.from_pretrained(self.path, upcycle=self.upcycle)
        assert isinstance(model, GPTModel), "its configuration is a GPTConfig"
        if self.lora is not None:
            add_lora(model, self.lora)
        return model


def finetune_module(
    path: str,
    lora: LoraConfig | None = None,
    optimizer: AdamWConfig = _ADAMW,
    generation: GenerationConfig = _GENERATION,
    upcycle: MoEConfig | None = None,
) -> L.LightningModule:
    """A module that fine-tunes the causal model in a folder, whatever its type.

    A model of this package's families is a `FinetuneModule`, whose layers it runs; every other one of transformers is a
    `CausalModule`, which runs the model as it is.

    Args:
        path: Directory of the Hugging Face model.
        lora: LoRA adapters, which alone are trained; None trains all weights.
        optimizer: AdamW and its learning-rate curve.
        generation: Sampling of text in prediction.
        upcycle: Experts that the MLPs of a dense model become, for this package's families.
    """
    try:
        hf.config_from_pretrained(path, upcycle=upcycle)
    except ValueError as error:
        if upcycle is not None:
            raise
        module = CausalModule(path, optimizer=optimizer, lora=lora, generation=generation)
        if module.config.is_encoder_decoder:
            raise ValueError(
                f"the model in {path} ({module.config.model_type}) has an encoder and a decoder, and only models that "
                "write text alone are fine-tuned on conversations; a T5 is by T5FinetuneModule"
            ) from error
        rank_zero_info(f"{path} trains as the model of transformers that it is: {error}")
        return module
    return FinetuneModule(path, lora, optimizer, generation, upcycle)
