"""GPT: a decoder-only language model, as parts `embedding`, `layers.0` and on, `final_norm`, `head`.

Between parts, and between stages, travels the residual stream [T/sp, H]; what else a part needs (`GPTInputs`) every
stage makes from the caller's inputs by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from lightning_megatron.comm.p2p import Payload
from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.context.documents import documents_of
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.models.embedding import Embedding, build_token_embedding, scaled
from lightning_megatron.models.heads import LanguageModelHead, Targets, targets_of
from lightning_megatron.models.inputs import require_labels, require_positions, require_shapes
from lightning_megatron.models.language_model import LanguageModel
from lightning_megatron.models.next_tokens import NextTokenLayer, NextTokens, next_tokens_of
from lightning_megatron.moe.load import RoutingReport, gather
from lightning_megatron.moe.router import Router, end_step
from lightning_megatron.moe.sequence_groups import RoutedTokens
from lightning_megatron.pipeline.module import Part
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.build import build_norm
from lightning_megatron.transformer.config import LanguageModelConfig, NormPlacement
from lightning_megatron.transformer.decode_state import DecodeState, caching_stream, decode_stream
from lightning_megatron.transformer.layer import ExpertLayer, build_layer
from lightning_megatron.transformer.tokens import Tokens


@config_dataclass
class GPTConfig(LanguageModelConfig):
    """Architecture of a GPT: GPT-2's kind by default; Llama's with rotary, rmsnorm, swiglu and no biases."""

    norm_placements: ClassVar[tuple[NormPlacement, ...]] = ("pre", "sandwich", "output")
    predicts_further: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class GPTInputs:
    """Inputs of a call's parts besides the hidden states."""

    tokens: Tokens
    targets: Targets | None
    """Targets of the loss; none: the caller wants logits."""
    routed: RoutedTokens | None
    """Metadata of the tokens for routers; none: no layer of this rank has experts."""
    next_tokens: tuple[NextTokens, ...] = ()
    """Inputs and targets of the layers that predict further tokens; none: the call teaches them nothing."""
    decode_state: DecodeState | None = None
    """State of generation; none: the caller wants all logits, or the loss."""


