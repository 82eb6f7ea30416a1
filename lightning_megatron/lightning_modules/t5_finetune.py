"""`T5FinetuneModule`: a Hugging Face T5 from a local directory, trained further."""

from lightning_megatron import hf
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.t5 import T5Module
from lightning_megatron.lightning_modules.text_data import require_fitting_tokenizer
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.models.t5 import T5Model
from lightning_megatron.models.t5_config import T5Config

_ADAMW = AdamWConfig(lr=1e-4, weight_decay=0.0, betas=(0.9, 0.999))
_GENERATION = GenerationConfig()


class T5FinetuneModule(T5Module):
    """Fine-tunes all weights of a pretrained T5.

    Each rank reads its slices of the weights when training starts. Steps, logs and predictions are those of T5Module.

    Args:
        path: Directory of the Hugging Face model.
        optimizer: AdamW and its learning-rate curve.
        generation: Sampling of text in prediction.
    """

    def __init__(self, path: str, optimizer: AdamWConfig = _ADAMW, generation: GenerationConfig = _GENERATION) -> None:
        config = hf.config_from_pretrained(path)
        if not isinstance(config, T5Config):
            raise ValueError(
                f"T5FinetuneModule trains models of an encoder and a decoder, and the model in {path} has a"
                f" {type(config).__name__}; FinetuneModule trains those that write text alone"
            )
        super().__init__(config, optimizer, generation)
        self.save_hyperparameters()
        self.path = path

    @property
    def _folder(self) -> str:
        return self.path

    def setup(self, stage: str) -> None:
        require_fitting_tokenizer(self.trainer.datamodule, self.path, self.config.vocab_size)  # type: ignore[attr-defined]

    def _build(self) -> T5Model:
        model = hf.from_pretrained(self.path)
        assert isinstance(model, T5Model), "its configuration is a T5Config"
        return model
