"""What GPT, BERT and T5 share: they fit their ranks or are refused, make streams of a call, and end in a head."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_megatron.context.documents import Documents
from lightning_megatron.mesh import Mesh, Sizes, ambient_mesh
from lightning_megatron.models.heads import LanguageModelHead, Targets
from lightning_megatron.models.inputs import require_even_parts, require_positions
from lightning_megatron.pipeline.layout import layout_faults as stage_faults
from lightning_megatron.pipeline.module import Part, PipelineModule
from lightning_megatron.transformer.config import LanguageModelConfig
from lightning_megatron.transformer.decode_state import DecodeState, last_tokens
from lightning_megatron.transformer.init import initialise
from lightning_megatron.transformer.position_cache import PositionCache
from lightning_megatron.transformer.tokens import Tokens, stream_of


class LanguageModel(PipelineModule):
    """A language model of which this rank holds its stage and its slice of each weight.

    Called with labels it returns the loss, the mean over tokens that have a label and are not masked out, and
    `loss_weight` then says over how many; without labels it returns logits. Either is that of the whole call, on every
    rank of tp and cp: they take the same inputs, and cut them by themselves. Raises ValueError where the architecture
    does not fit the mesh.
    """

    cuts_sequences = True

    config: LanguageModelConfig

    def __init__(
        self, config: Any, parts: Callable[[Any, Mesh], list[Part]], *, mesh: Mesh | None, seed: int | None
    ) -> None:
        mesh = mesh if mesh is not None else ambient_mesh()
        require_fit(config, mesh.sizes)
        super().__init__(parts(config, mesh), mesh=mesh, seed=seed)
        self.config = config
        self.position_cache = PositionCache(config)
        initialise(self, self.draws.seed)

    def _stream(
        self,
        tokens: Tensor,
        documents: Documents | None,
        *,
        is_causal: bool = True,
        limit: str = "max_sequence_length",
        of_stack: str = "",
    ) -> Tokens:
        """The stream of tokens [batch, sequence]; `limit` is the field that says how long a sequence may be.

        Raises ValueError for sequences that learned positions or ranks of cp cannot take.
        """
        lengths = (tokens.shape[1],) if documents is None else documents.lengths
        require_positions(self.config, lengths, getattr(self.config, limit), name=limit, of_stack=of_stack)
        # Documents are as long as they are, and what is generated grows token by token.
        if documents is None and self.training:
            require_even_parts(lengths, self.mesh, is_causal=is_causal)
        return stream_of(
            (tokens.shape[0], tokens.shape[1]),
            positions=self.position_cache,
            mesh=self.mesh,
            draws=self.draws,
            device=tokens.device,
            documents=documents,
            group=self.context_group,
            is_causal=is_causal,
        )

    def _loss_or_logits(
        self,
        head: LanguageModelHead,
        hidden: Tensor,
        weight: Tensor,
        stream: Tokens,
        targets: Targets | None,
        decode_state: DecodeState | None,
        auxiliary: Tensor | None = None,
    ) -> Tensor:
        """The loss [] of targets; without them logits, with a decode state of what follows each row [batch, vocab]."""
        if decode_state is not None:
            picked = last_tokens(hidden, stream, decode_state.lengths_B)
            return head.joined_logits(head(picked, weight))[: len(decode_state.lengths_B)]
        if targets is None:
            return head.full_logits(head(hidden, weight), stream)
        losses, self.tallies = head.losses(hidden, weight, targets, stream)
        return head.loss(losses, targets, stream, auxiliary)


def require_fit(config: LanguageModelConfig, sizes: Sizes) -> None:
    """Raises ValueError with every rule that the architecture breaks on that many ranks, a line each."""
    faults = config.layout_faults(sizes)
    faults += stage_faults(config.num_staged_layers, True, True, sizes.num_stages, sizes.stage_layout)
    if faults:
        raise ValueError("\n".join(faults))