class GPTModel(LanguageModel):
    """A GPT: with labels the loss, without them logits [batch, sequence, vocab_size]; see `LanguageModel`."""

    spreads_documents = True

    config: GPTConfig

    def __init__(
        self,
        config: GPTConfig,
        *,
        mesh: Mesh | None = None,
        seed: int | None = None,
        first_parts: Sequence[Part] = (),
    ) -> None:
        """`first_parts` are a subclass's own, before the embedding and on its stage."""
        super().__init__(config, lambda config, mesh: [*first_parts, *gpt_parts(config, mesh)], mesh=mesh, seed=seed)
        # Layers with experts on this rank.
        self._has_routers = bool(self.routers)
        # Calls of this step that routers counted.
        self._num_routed = 0
        # Reports of the last step, by the name of the layer; of this rank's layers, and none where it was skipped.
        self.routing_reports: dict[str, RoutingReport] = {}

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        segments: Tensor | None = None,
        decode_state: DecodeState | None = None,
    ) -> Tensor:
        """The loss [] with labels, else logits; tokens, labels (-100: no target) and loss_mask are [batch, sequence].

        The label of a position is the target of that position: nothing is shifted here. Where documents are packed,
        `segments` [batch, sequence] gives each token the number of its document in its row, from 0, and -1 where there
        is none: attention stays within a document, whose positions start at 0, and what is in none counts nothing, in
        routers of experts too, which know of padding only so. The host reads `segments`: where they have stayed there
        it need not wait for the device.

        With a `decode_state`, which goes without labels, the logits are [batch, vocab_size], of what follows each row;
        `generate` calls so.
        """
        given = {} if decode_state is None else {"decode_state": decode_state}
        output: Tensor = super().forward(tokens, labels=labels, loss_mask=loss_mask, segments=segments, **given)
        return output

    def prepare(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        segments: Tensor | None = None,
        decode_state: DecodeState | None = None,
    ) -> tuple[Tensor, GPTInputs]:
        require_shapes("tokens", tokens, {"labels": labels, "loss_mask": loss_mask, "segments": segments})
        require_labels(labels, {"loss_mask": loss_mask})
        if decode_state is not None and decode_state.extends:
            return self._prepare_extension(tokens, decode_state)
        documents = None if segments is None else documents_of(segments, tokens.device)
        stream = self._stream(tokens, documents)
        if decode_state is not None and decode_state.cache is not None:
            stream = caching_stream(stream, decode_state)
        targets = None if labels is None else targets_of(labels, loss_mask, stream)
        self.loss_weight = None if targets is None else targets.sum_of_weights
        routed = self._routed(stream, targets)
        following: tuple[NextTokens, ...] = ()
        # Read here and not in the layers: layers that are recomputed in the backward first run without gradients.
        if labels is not None and self.config.num_mtp_layers and self.training and torch.is_grad_enabled():
            following = next_tokens_of(tokens, labels, loss_mask, segments, stream, self.config.num_mtp_layers)
        inputs = GPTInputs(
            tokens=stream, targets=targets, routed=routed, next_tokens=following, decode_state=decode_state
        )
        return stream.flat(tokens), inputs

    def _prepare_extension(self, tokens: Tensor, decode_state: DecodeState) -> tuple[Tensor, GPTInputs]:
        """Ids and inputs of new tokens after those that a cache has."""
        lengths = (decode_state.seen_B + decode_state.lengths_B).tolist()
        require_positions(self.config, lengths, self.config.max_sequence_length)
        stream = decode_stream(
            decode_state,
            tokens.shape[1],
            positions=self.position_cache,
            mesh=self.mesh,
            draws=self.draws,
            device=tokens.device,
        )
        self.loss_weight = None
        routed = self._routed(stream, None)
        return stream.flat(tokens), GPTInputs(tokens=stream, targets=None, routed=routed, decode_state=decode_state)

    def _routed(self, stream: Tokens, targets: Targets | None) -> RoutedTokens | None:
        """Metadata of this call's tokens for routers."""
        if not self._has_routers:
            return None
        # Read here and not in the layers: layers that are recomputed in the backward first run without gradients.
        is_counted = self.training and torch.is_grad_enabled()
        self._num_routed += is_counted
        weights_BS = None
        if self.config.has_auxiliary_losses:
            # Without targets each token counts as one.
            ones_BS = torch.ones((), device=stream.device).expand(stream.shape)
            weights_BS = ones_BS if targets is None else targets.weights_BS
        return stream.routed(weights_BS, self.mesh.tp, self._num_routed if is_counted else -1)

    def run_part(self, name: str, hidden: Payload, context: GPTInputs) -> Payload:
        state = {"hidden": hidden} if isinstance(hidden, Tensor) else dict(hidden)
        module = self.get_submodule(name)
        if isinstance(module, LanguageModelHead):
            return self._finish(module, state, context)
        auxiliary: Tensor | None = None
        if isinstance(module, NextTokenLayer):
            auxiliary = self._predict(name, module, state, context)
        elif isinstance(module, ExpertLayer):
            assert context.routed is not None
            state["hidden"], auxiliary = module(state["hidden"], context.tokens, context.routed)
        elif name == "final_norm":
            state["hidden"] = module(state["hidden"])
        else:
            state["hidden"] = module(state["hidden"], context.tokens)
        if name == "embedding":
            return self._first_payload(state["hidden"])
        if auxiliary is not None and "auxiliary" in state:
            state["auxiliary"] = state["auxiliary"] + auxiliary.to(state["auxiliary"].dtype)
        # The residual stream alone, unless layers have auxiliary losses or predict further tokens.
        return state["hidden"] if len(state) == 1 else state

    def _first_payload(self, hidden: Tensor) -> Payload:
        """Payload after the embedding: the residual stream and, where layers have auxiliary losses, their sum, 0."""
        if not self.config.has_auxiliary_losses:
            return hidden
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return {"hidden": hidden, "auxiliary": torch.zeros((), dtype=dtype, device=hidden.device)}

    def _predict(
        self, name: str, module: NextTokenLayer, state: dict[str, Tensor], context: GPTInputs
    ) -> Tensor | None:
        """Adds hidden states of further tokens to the payload, where the caller learns from them; auxiliary losses."""
        number = int(name.rpartition(".")[2])
        if not context.next_tokens:
            return None
        before = state.pop("before_norm") if number else state["hidden"]
        embedded_TH = self.get_submodule("embedding.tokens")(context.next_tokens[number].ids_T)
        if self.config.scales_embedding:
            embedded_TH = scaled(embedded_TH)
        made: tuple[Tensor, Tensor | None] = module(before, embedded_TH, context.tokens, context.routed)
        # Here, since a part has its own weights alone, and the head may be on another stage.
        state[name] = module.norm(made[0])
        if number + 1 < len(context.next_tokens):
            state["before_norm"] = made[0]
        return made[1]

    def _finish(self, head: LanguageModelHead, state: dict[str, Tensor], context: GPTInputs) -> Tensor:
        """The loss, or logits."""
        weight = self.get_parameter("embedding.tokens.weight" if self.config.tie_embeddings else "head.weight")
        auxiliary = state.get("auxiliary")
        for number, following in enumerate(context.next_tokens):
            losses_T, _ = head.losses(state[f"mtp.{number}"], weight, following.targets, context.tokens)
            term = (losses_T * following.targets.weights_T.to(losses_T.dtype)).sum()
            term = term * (self.config.mtp_loss_weight / self.config.num_mtp_layers)
            auxiliary = term if auxiliary is None else auxiliary + term.to(auxiliary.dtype)
        return self._loss_or_logits(
            head, state["hidden"], weight, context.tokens, context.targets, context.decode_state, auxiliary
        )

    @property
    def routers(self) -> dict[str, Router]:
        """The routers of this rank's layers, by the name of the layer."""
        parts = ((name, self.get_submodule(name)) for name in self.part_names if self._has(name))
        layers = ((name, part.layer if isinstance(part, NextTokenLayer) else part) for name, part in parts)
        return {name: layer.moe.router for name, layer in layers if isinstance(layer, ExpertLayer)}

    def all_routing_reports(self) -> dict[str, RoutingReport]:
        """Reports of the routers of all layers on the last step, by the name of the layer, on every rank of pp.

        All of them call it. After a step that was skipped, and before the first, the reports count nothing.
        """
        if self.config.moe is None:
            return {}
        router = self.config.moe.router
        layers = [f"layers.{i}" for i in range(self.config.num_layers) if self.config.has_experts(i)]
        if self.config.has_experts(self.config.num_layers - 1):
            layers += [f"mtp.{i}" for i in range(self.config.num_mtp_layers)]
        device = next(self.parameters()).device
        return gather(
            self.routing_reports,
            layers,
            router.loss_names,
            router.num_experts,
            stages=self.mesh.pp,
            device=device,
        )

    @property
    def is_extendable(self) -> bool:
        """Whether what a token becomes does not depend on those after it: else no cache may stand for a prefix."""
        moe = self.config.moe
        return moe is None or (moe.capacity is None and moe.router.routing_type in ("top_k", "round_robin"))

    @property
    def learns_from_steps(self) -> bool:
        return self.config.moe is not None

    def end_step(self, *, is_skipped: bool, replicas: Axis | None = None) -> None:
        """Lets routers learn from the calls since the last step that taught the model: those in training mode with
        gradients. Talks over tp and dp+cp, unless the step was skipped."""
        routers, is_empty = self.routers, self._num_routed == 0
        self._num_routed = 0
        if is_skipped:
            self.routing_reports = {}
            for router in routers.values():
                router.records.forget()
            return
        data = self.mesh.axis("dp+cp") if replicas is None else replicas
        reports = end_step(list(routers.values()), cut=self.mesh.tp, data=data)
        # The second of two optimizers that share a model steps after no call of its own.
        if not is_empty:
            self.routing_reports = dict(zip(routers, reports, strict=True))


