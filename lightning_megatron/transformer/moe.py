"""The mixture-of-experts layer in place of an MLP: router, token dispatch, experts, combine, and the shared expert.

Each token is routed by one rank: under sequence parallelism the rank that holds it; elsewhere each tensor-parallel rank
routes its part of the tokens, and the outputs are all-gathered.

T tokens, H hidden.
"""

import math
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm import differentiable
from lightning_megatron.comm.async_collectives import YieldToPeer
from lightning_megatron.mesh import Axis
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.moe.experts import ExpertAxes, Experts
from lightning_megatron.moe.grouped_gemm import GROUPED_GEMM, SEQUENTIAL_GEMM
from lightning_megatron.moe.router import Router, Routing
from lightning_megatron.moe.sequence_groups import RoutedTokens, routing_map
from lightning_megatron.moe.shared_expert import SharedExpert
from lightning_megatron.moe.token_dispatcher import (
    AllGatherTokenDispatcher,
    AllToAllTokenDispatcher,
    TokenDispatcher,
    moe_forward,
)
from lightning_megatron.precision.autocast import autocast_dtype
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.linear import TokenKeys
from lightning_megatron.transformer.config import TransformerConfig
from lightning_megatron.transformer.uncompiled_experts import Uncompiled


def share_yield_to_peer(module: nn.Module, yield_to_peer: YieldToPeer) -> None:
    """Makes all MoE layers of a module call `yield_to_peer` before they wait for tokens in flight."""
    for layer in module.modules():
        if isinstance(layer, MoELayer):
            layer.dispatcher.yield_to_peer = yield_to_peer


