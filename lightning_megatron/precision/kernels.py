"""How operations are computed where torch's own way takes more memory or time; all of it is off by default."""

from lightning_megatron.config_dataclass import config_dataclass


@config_dataclass
class KernelConfig:
    """Ways to compute that take the place of torch's own, one for each operation."""

    loss_chunk_tokens: int = 0
    """Tokens of a microbatch whose logits are in memory at a time, for the loss of this package's models; 0: all. The
    backward computes logits once more: one product more for the three of the head. Their float32 copies, 8 bytes a
    token and word, are what it saves most."""

    def __post_init__(self) -> None:
        if self.loss_chunk_tokens < 0:
            raise ValueError(
                f"kernels loss_chunk_tokens ({self.loss_chunk_tokens}) must be at least 0; 0 keeps all logits, "
                "and 1024 is usual"
            )
