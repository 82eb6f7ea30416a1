"""`FinetuneModule`: a Hugging Face model from a local directory, fine-tuned in full or by LoRA adapters."""

from lightning_megatron import hf
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.gpt import GPTModule
from lightning_megatron.lightning_modules.text_data import TextDataModule
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
        self.upcycle = upcycle
        if lora is not None and upcycle is not None:
            raise ValueError(
                "lora and upcycle do not go together: lora freezes the experts, which would stay copies of each other; "
                "leave one of the two out"
            )

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


def require_fitting_tokenizer(data: object, path: str, vocab_size: int) -> None:
    """Raises ConfigurationError for a data module whose tokenizer has more ids than the model at `path`."""
    if not isinstance(data, TextDataModule) or (tokenizer := data.tokenizer) is None:
        return
    if tokenizer.vocab_size > vocab_size:
        raise ConfigurationError(
            f"the tokenizer ({data.config.tokenizer}) has ids up to {tokenizer.vocab_size - 1}, and the model "
            f"({path}) has a vocabulary of {vocab_size}; give the tokenizer of the model"
        )
