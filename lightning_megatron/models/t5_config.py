"""Architecture of a T5: sizes and choices of its two stacks.

Source: Raffel et al., arXiv 1910.10683; Shazeer, arXiv 2002.05202 (the gated one of T5 v1.1).
"""

from typing import ClassVar

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.mesh import Sizes
from lightning_megatron.tensor.activation import Activation
from lightning_megatron.transformer.config import LanguageModelConfig, Normalization, Position


@config_dataclass
class T5Config(LanguageModelConfig):
    """The architecture of a T5, by default of the first kind.

    T5 v1.1 has `activation="geglu_tanh", tie_embeddings=False, scales_head=False`.
    """

    positions: ClassVar[tuple[Position, ...]] = ("relative", "learned", "none")
    scales_scores: ClassVar[bool] = False
    sees_both_ways: ClassVar[bool] = True
    has_cross_attention: ClassVar[bool] = True

    num_decoder_layers: int = 0
    """Number of layers of the decoder, num_layers being the encoder's; 0: as many as the encoder has."""
    activation: Activation = "relu"
    """Activation of the MLP: ReLU in T5, geglu_tanh in T5 v1.1."""
    normalization: Normalization = "rmsnorm"
    """Norm of hidden states: LayerNorm or RMSNorm."""
    norm_epsilon: float = 1e-6
    """Number added to the variance (RMSNorm: to the mean square) under the root of a norm."""
    add_bias_linear: bool = False
    """Whether every linear of a layer has a bias."""
    position: Position = "relative"
    """Position encoding: a learned bias of attention scores for each range of distances (relative), a learned embedding
    (learned), or none."""
    relative_buckets: int = 32
    """Number of buckets of relative distances, each with a learned bias for each head; in the encoder half of them are
    for keys before a token and half for those after it."""
    relative_max_distance: int = 128
    """Distance in tokens from which on all distances share one bucket."""
    max_sequence_length: int = 512
    """Longest sequence of the encoder in tokens: positions of its learned embedding, and what pipeline stages are
    balanced for."""
    max_decoder_sequence_length: int = 0
    """Longest sequence of the decoder in tokens; 0: max_sequence_length."""
    share_embeddings: bool = True
    """Whether encoder and decoder share one token embedding; else the decoder has its own, which a tied head uses."""
    scales_head: bool = True
    """Whether the head's input is divided by sqrt(hidden_size), as in T5, whose embedding is tied; T5 v1.1 does not."""
    embedding_std: float = 1.0
    """Standard deviation of initial token embeddings."""

    def __post_init__(self) -> None:
        for name, size in (
            ("num_decoder_layers", self.num_layers),
            ("max_decoder_sequence_length", self.max_sequence_length),
        ):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, size)
        super().__post_init__()

    def faults(self) -> list[str]:
        faults = super().faults()
        faults += [
            f"{name} ({getattr(self, name)}) must be at least 1"
            for name in ("num_decoder_layers", "max_decoder_sequence_length")
            if getattr(self, name) < 1
        ]
        faults += [
            f"{name} ({getattr(self, name)!r}) must be {usual!r}: a T5 has no such thing"
            for name, usual in (
                ("qk_norm", False),
                ("attention_softcap", 0.0),
                ("attention_sinks", False),
                ("scales_embedding", False),
                ("sliding_window", 0),
                ("full_attention_layers", ()),
                ("moe", None),
            )
            if getattr(self, name) != usual
        ]
        if not self.embedding_std >= 0:
            faults.append(f"embedding_std ({self.embedding_std}) must be at least 0")
        if self.position == "relative":
            if self.relative_buckets < 4 or self.relative_buckets % 2:
                faults.append(f"relative_buckets ({self.relative_buckets}) must be even and at least 4")
            elif self.relative_max_distance <= self.relative_buckets // 2:
                faults.append(
                    f"relative_max_distance ({self.relative_max_distance}) must be above half of relative_buckets "
                    f"({self.relative_buckets}): nearer distances have a bucket each"
                )
        return faults

    @property
    def num_staged_layers(self) -> int:
        return self.num_layers + self.num_decoder_layers

    @property
    def token_embedding_std(self) -> float:
        return self.embedding_std

    @property
    def decoder_embedding(self) -> str:
        """The name of the module that embeds the decoder's tokens."""
        return "embedding.tokens" if self.share_embeddings else "decoder.embedding.tokens"

    def layout_faults(self, sizes: Sizes) -> list[str]:
        faults = super().layout_faults(sizes)
        rows, tp = 2 * self.num_query_groups * self.head_dim, sizes.tp
        if rows % tp and (self.num_query_groups % tp == 0 or tp % self.num_query_groups == 0):
            faults.append(
                f"the rows of the key-value weight of cross attention ({rows} = num_query_groups * 2 * head_dim) must "
                f"be a multiple of tensor_model_parallel_size ({tp}); give head_dim accordingly"
            )
        return faults
