"""`LlavaModule`: a LLaVA that trains, with any part of it frozen, validates and answers under any strategy."""

from lightning_megatron import hf
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.gpt import GPTModule
from lightning_megatron.lightning_modules.pretrain import Batch
from lightning_megatron.mesh import Sizes
from lightning_megatron.models.llava import PARTS, LlavaConfig, LlavaModel
from lightning_megatron.models.llava_cost import training_flops
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.planner.flops import recomputed_flops
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.trainable import Trainable, trainable_parts_of
from lightning_megatron.trainer.checkpointing.hyper_parameters import rebuilt
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.transformer.recompute import RecomputeConfig

_ADAMW = AdamWConfig()
_GENERATION = GenerationConfig()


class LlavaModule(GPTModule):
    """Next-token prediction from text and images: batches as of GPTModule, with the `images` of each row.

    Weights are random unless they come from directories; those that a language model and a vision tower lack, the
    projector and new rows of the vocabulary, are random too. Logs and predictions are those of GPTModule.

    Args:
        config: Architecture of language model, projector and vision tower; it must match weights that are read.
        optimizer: AdamW and its learning-rate curve.
        generation: Sampling of text in prediction.
        frozen: Parts that are not trained: any of "vision", "projector" and "language".
        path: Directory of a complete Hugging Face LLaVA to start from.
        language: Directory of a Hugging Face language model to start from.
        vision: Directory of a Hugging Face vision tower to start from.
    """

    model: LlavaModel | None
    optional_inputs = ("segments", "images")
    prompt_inputs = ("images",)

    def __init__(
        self,
        config: LlavaConfig,
        optimizer: AdamWConfig = _ADAMW,
        generation: GenerationConfig = _GENERATION,
        frozen: list[str] | None = None,
        path: str | None = None,
        language: str | None = None,
        vision: str | None = None,
    ) -> None:
        super().__init__(rebuilt(LlavaConfig, config), optimizer, generation)
        self.frozen = list(frozen or [])
        # Not the folders: a checkpoint has the weights.
        self.save_hyperparameters({"frozen": self.frozen})
        self.path, self.language, self.vision = path, language, vision
        faults = []
        if unknown := [name for name in self.frozen if name not in PARTS]:
            faults.append(f"frozen ({', '.join(map(repr, unknown))}) must be of {', '.join(map(repr, PARTS))}")
        if set(self.frozen) == set(PARTS):
            faults.append("frozen names all parts, and nothing is left to train; leave one out")
        if path is not None and (language is not None or vision is not None):
            faults.append(
                f"path ({path!r}) names a whole LLaVA; leave it out, or language and vision, which name its parts"
            )
        if faults:
            raise ConfigurationError(faults)

    @property
    def _folder(self) -> str | None:
        return self.path

    def _build(self) -> LlavaModel:
        assert isinstance(self.config, LlavaConfig)
        try:
            model = hf.llava_from_folders(self.config, whole=self.path, language=self.language, vision=self.vision)
        except ValueError as error:
            raise ConfigurationError(str(error).splitlines()) from error
        model.freeze(*self.frozen)
        return model

    def batch_flops(self, batch: Batch) -> float:
        """Model FLOPs of a training step on the batch; frozen parts count what other gradients need."""
        assert isinstance(self.config, LlavaConfig)
        lengths = {document.sequence: n for document, n in self._lengths(batch).items()}
        return training_flops(self.config, lengths=lengths, num_images=_num_images(batch), frozen=self.frozen)

    def batch_recomputed_flops(self, batch: Batch, recompute: RecomputeConfig, sizes: Sizes) -> float:
        """FLOPs that a training step on the batch recomputes; a frozen tower has no backward and recomputes none."""
        lengths = tuple(document.sequence for document in self._lengths(batch).elements())
        # All documents in one row: layers that count are those of a stage, the tower's and others.
        texts = SequenceLengths(sequence=sum(lengths), images=_num_images(batch), are_packed=True, documents=lengths)
        model_parts = trainable_parts_of(self.config, texts, Trainable(frozen=tuple(self.frozen)))
        return recomputed_flops(model_parts, 1, recompute, sizes)


def _num_images(batch: Batch) -> int:
    return 0 if batch.get("images") is None else sum(batch["images"].counts)
