"""Sizes of multi-head latent attention, under the names that transformers gives them."""

from dataclasses import fields

from lightning_megatron.config_dataclass import config_dataclass


@config_dataclass
class LatentConfig:
    """Multi-head latent attention: queries, keys and values are made of small latents. Raises ValueError that lists all
    faults at once.

    Source: DeepSeek-AI, arXiv 2405.04434, section 2.1.
    """

    q_lora_rank: int = 0
    """Features of the latent that queries are made of; 0: they are made of hidden states."""
    kv_lora_rank: int
    """Features of the latent that keys and values of all heads are made of, and that generation caches."""
    qk_nope_head_dim: int
    """Features of a head's queries and keys that are not rotated."""
    qk_rope_head_dim: int
    """Features that are rotated; those of keys are shared by all heads."""
    v_head_dim: int
    """Features of a head's values."""
    norm_epsilon: float = 1e-6
    """Epsilon of the norms of latents. 1e-6 in DeepSeek's code and in transformers, whatever that of layers is."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(faults))

    def faults(self) -> list[str]:
        """Every rule that these sizes break, one sentence each."""
        least = {"q_lora_rank": 0}
        faults = [
            f"{field.name} ({size}) must be at least {least.get(field.name, 1)}"
            for field in fields(self)
            if field.type is int and (size := getattr(self, field.name)) < least.get(field.name, 1)
        ]
        if not self.norm_epsilon > 0:
            faults.append(f"latent norm_epsilon ({self.norm_epsilon}) must be above 0")
        if self.qk_rope_head_dim % 2:
            faults.append(
                f"qk_rope_head_dim ({self.qk_rope_head_dim}) must be even, because features are rotated in pairs"
            )
        return faults

    @property
    def qk_head_dim(self) -> int:
        """Features of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
