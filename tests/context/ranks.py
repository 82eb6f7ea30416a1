"""Context-parallel attention on every rank, its results joined, and the same attention on one device."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.context.attention import ContextAxes, DropoutSpec, attend
from lightning_megatron.context.attention_step import RelativePositionBias
from lightning_megatron.context.context_layout import PADDING, ContextLayout, MaskSpec, cut
from lightning_megatron.context.key_value_exchange import KeyValueExchange, RingExchange
from lightning_megatron.mesh import Axis, NewGroup
from tests.harness.threads import ThreadGroup, new_group, run_on_threads

NUM_BUCKETS = 5


def bucket(relative: Tensor) -> Tensor:
    """One for each distance up to two; further ones share."""
    return relative.clamp(-2, 2) + 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention over a stream, and the ranks that share it."""

    lengths: tuple[int, ...]
    ring: int = 1
    ulysses: int = 1
    exchange: KeyValueExchange = field(default_factory=RingExchange)
    mask_spec: MaskSpec = field(default_factory=lambda: MaskSpec(is_causal=True))
    is_zigzag: bool = True
    batch: int = 1
    heads: int = 8
    groups: int = 8
    head_dim: int = 4
    dropout: float = 0.0
    has_bias: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float64

    @property
    def size(self) -> int:
        return self.ring * self.ulysses

    def layout(self) -> ContextLayout:
        return cut(self.lengths, ring_size=self.ring, ulysses_size=self.ulysses, is_zigzag=self.is_zigzag)

    def on_one_device(self) -> "Case":
        return replace(self, ring=1, ulysses=1)

    def dropout_spec(self) -> DropoutSpec | None:
        if not self.dropout:
            return None
        keys_BT = rng.bits(7, torch.arange(self.batch * sum(self.lengths))).view(self.batch, -1)
        return DropoutSpec(keys_BT=keys_BT, name_key=rng.key("layer"), first_head=3, probability=self.dropout)

    def tensors(self) -> dict[str, Tensor]:
        """Queries, keys, values and the output's gradient of the full stream, and a table."""
        tokens = sum(self.lengths)
        generator = torch.Generator().manual_seed(tokens)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).to(self.dtype)

        return {
            "queries": random(self.batch, self.heads, tokens, self.head_dim),
            "keys": random(self.batch, self.groups, tokens, self.head_dim),
            "values": random(self.batch, self.groups, tokens, self.head_dim),
            "grad": random(self.batch, self.heads, tokens, self.head_dim),
            "table": random(NUM_BUCKETS, self.heads),
        }


def axes_of(case: Case, rank: int, new_group: NewGroup) -> ContextAxes:
    """The axes of one rank; ulysses neighbours lie next to each other."""
    outer_rank, inner_rank = divmod(rank, case.ulysses)

    def axis(name: str, own: int, ranks: Sequence[int]) -> Axis:
        return Axis(name, len(ranks), own, tuple(ranks), new_group(tuple(ranks)) if len(ranks) > 1 else None)

    return ContextAxes(
        ring=axis("ring", outer_rank, range(inner_rank, case.size, case.ulysses)),
        ulysses=axis("ulysses", inner_rank, range(outer_rank * case.ulysses, (outer_rank + 1) * case.ulysses)),
        exchange=case.exchange,
    )


def own_part(case: Case, rank: int, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rank's tokens of the tensors, with the strides that layers give them; padding holds NaN."""
    places = case.layout().places(rank)
    own = {"table": full["table"].clone()}
    for name in ("queries", "keys", "values", "grad"):
        # Where there is no token at all, something to take for padding.
        values = full[name] if case.lengths else F.pad(full[name], (0, 0, 0, 1))
        rows = values[:, :, places.clamp(min=0)]
        rows = rows.masked_fill((places == PADDING)[:, None], torch.nan)
        own[name] = rows.transpose(1, 2).contiguous().transpose(1, 2)
    return own


def results_of_rank(case: Case, axes: ContextAxes, full: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output and gradients of this rank's rows."""
    own = own_part(case, axes.rank, full)
    leaves = [own[name].requires_grad_() for name in ("queries", "keys", "values", "table")]
    table = leaves.pop()
    output = attend(
        *leaves,
        layout=case.layout(),
        axes=axes,
        mask_spec=case.mask_spec,
        scale=case.scale,
        dropout=case.dropout_spec(),
        bias=RelativePositionBias(table=table, bucket=bucket) if case.has_bias else None,
    )
    output.backward(own["grad"])
    results = {"output": output.detach()}
    for name, leaf in zip(("queries", "keys", "values"), leaves, strict=True):
        assert leaf.grad is not None
        results[name] = leaf.grad
    if case.has_bias:
        assert table.grad is not None
        results["table"] = table.grad
    return results


def joined(case: Case, of_ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the ranks have, in the order of the stream; asserts that rows of padding hold zeros."""
    layout, full = case.layout(), {}
    for name in of_ranks[0]:
        if name == "table":
            full[name] = torch.stack([own[name] for own in of_ranks]).sum(0)
            continue
        rows = torch.cat([own[name] for own in of_ranks], dim=2)
        is_padding = layout.group_places.flatten() == PADDING
        assert (rows[:, :, is_padding] == 0).all(), f"{name} of padding"
        full[name] = rows[:, :, layout.rows]
    return full


def on_threads(case: Case, full: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Output and gradients of the full stream, from ranks that are threads."""
    tensors = full or case.tensors()

    def on_rank(world: ThreadGroup) -> dict[str, Tensor]:
        return results_of_rank(case, axes_of(case, world.rank(), new_group), tensors)

    return joined(case, run_on_threads(case.size, on_rank))


def dense(case: Case, full: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The same by one softmax over all pairs of tokens, in float64."""
    tensors = {name: tensor.double().clone() for name, tensor in (full or case.tensors()).items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items() if name != "grad"}
    shared = case.heads // case.groups
    keys, values = (leaves[name].repeat_interleave(shared, 1) for name in ("keys", "values"))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    scores = leaves["queries"] @ keys.transpose(-1, -2) * scale
    positions = torch.cat([torch.arange(length) for length in case.lengths] or [torch.arange(0)])
    segments = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths, dtype=torch.int64))
    if case.has_bias:
        scores = scores + leaves["table"][bucket(positions - positions[:, None])].permute(2, 0, 1)
    seen = (segments[:, None] == segments) & case.mask_spec.is_visible(positions, positions)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    if draws := case.dropout_spec():
        heads = torch.arange(draws.first_head, draws.first_head + case.heads)
        keys_BAT = rng.bits(rng.bits(draws.name_key, draws.keys_BT)[:, None], heads[:, None])
        keep = rng.keep_mask(keys_BAT, max(case.lengths), case.dropout)[..., positions]
        weights = weights * keep / (1 - case.dropout)
    output = weights @ values
    output.backward(tensors["grad"])
    results = {"output": output.detach()}
    for name, leaf in leaves.items():
        if leaf.grad is not None and (name != "table" or case.has_bias):
            results[name] = leaf.grad
    return results


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each result, as a part of the largest wanted value or of 1."""
    assert found.keys() == wanted.keys()
    return {
        name: float((found[name].double() - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1.0))
        for name in wanted
        if wanted[name].numel()
    }
