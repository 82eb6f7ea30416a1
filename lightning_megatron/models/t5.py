"""T5: an encoder and a decoder that attends to it, as one list of parts that stages may cut anywhere.

Between the parts of the encoder travels its residual stream [M/sp, H]; from `decoder.embedding` on a dict of the
decoder's, `hidden` [T/sp, H], and of the encoder's output, `memory` [M/sp, H], which rides along to every stage with
decoder layers: what each adds to its gradient is summed on the way back. What else a part needs (`T5Inputs`) every
stage makes from the caller's inputs by itself. `t5_config` says what a T5 is, `t5_parts` what it is made of.

Source: Raffel et al., arXiv 1910.10683.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_megatron.comm.p2p import Payload
from lightning_megatron.context.attention_step import RelativePositionBias
from lightning_megatron.context.cross_attention_layout import NOTHING, CrossAttentionLayout
from lightning_megatron.context.documents import Documents, documents_of
from lightning_megatron.mesh import Mesh
from lightning_megatron.models.heads import LanguageModelHead, Targets, targets_of
from lightning_megatron.models.inputs import require_labels, require_shapes
from lightning_megatron.models.language_model import LanguageModel
from lightning_megatron.models.t5_config import T5Config
from lightning_megatron.models.t5_decode_state import T5DecodeState, cached_memory
from lightning_megatron.models.t5_parts import StackNorm, t5_parts, table_of
from lightning_megatron.transformer.cross_attention import CachedEncoderMemory, EncoderMemory
from lightning_megatron.transformer.decode_state import decode_stream
from lightning_megatron.transformer.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class T5Inputs:
    """Inputs of a call's parts besides the hidden states."""

    encoder: Tokens | None
    """Stream of the encoder; none: an earlier call ran it."""
    decoder: Tokens
    decoder_ids_T: Tensor
    source: CrossAttentionLayout | None = None
    """Segments of the encoder's stream that the decoder's attend to; none: keys and values are cached."""
    cached: CachedEncoderMemory | None = None
    targets: Targets | None = None
    """Targets of the loss; none: the caller wants logits."""
    decode_state: T5DecodeState | None = None
    """State of generation; none: the caller wants all logits, or the loss."""