class MoELayer(nn.Module):
    """Maps hidden states [T/sp, H] to hidden states and the sum of this rank's auxiliary losses.

    `name` is the layer's name in the model and seeds its router. Talks over ep and etp, and over the axes that cut
    sequences where routing, a loss or a capacity needs full ones. Raises ValueError under the all-gather dispatcher
    where ranks may have different numbers of tokens.
    """

    shared: SharedExpert | None

    def __init__(
        self, config: TransformerConfig, moe: MoEConfig, *, tp: Axis, sp: Axis, experts: ExpertAxes, name: str
    ) -> None:
        super().__init__()
        initial, output_initial = Initial(std=config.init_std), Initial(std=config.output_std)
        self.config = moe
        # Ranks whose tokens meet in the same experts.
        self.num_sharing = experts.ep.size * experts.etp.size
        self._uncompiled = Uncompiled(weakref.WeakMethod(self.mixed))
        # Axis whose ranks hold the same tokens, of which each routes a part.
        self.split = tp if sp.size < tp.size else Axis.alone(tp.ranks[tp.rank])
        self.router = Router(moe.router, config.hidden_size, tp=tp, cut=tp, name=f"{name}.router", initial=initial)
        self.experts = Experts(
            moe.router.num_experts,
            config.hidden_size,
            moe.ffn_hidden_size or config.ffn_hidden_size,
            activation=config.activation,
            initial=initial,
            output_initial=output_initial,
            axes=experts,
            has_bias=config.add_bias_linear,
            gemm=GROUPED_GEMM if moe.expert_gemm == "grouped" else SEQUENTIAL_GEMM,
        )
        kind = AllToAllTokenDispatcher if moe.dispatcher == "all_to_all" else AllGatherTokenDispatcher
        self.dispatcher: TokenDispatcher = kind(moe.router.num_experts, ep=experts.ep, etp=experts.etp)
        self.shared = None
        if moe.shared_expert_intermediate_size:
            self.shared = SharedExpert(
                config.hidden_size,
                moe.shared_expert_intermediate_size,
                activation=config.activation,
                has_gate=moe.shared_expert_gate,
                has_bias=config.add_bias_linear,
                initial=initial,
                output_initial=output_initial,
                tp=tp,
                sp=sp,
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy is another layer.
        self._uncompiled = Uncompiled(weakref.WeakMethod(self.mixed))

    def forward(self, hidden_TH: Tensor, tokens: RoutedTokens, keys: TokenKeys | None = None) -> tuple[Tensor, Tensor]:
        """Output [T/sp, H] and auxiliary losses []; `keys` key the dropout of the shared expert's LoRA adapters."""
        if torch.compiler.is_compiling():
            assert tokens.handle is not None, "a model makes the tokens of its routers"
            low = autocast_dtype(hidden_TH)
            dtype = hidden_TH.dtype if low is None or hidden_TH.dtype == torch.float64 else low
            return self._uncompiled.run([hidden_TH], tokens.handle, dtype)
        return self.mixed(hidden_TH, tokens, keys)

    def mixed(self, hidden_TH: Tensor, tokens: RoutedTokens, keys: TokenKeys | None) -> tuple[Tensor, Tensor]:
        """What `forward` returns."""
        self._check(tokens)
        own_TH = self._own(hidden_TH)
        routing = self.router(own_TH, tokens)
        expert_ids_TK = self._drop(routing, tokens)
        mixed_TH, shared_TH = moe_forward(
            own_TH,
            expert_ids_TK,
            routing.probs_TK,
            dispatcher=self.dispatcher,
            experts=self.experts,
            capacity=self._capacity(tokens),
            num_rows=self._num_rows(tokens),
            overlapped=lambda: None if self.shared is None else self.shared(hidden_TH, keys),
        )
        output_TH = differentiable.all_gather_invariant(mixed_TH, self.split)[: len(hidden_TH)]
        return output_TH if shared_TH is None else output_TH + shared_TH, routing.auxiliary

    def _check(self, tokens: RoutedTokens) -> None:
        if self.config.dispatcher == "all_gather" and not self._has_equal_sizes(tokens):
            raise ValueError(
                f"dispatcher 'all_gather' needs as many tokens on each of the {self.num_sharing} ranks that share "
                "experts, and with packed documents data-parallel ranks have different numbers of them; use dispatcher "
                "'all_to_all', or batches without segments"
            )

    def _has_equal_sizes(self, tokens: RoutedTokens) -> bool:
        """Whether ranks that share experts have equally many tokens in sequences of equal lengths."""
        return not tokens.is_packed or math.prod(axis.size for axis in tokens.axes) % self.num_sharing == 0

    def _own(self, hidden_TH: Tensor) -> Tensor:
        """This rank's part of the tokens that all tensor-parallel ranks hold."""
        padding = -len(hidden_TH) % self.split.size
        return differentiable.split(F.pad(hidden_TH, (0, 0, 0, padding)) if padding else hidden_TH, self.split)

    def _drop(self, routing: Routing, tokens: RoutedTokens) -> Tensor:
        """Experts of each token, -1 where the expert's capacity drops it: int64 [T, K]."""
        capacity, router, expert_ids_TK = self.config.capacity, self.config.router, routing.expert_ids_TK
        if capacity is None:
            return expert_ids_TK
        accepted_TK = capacity.drop(
            expert_ids_TK,
            routing.probs_TK,
            tokens.positions_T,
            tokens.sequence_groups,
            num_chosen=router.top_k,
            num=router.num_experts,
        )
        if self.training and tokens.is_counted:
            self.router.records.add_accepted(tokens.call, routing_map(accepted_TK, router.num_experts).sum(0))
        return accepted_TK

    def _capacity(self, tokens: RoutedTokens) -> int | None:
        """Rows that each expert gets of each rank, if inputs are padded to capacity; else None."""
        capacity, router = self.config.capacity, self.config.router
        if capacity is None or not capacity.pad_to_capacity or not self._has_equal_sizes(tokens):
            return None
        most = sum(capacity.num_rows(length, router.top_k, router.num_experts) for length in tokens.lengths)
        return min(most, len(tokens.is_real_T))

    def _num_rows(self, tokens: RoutedTokens) -> int | None:
        """How many experts this rank's tokens have together, if that does not depend on the routing; else None."""
        router = self.config.router
        if self.config.capacity is not None:
            return None
        if router.routing_type != "expert_choice":
            return tokens.num_real * router.top_k
        if any(axis.size > 1 for axis in tokens.axes):
            return None
        # Each expert takes as many tokens of a sequence, all of which are here.
        return router.num_experts * sum(-(-length * router.top_k // router.num_experts) for length in tokens.lengths)