def gpt_parts(config: GPTConfig, mesh: Mesh) -> list[Part]:
    """The parts of a GPT in order; costs are the FLOPs of a full sequence's forward."""
    tp, sp = mesh.tp, mesh.sp
    token_embedding = partial(build_token_embedding, config, tp=tp, sp=sp)
    layers = [f"layers.{i}" for i in range(config.num_layers)]
    sequence = config.max_sequence_length
    flops = [
        cost.layer_linear_flops(config, num_tokens=sequence, layer=i)
        + cost.layer_attention_flops(config, batch=1, sequence=sequence, is_causal=True, window=config.window_of(i))
        for i in range(config.num_layers)
    ]
    return [
        Part(name="embedding", build=partial(Embedding, config, tp=tp, sp=sp), symbol="E", cost=0.0),
        *(
            Part(
                name=name,
                build=partial(build_layer, config, mesh, i, name),
                cost=flops[i],
            )
            for i, name in enumerate(layers)
        ),
        *(
            Part(
                name=f"mtp.{i}",
                build=partial(NextTokenLayer, config, mesh, f"mtp.{i}"),
                # With the last layer.
                symbol="",
                cost=cost.mtp_layer_flops(config, batch=1, sequence=sequence),
                shares={"embedding.tokens": token_embedding},
            )
            for i in range(config.num_mtp_layers)
        ),
        Part(name="final_norm", build=partial(build_norm, config, tp=tp, sp=sp), symbol="", cost=0.0),
        Part(
            name="head",
            build=partial(LanguageModelHead, config, tp=tp, sp=sp),
            symbol="L",
            # Of each layer that predicts a further token, too.
            cost=cost.head_flops(config, num_tokens=sequence * (1 + config.num_mtp_layers)),
            shares={"embedding.tokens": token_embedding} if config.tie_embeddings else {},
        ),
    ]
