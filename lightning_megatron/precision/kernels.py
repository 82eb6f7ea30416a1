"""How operations are computed where torch's own way takes more memory or time; all of it is off by default."""

from typing import Literal, get_args

from lightning_megatron.config_dataclass import config_dataclass

AttentionLibrary = Literal["torch", "cudnn", "flash3", "flash4"]


@config_dataclass
class KernelConfig:
    """Ways to compute that take the place of torch's own, one for each operation."""

    loss_chunk_tokens: int = 0
    """Tokens of a microbatch whose logits are in memory at a time, for the loss of this package's models; 0: all. The
    backward computes logits once more: one product more for the three of the head. Their float32 copies, 8 bytes a
    token and word, are what it saves most."""
    num_tp_overlap_chunks: int = 1
    """Chunks of a rank's tokens in which linears gather and scatter under sequence parallelism in the forward: each
    message but one goes while another chunk is multiplied; 1: all tokens at once. A product of fewer rows may be
    rounded otherwise, and 4 is usual."""
    symmetric_memory: bool = False
    """Whether linears gather and scatter under sequence parallelism in the forward by torch's symmetric memory: ranks
    read each other's memory while they multiply. For GPUs joined by NVLink; takes the place of chunks."""
    compile_layers: bool = False
    """Whether torch.compile compiles every layer of the models: neighbouring operations become one kernel, whose
    results are rounded less often than those of several. Embedding, head and loss stay as they are."""
    compile_backend: str = "inductor"
    """Backend of torch.compile. inductor: generates kernels; aot_eager: traces as it does, and runs torch's own
    kernels, with results that equal uncompiled layers' to the bit."""
    attention: AttentionLibrary = "torch"
    """Library of fused attention. torch: what torch chooses; cudnn: cuDNN's kernel first; flash3, flash4:
    FlashAttention-3 or 4 in place of FlashAttention-2. CUDA alone, but for torch."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(faults))

    def faults(self) -> list[str]:
        """Every rule that these settings break, one sentence each."""
        faults = []
        if self.loss_chunk_tokens < 0:
            faults.append(
                f"kernels loss_chunk_tokens ({self.loss_chunk_tokens}) must be at least 0; 0 keeps all logits, "
                "and 1024 is usual"
            )
        if self.num_tp_overlap_chunks < 1:
            faults.append(
                f"kernels num_tp_overlap_chunks ({self.num_tp_overlap_chunks}) must be at least 1; 1 sends all tokens "
                "at once, and 4 is usual"
            )
        if self.symmetric_memory and self.num_tp_overlap_chunks > 1:
            faults.append(
                f"kernels symmetric_memory (True) and num_tp_overlap_chunks ({self.num_tp_overlap_chunks}) hide the "
                "same messages; leave one of them out"
            )
        if not self.compile_layers and self.compile_backend != "inductor":
            faults.append(
                f"kernels compile_backend ({self.compile_backend!r}) acts with compile_layers=True alone; set that, or "
                "leave it out"
            )
        if self.attention not in get_args(AttentionLibrary):
            known = ", ".join(map(repr, get_args(AttentionLibrary)))
            faults.append(f"kernels attention ({self.attention!r}) must be one of {known}")
        return faults
