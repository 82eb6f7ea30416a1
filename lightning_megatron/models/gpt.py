"""GPT: a decoder-only language model, as parts `embedding`, `layers.0` and on, `final_norm`, `head`.

Between parts, and between stages, travels the residual stream [T/sp, H]; what else a part needs (`Inputs`) every stage
makes from the caller's inputs by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lightning_megatron.context.documents import documents_of
from lightning_megatron.context.layout import require_even
from lightning_megatron.mesh import Mesh, ambient_mesh
from lightning_megatron.models.embedding import Embedding, build_token_embedding
from lightning_megatron.models.heads import LanguageModelHead, Targets, targets_of
from lightning_megatron.pipeline.layout import layout_faults as stage_faults
from lightning_megatron.pipeline.module import Part, PipelineModule
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.config import LanguageModelConfig, layout_faults
from lightning_megatron.transformer.init import initialise
from lightning_megatron.transformer.layer import TransformerLayer, build_norm
from lightning_megatron.transformer.tokens import Tokens, stream_of


@dataclass(frozen=True, kw_only=True)
class GPTConfig(LanguageModelConfig):
    """The architecture of a GPT: GPT-2's kind by default; Llama's with rotary, rmsnorm, swiglu and no biases."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the parts of a call read beside the hidden states."""

    tokens: Tokens
    targets: Targets | None
    # none: the caller wants logits


class GPTModel(PipelineModule):
    """A GPT of which this rank holds its stage and its slice of each weight.

    Called with labels it returns the loss: the mean over tokens that have a label and are not masked out; `loss_weight`
    then says over how many. Without labels it returns logits [batch, sequence, vocab_size]. Either is that of the whole
    call, on every rank of tp and cp: they take the same inputs, and cut them by themselves.
    Raises ValueError where the architecture does not fit the mesh.
    """

    cuts_sequences = True

    def __init__(self, config: GPTConfig, *, mesh: Mesh | None = None, seed: int | None = None) -> None:
        mesh = mesh if mesh is not None else ambient_mesh()
        sizes = mesh.sizes
        faults = layout_faults(config, sizes)
        faults += stage_faults(config.num_layers, True, True, sizes.num_stages, sizes.stage_layout)
        if faults:
            raise ValueError("\n".join(faults))
        super().__init__(gpt_parts(config, mesh), mesh=mesh, seed=seed)
        self.config = config
        initialise(self, self.draws.seed)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """The loss [] with labels, else logits; tokens, labels (-100: no target) and loss_mask are [batch, sequence].

        The label of a position is the target of that position: nothing is shifted here. Where documents are packed,
        `segments` [batch, sequence] gives each token the number of its document in its row, from 0, and -1 where there
        is none: attention stays within a document, whose positions start at 0, and what is in none counts nothing.
        """
        output: Tensor = super().forward(tokens, labels=labels, loss_mask=loss_mask, segments=segments)
        return output

    def prepare(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> tuple[Tensor, Inputs]:
        self._check_shapes(tokens, labels, loss_mask, segments)
        documents = None if segments is None else documents_of(segments)
        # Documents are as long as they are, and what is generated grows token by token.
        is_even = documents is None and self.training
        self._check_lengths((tokens.shape[1],) if documents is None else documents.lengths, is_even=is_even)
        stream = stream_of(
            (tokens.shape[0], tokens.shape[1]),
            config=self.config,
            mesh=self.mesh,
            draws=self.draws,
            device=tokens.device,
            documents=documents,
            group=self.context_group,
        )
        targets = None if labels is None else targets_of(labels, loss_mask, stream)
        self.loss_weight = None if targets is None else targets.sum_of_weights
        return stream.flat(tokens), Inputs(tokens=stream, targets=targets)

    def run_part(self, name: str, hidden: Tensor, context: Inputs) -> Tensor:
        module = self.get_submodule(name)
        if name == "final_norm":
            normed: Tensor = module(hidden)
            return normed
        if isinstance(module, LanguageModelHead):
            weight = self.get_parameter("embedding.tokens.weight" if self.config.tie_embeddings else "head.weight")
            logits = module(hidden, weight)
            if context.targets is None:
                return module.full_logits(logits, context.tokens)
            return module.loss(logits, context.targets, context.tokens)
        output: Tensor = module(hidden, context.tokens)
        return output

    def _check_shapes(
        self, tokens: Tensor, labels: Tensor | None, loss_mask: Tensor | None, segments: Tensor | None
    ) -> None:
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(
                f"tokens ({tuple(tokens.shape)} of {tokens.dtype}) must be integers of shape [batch, sequence]"
            )
        for name, value in (("labels", labels), ("loss_mask", loss_mask), ("segments", segments)):
            if value is not None and value.shape != tokens.shape:
                raise ValueError(
                    f"{name} {tuple(value.shape)} must have the shape of tokens {tuple(tokens.shape)}; "
                    "labels are not shifted here: give each position its own target"
                )
        if labels is None and loss_mask is not None:
            raise ValueError("loss_mask needs labels: without labels there is no loss to mask")

    def _check_lengths(self, lengths: Sequence[int], *, is_even: bool) -> None:
        limit, longest = self.config.max_sequence_length, max(lengths, default=0)
        if self.config.position == "learned" and longest > limit:
            raise ValueError(
                f"a sequence of {longest} tokens must not be longer than max_sequence_length ({limit}), because "
                "positions are learned; shorten it, or build the model with more positions"
            )
        if is_even and not self.mesh.sizes.pads_uneven:
            require_even(lengths, outer=self.mesh.axis("cp_outer").size, inner=self.mesh.axis("cp_inner").size)


def gpt_parts(config: GPTConfig, mesh: Mesh) -> list[Part]:
    """The parts of a GPT in order; costs are the FLOPs of a full sequence's forward."""
    tp, sp = mesh.tp, mesh.sp
    token_embedding = partial(build_token_embedding, config, tp=tp, sp=sp)
    layers = [f"layers.{i}" for i in range(config.num_layers)]
    sequence = config.max_sequence_length
    linears = cost.layer_linear_flops(config, num_tokens=sequence)
    attention = [
        cost.layer_attention_flops(config, batch=1, sequence=sequence, is_causal=True, window=config.window_of(i))
        for i in range(config.num_layers)
    ]
    return [
        Part(name="embedding", build=partial(Embedding, config, tp=tp, sp=sp), symbol="E", cost=0.0),
        *(
            Part(
                name=name,
                build=partial(TransformerLayer, config, tp=tp, sp=sp, name=name, window=config.window_of(i)),
                cost=linears + attention[i],
            )
            for i, name in enumerate(layers)
        ),
        Part(name="final_norm", build=partial(build_norm, config, tp=tp, sp=sp), symbol="", cost=0.0),
        Part(
            name="head",
            build=partial(LanguageModelHead, config, tp=tp, sp=sp),
            symbol="L",
            cost=cost.head_flops(config, num_tokens=sequence),
            shares={"embedding.tokens": token_embedding} if config.tie_embeddings else {},
        ),
    ]
