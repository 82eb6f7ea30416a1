"""Packed attention on one device, all scores materialised in float64, and the same by kernels over a layout."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.context.attention_step import (
    AttentionGradients,
    AttentionStep,
    BackwardInputs,
    DropoutKeys,
    Kernel,
    RelativePositionBias,
    merge_,
)
from lightning_megatron.context.context_layout import PADDING, MaskSpec, cut
from lightning_megatron.context.kernel import kernel_for

HEADS, HEAD_SIZE, BUCKETS = 4, 16, 6
SCALE = 0.3


def bucket(offset: Tensor) -> Tensor:
    """A bucket of a distance; far ones share the first and the last."""
    return offset.clamp(-3, BUCKETS - 4) + 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """Segments, how they lie on groups, who sees whom, and numbers for it."""

    lengths: tuple[int, ...]
    ring: int = 1
    is_zigzag: bool = True
    mask_spec: MaskSpec = field(default_factory=lambda: MaskSpec(is_causal=True))
    groups: int = HEADS
    batch: int = 2
    probability: float = 0.0
    has_bias: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def numbers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and the gradient of the output, in the order of places; exact in bfloat16."""
        generator = torch.Generator().manual_seed(0)
        heads = (HEADS, self.groups, self.groups, HEADS)
        queries, keys, values, grad = (
            torch.randn(self.batch, num, self.num_tokens, HEAD_SIZE, generator=generator).bfloat16() for num in heads
        )
        return queries, keys, values, grad

    def table(self) -> Tensor:
        return torch.randn(BUCKETS, HEADS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def random_keys(self) -> Tensor:
        return rng.bits(7, torch.arange(self.batch * HEADS * self.num_tokens)).view(self.batch, HEADS, -1)


@dataclass(frozen=True)
class Result:
    """Results of attention over all keys, in the order of places."""

    output: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor

    def errors(self, other: "Result") -> dict[str, float]:
        """The largest difference of each from another's."""
        return {name: (x - getattr(other, name)).abs().max().item() for name, x in vars(self).items()}


def dense(case: Case) -> Result:
    """By autograd, in float64."""
    positions = torch.cat([torch.arange(length) for length in case.lengths])
    segments = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    seen = case.mask_spec.is_visible(positions, positions) & (segments[:, None] == segments)
    queries, keys, values, grad = (x.double() for x in case.numbers())
    leaves = queries, keys, values, case.table()
    for leaf in leaves:
        leaf.requires_grad_()
    keys_A, values_A = (x.repeat_interleave(HEADS // case.groups, dim=1) for x in (keys, values))
    scores = queries @ keys_A.mT * SCALE
    if case.has_bias:
        scores = scores + leaves[3][bucket(positions - positions[:, None])].permute(2, 0, 1)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    if case.probability:
        keep = rng.keep_mask(case.random_keys(), max(case.lengths), case.probability)[..., positions]
        weights = weights * keep / (1 - case.probability)
    output = weights @ values_A
    output.backward(grad)
    return Result(output.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves))


def by_kernels(case: Case, dtype: torch.dtype, kernel: Kernel | None = None, device: str = "cpu") -> Result:
    """Each group's queries to each group's keys by a kernel, or by the one that the device has; parts summed."""
    layout = cut(case.lengths, ring_size=case.ring, is_zigzag=case.is_zigzag)
    numbers = [x.to(dtype) for x in case.numbers()]
    table = case.table().to(device, torch.promote_types(dtype, torch.float32))
    total = Result(*(torch.zeros(x.shape, dtype=torch.float64) for x in (numbers[0], *numbers[:3], table)))
    for group in range(case.ring):
        places = layout.group_places[group]
        queries, grad = (_rows(x, places).to(device) for x in (numbers[0], numbers[3]))
        output = torch.zeros(queries.shape, dtype=table.dtype, device=device)
        lse = torch.full(queries.shape[:-1], -torch.inf, dtype=table.dtype, device=device)
        random_keys = case.random_keys()[..., places.clamp(min=0)].to(device)
        dropout_keys = DropoutKeys(keys=random_keys, probability=case.probability)
        steps = []
        for source in range(case.ring):
            step = AttentionStep(
                blocks=layout.blocks(group, source, case.mask_spec),
                query_positions=layout.group_positions[group].to(device),
                key_positions=layout.group_positions[source].to(device),
                mask_spec=case.mask_spec,
                scale=SCALE,
                dropout_keys=dropout_keys if case.probability else None,
                bias=RelativePositionBias(table=table, bucket=bucket) if case.has_bias else None,
            )
            steps.append(step)
            keys, values = (_rows(x, layout.group_places[source]).to(device) for x in numbers[1:3])
            chosen = kernel or kernel_for(queries, step)
            merge_(output, lse, *chosen.forward(queries, keys, values, step))
        _add(total.output, output, places)
        for source, step in enumerate(steps):
            source_places = layout.group_places[source]
            keys, values = (_rows(x, source_places).to(device) for x in numbers[1:3])
            chosen = kernel or kernel_for(queries, step)
            parts: AttentionGradients = chosen.backward(BackwardInputs(grad, queries, keys, values, output, lse), step)
            _add(total.queries, parts.queries, places)
            _add(total.keys, parts.keys, source_places)
            _add(total.values, parts.values, source_places)
            if parts.table is not None:
                total.table.add_(parts.table.cpu())
    return total


def _rows(x: Tensor, places: Tensor) -> Tensor:
    """Rows of a group; those that hold no token hold what would be noticed."""
    rows = x[:, :, places.clamp(min=0)].clone()
    rows[:, :, places == PADDING] = 100.0
    return rows


def _add(total: Tensor, part: Tensor, places: Tensor) -> None:
    assert part.dtype in (torch.float32, torch.float64)
    part = part.cpu()
    is_token = places != PADDING
    # Padding has no part in anything.
    assert not part[:, :, ~is_token].any()
    total.index_add_(2, places[is_token], part[:, :, is_token].double())
