"""Multi-token prediction: layers after the last that learn to predict tokens beyond the next, in training alone.

    hidden of layer k - 1 ── hidden_norm ────────────┐
    token t + k ── the embedding ── embedding_norm ──┴─ projection ── layer ─┬─ norm ── the head ── token t + k + 1
                                                                            └─ layer k + 1

Embedding and head are the model's own. Each layer's loss, of the targets k places on in the same document, joins the
objective as one more term of the sum over tokens, times `mtp_loss_weight` over the number of such layers; the value of
the model's loss stays that of the next token.

B batch, S sequence, T tokens, H hidden.
Source: DeepSeek-AI, arXiv 2412.19437, section 2.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.models.heads import Targets, targets_of
from lightning_megatron.moe.sequence_groups import RoutedTokens
from lightning_megatron.sharding import Initial
from lightning_megatron.tensor.cross_entropy import IGNORED
from lightning_megatron.tensor.shared_linear import SharedLinear
from lightning_megatron.transformer.build import build_norm
from lightning_megatron.transformer.config import LanguageModelConfig
from lightning_megatron.transformer.layer import ExpertLayer, build_layer
from lightning_megatron.transformer.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """What the k-th layer reads, and what it is to predict."""

    ids_T: Tensor
    """The token k places on, 0 where the document has none: int64."""
    targets: Targets


def next_tokens_of(
    tokens_BS: Tensor,
    labels_BS: Tensor,
    loss_mask_BS: Tensor | None,
    segments_BS: Tensor | None,
    stream: Tokens,
    num_layers: int,
) -> tuple[NextTokens, ...]:
    """Inputs and targets of each layer, of tokens, labels and masks that stand k places on in the same document."""
    found = []
    for distance in range(1, num_layers + 1):
        is_there = torch.ones_like(tokens_BS, dtype=torch.bool)
        is_there[:, max(tokens_BS.shape[1] - distance, 0) :] = False
        if segments_BS is not None:
            is_there &= (segments_BS.roll(-distance, dims=1) == segments_BS).to(is_there.device)
        labels = labels_BS.roll(-distance, dims=1).masked_fill(~is_there, IGNORED)
        mask = None if loss_mask_BS is None else loss_mask_BS.roll(-distance, dims=1)
        ids_BS = tokens_BS.roll(-distance, dims=1).masked_fill(~is_there, 0)
        found.append(NextTokens(ids_T=stream.flat(ids_BS), targets=targets_of(labels, mask, stream)))
    return tuple(found)


class NextTokenLayer(nn.Module):
    """A layer of multi-token prediction: [T/sp, H] of the layer before and of embedded tokens to [T/sp, H].

    `name` is its name in the model. Its transformer layer is of the kind of the model's last.
    """

    def __init__(self, config: LanguageModelConfig, mesh: Mesh, name: str) -> None:
        super().__init__()
        tp, sp, hidden = mesh.tp, mesh.sp, config.hidden_size
        self.embedding_norm = build_norm(config, tp=tp, sp=sp)
        self.hidden_norm = build_norm(config, tp=tp, sp=sp)
        self.projection = SharedLinear(2 * hidden, hidden, tp=tp, sp=sp, initial=Initial(std=config.init_std))
        self.layer = build_layer(config, mesh, config.num_layers - 1, f"{name}.layer")
        self.norm = build_norm(config, tp=tp, sp=sp)

    def forward(
        self, hidden_TH: Tensor, embedded_TH: Tensor, tokens: Tokens, routed: RoutedTokens | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states, and the sum of this rank's auxiliary losses where the layer has experts."""
        joined_TH = torch.cat((self.embedding_norm(embedded_TH), self.hidden_norm(hidden_TH)), dim=-1)
        projected_TH = self.projection(joined_TH, tokens)
        if isinstance(self.layer, ExpertLayer):
            assert routed is not None
            hidden_TH, auxiliary = self.layer(projected_TH, tokens, routed)
            return hidden_TH, auxiliary
        output_TH: Tensor = self.layer(projected_TH, tokens)
        return output_TH, None
