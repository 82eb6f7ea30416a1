"""Check of what a user's hooks did to the gradients: every rank must have done the same to the model.

A hook sees the gradients that its rank holds. One that clips by their norm scales each rank's by another factor; one
that adds noise makes copies of a weight drift apart. In the first steps in which hooks change gradients, each is
compared with what it was before: a factor must be that of all ranks, and copies of a weight must have one gradient.
Pipeline stages may have factors of their own, as long as those stay what they are.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.bucket import ModelParam
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.replica_check import bullet_list

# Steps with gradients that hooks have changed which are compared, and steps in which such changes are looked for.
_NUM_COMPARED, _NUM_WATCHED = 3, 100
_TOLERANCE = 1e-3
_WAY_OUT = (
    "A hook sees the gradients that its rank holds, and a norm taken there is not the model's. Use "
    "Trainer(gradient_clip_val=...) or self.clip_gradients; or, of lightning_megatron, clip_grad_norm_(self, max_norm),"
    " grad_norm(self) and named_gradients(self), which are the full model's on every rank"
)


@dataclass(frozen=True)
class _Entry:
    """A gradient that is about to be stepped."""

    param: ModelParam
    size: int
    """Elements of it on this rank."""
    is_shard: bool
    before: Tensor
    """Fingerprint before the hooks."""
    after: Tensor

    @property
    def is_changed(self) -> bool:
        """Whether hooks changed it."""
        return not torch.equal(self.before.nan_to_num(), self.after.nan_to_num())

    @property
    def factor(self) -> float:
        """The factor by which it was scaled; NaN where something else was done to it, or one element tells nothing."""
        return _factor(self.before, self.after) if self.size > 1 else torch.nan


class HookCheck:
    """Compares the gradients before the hooks called `names` with those after them, over the ranks of a fit."""

    def __init__(self, gradients: Gradients, names: Sequence[str]) -> None:
        self._gradients = gradients
        self._names = ", ".join(names)
        self._num_compared = self._num_watched = 0
        # Factors by global rank of the first step in which stages had several.
        self._stage_factors: dict[int, float] | None = None
        # Fingerprints of gradients by stepped tensor, from the reduction to the end of the hooks; a rank may step none.
        self._before: dict[Tensor, Tensor] | None = None

    def begin(self) -> None:
        """Gradients were reduced, and hooks come next."""
        if self._num_compared < _NUM_COMPARED and self._num_watched < _NUM_WATCHED:
            self._before = {tensor: _fingerprint(tensor) for _, tensor, _ in self._gradients.stepped()}
        else:
            self._before = None

    @torch.no_grad()
    def end(self, stepped: Collection[Tensor], step: int) -> None:
        """The optimizer of the tensors `stepped` is about to step. Collective over the world.

        Raises RuntimeError, on all ranks, where hooks did different things on different ranks.
        """
        if self._before is None:
            return
        mesh, entries = self._gradients.mesh, list(self._own(stepped))
        differing, factors = self._compared(entries, mesh.axis("dp+cp"), mesh.tp)
        is_changed = any(entry.is_changed for entry in entries)
        held = {param.name: param.holders is not None for param in self._gradients.params}
        copied = {name: factor for name, factor in factors.items() if held[name]}
        own = [factor for name, factor in factors.items() if not held[name]]
        is_one = bool(own) and max(own) - min(own) <= _TOLERANCE * max(own)
        found = collectives.gather_objects((differing, copied, own[0] if is_one else None, is_changed), mesh.world)
        self._num_watched += 1
        self._num_compared += any(is_changed for *_, is_changed in found)
        lines = {name for names, *_ in found for name in names}
        for name in {name for _, copied, *_ in found for name in copied}:
            values = [copied[name] for _, copied, *_ in found if name in copied]
            if max(values) - min(values) > _TOLERANCE * max(values):
                lines.add(name)
        self._judge(sorted(lines), [factor for _, _, factor, _ in found], step)

    def _own(self, stepped: Collection[Tensor]) -> Iterator[_Entry]:
        """Each gradient that is about to be stepped."""
        known = self._before or {}
        for param, tensor, is_shard in self._gradients.stepped():
            if tensor in known and tensor in stepped:
                yield _Entry(param, tensor.numel(), is_shard, known[tensor], _fingerprint(tensor))

    def _compared(self, entries: list[_Entry], dp_cp: Axis, tp: Axis) -> tuple[list[str], dict[str, float]]:
        """Names of this stage's weights to which its ranks did different things, and the factors of the gradients that
        were scaled, or left alone."""
        # The same weights in the same order on all ranks of a stage, whichever of them they step.
        names = sorted(param.name for param in self._gradients.params)
        rows = {name: i for i, name in enumerate(names)}
        nothing = torch.full((len(names), 7), torch.nan, dtype=torch.float64, device=self._gradients.device)
        tables = {dp_cp: nothing, tp: nothing.clone()}
        for entry in entries:
            param = entry.param
            is_copied = {
                dp_cp: not entry.is_shard and param.replicas.ranks == dp_cp.ranks,
                tp: tp.ranks in [axis.ranks for axis in param.shard.replicas],
            }
            for axis, table in tables.items():
                table[rows[param.name], 0] = entry.factor
                if is_copied[axis]:
                    table[rows[param.name], 1:] = torch.cat([entry.before, entry.after])
        differing: set[str] = set()
        factors = torch.full_like(nothing[:, 0], -torch.inf)
        for axis, table in tables.items():
            low, high = _range_over(table, axis)
            norms = high[:, [1, 4]].repeat_interleave(3, dim=1)
            is_off = high - low > _TOLERANCE * torch.cat([high[:, :1].abs(), norms], dim=1)
            # Copies that differed before the hooks are none of theirs.
            by_hooks = is_off[:, 0] | (is_off[:, 4:].any(1) & ~is_off[:, 1:4].any(1))
            differing |= {names[i] for i in by_hooks.nonzero().flatten().tolist()}
            factors = torch.maximum(factors, high[:, 0])
        known = zip(names, factors.tolist(), strict=True)
        return sorted(differing), {name: factor for name, factor in known if math.isfinite(factor)}

    def _judge(self, differing: list[str], factors: list[float | None], step: int) -> None:
        known = {rank: factor for rank, factor in enumerate(factors) if factor is not None}
        told = ", ".join(f"rank {rank}: {factor:.4g}" for rank, factor in known.items())
        what = f"{self._names} changed the gradients of step {step}"
        if differing:
            raise RuntimeError(
                f"{what} differently on the ranks that hold a weight together:\n{bullet_list(differing)}\n{_WAY_OUT}"
            )
        is_one = not known or max(known.values()) - min(known.values()) <= _TOLERANCE * max(known.values())
        if is_one:
            return
        # A factor of its own for each layer stays what it is; that of clipping follows the gradients.
        if self._stage_factors is not None and _differ(self._stage_factors, known):
            raise RuntimeError(f"{what} by another factor on each pipeline stage ({told}). {_WAY_OUT}")
        if self._stage_factors is None:
            rank_zero_warn(
                f"{what} by another factor on each pipeline stage ({told}). That is right where the hook means layers "
                f"to have factors of their own. {_WAY_OUT}",
                category=UserWarning,
            )
        self._stage_factors = known


def _differ(before: dict[int, float], after: dict[int, float]) -> bool:
    shared = before.keys() & after.keys()
    return any(abs(before[rank] - after[rank]) > _TOLERANCE * max(before[rank], after[rank]) for rank in shared)


def _fingerprint(tensor: Tensor) -> Tensor:
    """Norm of a tensor's gradient and two sums of its elements, each times a number of its own, float64 [3]; NaN
    without a gradient."""
    gradient = tensor.grad
    if gradient is None:
        return torch.full((3,), torch.nan, dtype=torch.float64, device=tensor.device)
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    flat = values.detach().reshape(-1).to(torch.promote_types(values.dtype, torch.float32))
    angles = torch.arange(1, flat.numel() + 1, dtype=flat.dtype, device=flat.device)
    sums = [torch.linalg.vector_norm(flat), flat @ torch.cos(0.7 * angles), flat @ torch.cos(1.3 * angles)]
    return torch.stack(sums).double()


def _factor(before: Tensor, after: Tensor) -> float:
    """The factor by which a gradient was scaled, from its fingerprints; NaN where something else was done to it."""
    if before.isnan().any() or before[0] == 0:
        return torch.nan
    if after.isnan().any():
        # It was dropped.
        return 0.0
    factor = after[0] / before[0]
    is_scaled = ((after - factor * before).abs() <= _TOLERANCE * after[0]).all()
    return float(factor) if is_scaled else torch.nan


def _range_over(values: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each value over the ranks of an axis; NaN counts on none, and is infinite without any."""
    is_known = ~values.isnan()
    low = torch.where(is_known, values, torch.inf)
    high = torch.where(is_known, values, -torch.inf)
    return collectives.all_reduce(low, axis, "min"), collectives.all_reduce(high, axis, "max")
