"""`T5Module`: a T5 that pre-trains, validates and answers under any strategy."""

from collections import Counter

import torch
from torch import Tensor

from lightning_megatron.context.documents import NO_DOCUMENT
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.lightning_modules.batch_checks import require_no_gap
from lightning_megatron.lightning_modules.generative import GenerativeModule
from lightning_megatron.lightning_modules.pretrain import Batch
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.models.t5 import T5Model
from lightning_megatron.models.t5_config import T5Config
from lightning_megatron.models.t5_cost import training_flops
from lightning_megatron.models.t5_generation import generate_t5
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.trainer.checkpointing.hyper_parameters import rebuilt

_ADAMW = AdamWConfig()
_GENERATION = GenerationConfig()


class T5Module(GenerativeModule):
    """Text to text: a batch holds `encoder_tokens` [batch, encoder sequence], `decoder_tokens`, `labels` and
    `loss_mask`, each [batch, decoder sequence]; and where there is padding, or rows hold several documents,
    `encoder_padding_mask`, or `encoder_segments` and `decoder_segments`.

    Prediction takes batches of `tokens`, which the encoder reads, and `decoder_tokens` [batch, 1 or more], with which
    answers begin, and returns what the decoder writes after them, up to the end of the text. A batch of texts that are
    padded to one length has their `lengths` [batch]; `samples` [batch] are their numbers among all, which seed the
    sampling.

    Args:
        config: Architecture of the model.
        optimizer: AdamW and its learning-rate curve.
        generation: Sampling of text in prediction.
    """

    model: T5Model | None
    inputs = ("encoder_tokens", "decoder_tokens", "labels", "loss_mask")
    optional_inputs = ("encoder_padding_mask", "encoder_segments", "decoder_segments")

    def __init__(
        self, config: T5Config, optimizer: AdamWConfig = _ADAMW, generation: GenerationConfig = _GENERATION
    ) -> None:
        self.config: T5Config = rebuilt(T5Config, config)
        super().__init__(optimizer, generation, config=self.config)

    def _build(self) -> T5Model:
        return T5Model(self.config)

    def _loss(self, batch: Batch) -> Tensor:
        if "encoder_padding_mask" in batch:
            require_no_gap("encoder_padding_mask", batch["encoder_padding_mask"])
        return super()._loss(batch)

    def _generate(self, batch: Batch, generation: GenerationConfig, samples: Tensor) -> list[Tensor]:
        begun, lengths = batch["decoder_tokens"], batch.get("lengths")
        rows = generate_t5(self._built, batch["tokens"], begun, generation, lengths=lengths, samples=samples)
        return [row[begun.shape[1] :] for row in rows]

    def batch_tokens(self, batch: Batch) -> int:
        """Tokens that a training step on the batch goes through, of both stacks, without padding."""
        return sum(n * (lengths.sequence + lengths.decoder_sequence) for lengths, n in self._lengths(batch).items())

    def _lengths(self, batch: Batch) -> Counter[SequenceLengths]:
        pairs = _lengths_of_documents(batch)
        return Counter({SequenceLengths(sequence=s, decoder_sequence=t): n for (s, t), n in pairs.items()})

    def _training_flops(self, lengths: SequenceLengths, number: int) -> float:
        return training_flops(
            self.config, batch=number, sequence=lengths.sequence, decoder_sequence=lengths.decoder_sequence
        )


def _lengths_of_documents(batch: Batch) -> Counter[tuple[int, int]]:
    """Number of documents of a batch by their tokens of the encoder and of the decoder."""
    rows, width = batch["encoder_tokens"].shape
    decoder_width = batch["decoder_tokens"].shape[1]
    if "encoder_padding_mask" in batch:
        return Counter((int(num), decoder_width) for num in batch["encoder_padding_mask"].bool().sum(dim=1))
    if "encoder_segments" not in batch:
        return Counter({(width, decoder_width): rows})
    # Of each stack the tokens of a document, by its row and number.
    sizes: list[Counter[tuple[int, int]]] = []
    for name in ("encoder_segments", "decoder_segments"):
        segments = batch[name].cpu()
        numbered = torch.nonzero(segments != NO_DOCUMENT)[:, 0].tolist(), segments[segments != NO_DOCUMENT].tolist()
        sizes.append(Counter(zip(*numbered, strict=True)))
    return Counter((sizes[0][document], sizes[1][document]) for document in sizes[0].keys() | sizes[1].keys())
