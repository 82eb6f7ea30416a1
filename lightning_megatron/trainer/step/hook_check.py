"""Check of what a user's hooks did to gradients or weights: every rank must have done the same to the model.

A hook sees the gradients and weights that its rank holds. One that clips by their norm scales each rank's by another
factor; one that adds noise makes copies of a weight drift apart. In the first steps in which hooks change them, each is
compared with what it was before: a factor must be that of all ranks, and copies of a weight must stay alike. Pipeline
stages may have factors of their own, as long as those stay what they are.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.bucket import ModelParam
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.replica_check import bullet_list

# Number of changed steps that are compared, number of first steps that are all looked at, and interval of the looks
# after those: hooks may begin late, as a norm that comes above a bound does.
_NUM_COMPARED, _NUM_WATCHED, _EVERY = 3, 100, 20
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class _Kind:
    """What hooks may change."""

    finding: str
    listed: Callable[[Gradients], Iterator[tuple[ModelParam, Tensor, bool]]]
    """Weight, the tensor that is looked at, and whether this data-parallel rank alone has these elements."""
    read: Callable[[Tensor], Tensor | None]
    way_out: str


GRADIENTS = _Kind(
    "changed the gradients of step",
    lambda gradients: gradients.stepped(),
    lambda tensor: tensor.grad,
    "A hook sees the gradients that its rank holds, and a norm taken there is not the model's. Use "
    "Trainer(gradient_clip_val=...) or self.clip_gradients; or, of lightning_megatron, clip_grad_norm_(self, max_norm),"
    " grad_norm(self) and named_gradients(self), which are the full model's on every rank",
)
WEIGHTS = _Kind(
    "changed the weights of step",
    lambda gradients: ((param, param.parameter, False) for param in gradients.params),
    lambda tensor: tensor,
    "A hook sees the weights that its rank holds, and a norm taken there is not the model's. Use weight_norm(self) of "
    "lightning_megatron, which has the norm of each weight and of all on every rank",
)


@dataclass(frozen=True)
class _Entry:
    """A gradient or a weight that hooks may have changed."""

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
    """Compares gradients or weights before the hooks called `names` with those after them, over the ranks of a fit."""

    def __init__(self, gradients: Gradients, names: Sequence[str], kind: _Kind) -> None:
        self._gradients = gradients
        self._kind = kind
        self._names = ", ".join(names)
        self._num_compared = self._num_begun = 0
        # Factors by global rank of the first step in which stages had several.
        self._stage_factors: dict[int, float] | None = None
        # Fingerprints by tensor, from before the hooks to after them; a rank may step none.
        self._before: dict[Tensor, Tensor] | None = None

    @property
    def is_due(self) -> bool:
        """Whether what hooks do next is looked at."""
        is_watched = self._num_begun < _NUM_WATCHED or self._num_begun % _EVERY == 0
        return is_watched and self._num_compared < _NUM_COMPARED

    def begin(self) -> None:
        """Hooks come next."""
        self._before, is_due = None, self.is_due
        self._num_begun += 1
        if is_due:
            tensors = [tensor for _, tensor, _ in self._kind.listed(self._gradients)]
            # In one tensor: an allocator rounds each up, and those of weights are held through a whole step.
            prints = torch.stack([self._fingerprint(tensor) for tensor in tensors]) if tensors else ()
            self._before = dict(zip(tensors, prints, strict=True))

    @torch.no_grad()
    def end(self, step: int, stepped: Collection[Tensor] | None = None) -> None:
        """Hooks have run; of gradients those of the tensors `stepped` are about to be stepped.

        Collective over the world. Raises RuntimeError, on all ranks, where hooks did different things on different
        ranks.
        """
        if self._before is None:
            return
        mesh, entries = self._gradients.mesh, list(self._own(self._before, stepped))
        if stepped is None:
            self._before = None
        # That any rank's hooks changed something is one number, which all tell each other first.
        is_changed = torch.tensor(any(entry.is_changed for entry in entries), dtype=torch.int32)
        if not collectives.all_reduce(is_changed.to(self._gradients.device), mesh.world, "max").item():
            return
        self._num_compared += 1
        differing, factors = self._compared(entries, mesh.axis("dp+cp"), mesh.tp)
        held = {param.name: param.holders is not None for param in self._gradients.params}
        copied = {name: factor for name, factor in factors.items() if held[name]}
        own = [factor for name, factor in factors.items() if not held[name]]
        is_one = bool(own) and max(own) - min(own) <= _TOLERANCE * max(own)
        found = collectives.gather_objects((differing, copied, own[0] if is_one else None), mesh.world)
        lines = {name for names, *_ in found for name in names}
        for name in {name for _, copied, _ in found for name in copied}:
            values = [copied[name] for _, copied, _ in found if name in copied]
            if max(values) - min(values) > _TOLERANCE * max(values):
                lines.add(name)
        self._judge(sorted(lines), [factor for _, _, factor in found], step)

    def _fingerprint(self, tensor: Tensor) -> Tensor:
        return fingerprint(self._kind.read(tensor), tensor.device).to(self._gradients.device)

    def _own(self, before: dict[Tensor, Tensor], stepped: Collection[Tensor] | None) -> Iterator[_Entry]:
        """What hooks may have changed."""
        for param, tensor, is_shard in self._kind.listed(self._gradients):
            if tensor in before and (stepped is None or tensor in stepped):
                yield _Entry(param, tensor.numel(), is_shard, before[tensor], self._fingerprint(tensor))

    def _compared(self, entries: list[_Entry], dp_cp: Axis, tp: Axis) -> tuple[list[str], dict[str, float]]:
        """Names of this stage's weights to which its ranks did different things, and the factors of those that were
        scaled, or left alone."""
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
        what = f"{self._names} {self._kind.finding} {step}"
        if differing:
            raise RuntimeError(
                f"{what} differently on the ranks that hold a weight together:\n{bullet_list(differing)}\n"
                f"{self._kind.way_out}"
            )
        is_one = not known or max(known.values()) - min(known.values()) <= _TOLERANCE * max(known.values())
        if is_one:
            return
        # A factor of its own for each layer stays what it is; that of clipping follows the gradients.
        if self._stage_factors is not None and _differ(self._stage_factors, known):
            raise RuntimeError(f"{what} by another factor on each pipeline stage ({told}). {self._kind.way_out}")
        if self._stage_factors is None:
            rank_zero_warn(
                f"{what} by another factor on each pipeline stage ({told}). That is right where the hook means layers "
                f"to have factors of their own. {self._kind.way_out}",
                category=UserWarning,
            )
        self._stage_factors = known


def _differ(before: dict[int, float], after: dict[int, float]) -> bool:
    shared = before.keys() & after.keys()
    return any(abs(before[rank] - after[rank]) > _TOLERANCE * max(before[rank], after[rank]) for rank in shared)


@torch.no_grad()
def fingerprint(tensor: Tensor | None, device: torch.device) -> Tensor:
    """Norm of a tensor and two sums of its elements, each times a number of its own, float64 [3]; NaN of None."""
    if tensor is None:
        return torch.full((3,), torch.nan, dtype=torch.float64, device=device)
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    flat = values.detach().reshape(-1).to(torch.promote_types(values.dtype, torch.float32))
    # A number for each place in a row, and one of other waves for each row, so that few have to be made.
    width = max(1, math.isqrt(flat.numel()))
    rows = flat[: flat.numel() // width * width].view(-1, width)
    places, rest = _waves(width, (0.7, 1.3), flat), flat[rows.numel() :]
    sums = (_waves(len(rows), (1.1, 1.9), flat) * (rows @ places)).sum(0) + rest @ places[: len(rest)]
    return torch.cat([torch.linalg.vector_norm(flat)[None], sums]).double()


def _waves(length: int, frequencies: tuple[float, float], like: Tensor) -> Tensor:
    """Numbers of two waves, [length, 2]."""
    places = torch.arange(1, length + 1, dtype=like.dtype, device=like.device)
    return torch.cos(torch.stack([frequency * places for frequency in frequencies], dim=1))


def _factor(before: Tensor, after: Tensor) -> float:
    """The factor by which a tensor was scaled, from its fingerprints; NaN where something else was done to it."""
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