class T5Model(LanguageModel):
    """A T5: with labels the loss, without them logits [batch, decoder sequence, vocab_size]; see `LanguageModel`."""

    config: T5Config

    def __init__(self, config: T5Config, *, mesh: Mesh | None = None, seed: int | None = None) -> None:
        super().__init__(config, t5_parts, mesh=mesh, seed=seed)

    def forward(
        self,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        encoder_segments: Tensor | None = None,
        decoder_segments: Tensor | None = None,
        decode_state: T5DecodeState | None = None,
    ) -> Tensor:
        """The loss [] with labels, else logits; labels (-100: no target) and loss_mask are as decoder_tokens, [batch,
        decoder sequence]; the encoder's tokens, mask and segments are [batch, encoder sequence].

        The label of a position is the target of that position: nothing is shifted here, so decoder_tokens begin with
        the token that starts a text. `encoder_padding_mask` is 1 for tokens and 0 for padding at either end of a row,
        which nobody looks at. Padding at the end of the decoder's rows needs no mask, only no labels. Where documents
        are packed both `segments` give each token the number of its document in its row, from 0, and -1 where there is
        none: a token of the decoder sees the encoder's document of the same row and number, and one for which there is
        none sees nothing of it.

        With a `decode_state`, which goes without labels and segments, the logits are [batch, vocab_size], of what
        follows each row of decoder_tokens; `generate_t5` calls so.
        """
        given = {} if decode_state is None else {"decode_state": decode_state}
        output: Tensor = super().forward(
            encoder_tokens,
            decoder_tokens,
            labels=labels,
            loss_mask=loss_mask,
            encoder_padding_mask=encoder_padding_mask,
            encoder_segments=encoder_segments,
            decoder_segments=decoder_segments,
            **given,
        )
        return output

    def prepare(
        self,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        encoder_segments: Tensor | None = None,
        decoder_segments: Tensor | None = None,
        decode_state: T5DecodeState | None = None,
    ) -> tuple[Tensor, T5Inputs]:
        of_encoder = {"encoder_padding_mask": encoder_padding_mask, "encoder_segments": encoder_segments}
        of_decoder = {"labels": labels, "loss_mask": loss_mask, "decoder_segments": decoder_segments}
        require_shapes("encoder_tokens", encoder_tokens, of_encoder)
        require_shapes("decoder_tokens", decoder_tokens, of_decoder)
        require_labels(labels, {"loss_mask": loss_mask})
        _require_pairs(encoder_tokens, decoder_tokens)
        _require_one_kind_of_bounds(encoder_padding_mask, encoder_segments, decoder_segments)
        if decode_state is not None:
            return self._prepare_decoding(encoder_tokens, decoder_tokens, encoder_padding_mask, decode_state)
        if encoder_padding_mask is not None:
            # Padding is what is in no document of a row that has one.
            encoder_segments = encoder_padding_mask.bool().long() - 1
            decoder_segments = torch.zeros(decoder_tokens.shape, dtype=torch.int64)
        device = decoder_tokens.device
        documents = [None if s is None else documents_of(s, device) for s in (encoder_segments, decoder_segments)]
        encoder = self._encoder_stream(encoder_tokens, documents[0])
        decoder = self._stream(
            decoder_tokens, documents[1], limit="max_decoder_sequence_length", of_stack=" of the decoder"
        )
        source = CrossAttentionLayout(encoder.layout, _seen_segments(*documents))
        targets = None if labels is None else targets_of(labels, loss_mask, decoder)
        self.loss_weight = None if targets is None else targets.sum_of_weights
        inputs = T5Inputs(
            encoder=encoder,
            decoder=decoder,
            decoder_ids_T=decoder.flat(decoder_tokens),
            source=source,
            targets=targets,
        )
        return encoder.flat(encoder_tokens), inputs

    def _prepare_decoding(
        self,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        encoder_padding_mask: Tensor | None,
        decode_state: T5DecodeState,
    ) -> tuple[Tensor, T5Inputs]:
        """Ids and inputs of the decoder's new tokens, and in the first call of all of the encoder's."""
        device = decoder_tokens.device
        decoder = decode_stream(
            decode_state,
            decoder_tokens.shape[1],
            positions=self.position_cache,
            mesh=self.mesh,
            draws=self.draws,
            device=device,
        )
        # What goes through the parts of an encoder that has run.
        ids, encoder, documents = torch.zeros(1, device=device), None, None
        if decode_state.memory.is_empty:
            is_token = torch.ones_like(encoder_tokens) if encoder_padding_mask is None else encoder_padding_mask
            documents = documents_of(is_token.bool().long() - 1, device)
            encoder = self._encoder_stream(encoder_tokens, documents)
            ids = encoder.flat(encoder_tokens)
        self.loss_weight = None
        return ids, T5Inputs(
            encoder=encoder,
            decoder=decoder,
            decoder_ids_T=decoder.flat(decoder_tokens),
            cached=cached_memory(decode_state, decoder, encoder, documents),
            decode_state=decode_state,
        )

    def _encoder_stream(self, tokens: Tensor, documents: Documents | None) -> Tokens:
        return self._stream(tokens, documents, is_causal=False, of_stack=" of the encoder")

    def run_part(self, name: str, hidden: Payload, context: T5Inputs) -> Payload:
        module = self.get_submodule(name)
        if isinstance(hidden, dict):
            return self._decode(name, module, hidden, context)
        output: Tensor
        if context.encoder is None and name.startswith(("embedding", "encoder.")):
            # The encoder has run.
            output = hidden
        elif name == "embedding":
            output = module(self.get_submodule("embedding.tokens")(hidden), context.encoder)
        elif name == "decoder.embedding":
            embedded = self.get_submodule(self.config.decoder_embedding)(context.decoder_ids_T)
            return {"hidden": module(embedded, context.decoder), "memory": hidden}
        elif isinstance(module, LanguageModelHead):
            output = self._finish(module, hidden, context)
        elif isinstance(module, StackNorm):
            output = module(hidden, context.encoder)
        else:
            output = module(hidden, context.encoder, self._bias("encoder"))
        return output

    def _decode(self, name: str, module: nn.Module, hidden: dict[str, Tensor], context: T5Inputs) -> Payload:
        """Output of a part of the decoder; after its last part nobody needs the encoder."""
        if isinstance(module, StackNorm):
            normed: Tensor = module(hidden["hidden"], context.decoder)
            return normed
        memory = None if context.encoder is None else EncoderMemory(hidden["memory"], context.encoder, context.source)
        bias = self._bias("decoder")
        return {**hidden, "hidden": module(hidden["hidden"], context.decoder, bias, memory, context.cached)}

    def _bias(self, stack: str) -> RelativePositionBias | None:
        """Relative position bias of a stack's self-attention."""
        if self.config.position != "relative":
            return None
        bias: RelativePositionBias = self.get_submodule(table_of(stack))()
        return bias

    def _finish(self, head: LanguageModelHead, hidden: Tensor, context: T5Inputs) -> Tensor:
        """The loss, or logits."""
        if self.config.scales_head:
            hidden = hidden * self.config.hidden_size**-0.5
        of_embedding = f"{self.config.decoder_embedding}.weight"
        weight = self.get_parameter(of_embedding if self.config.tie_embeddings else "head.weight")
        return self._loss_or_logits(head, hidden, weight, context.decoder, context.targets, context.decode_state)


def _seen_segments(encoder: Documents | None, decoder: Documents | None) -> tuple[int, ...]:
    """Segment of the encoder's stream of the same row and number for each segment of the decoder's."""
    if encoder is None or decoder is None:
        return (0,)
    indices = {name: index for index, name in enumerate(encoder.names)}
    return tuple(indices.get(name, NOTHING) for name in decoder.names)


def _require_pairs(encoder_tokens: Tensor, decoder_tokens: Tensor) -> None:
    if len(encoder_tokens) != len(decoder_tokens):
        raise ValueError(
            f"encoder_tokens and decoder_tokens must have as many rows, not {len(encoder_tokens)} and "
            f"{len(decoder_tokens)}: each row of one belongs to that of the other"
        )


def _require_one_kind_of_bounds(
    encoder_padding_mask: Tensor | None, encoder_segments: Tensor | None, decoder_segments: Tensor | None
) -> None:
    if (encoder_segments is None) != (decoder_segments is None):
        raise ValueError("encoder_segments and decoder_segments go together: give both or neither")
    if encoder_segments is not None and encoder_padding_mask is not None:
        raise ValueError("encoder_padding_mask says nothing beside segments, which are -1 at padding; leave it out")
