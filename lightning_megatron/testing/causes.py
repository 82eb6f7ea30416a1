"""The likely cause of what differs first, and the mend.

The evidence is what differs first in the order of a step, whether the layout divides rows or weights, the factor
between the two values, whether ranks with copies of one tensor agree, and what one device says of halves of the batch:

    both halves add up to the whole                     a sum over rows
    the whole lies between the halves, not midway       a mean over something else than rows
    the whole lies elsewhere                            rows are coupled
"""

import math
from collections.abc import Sequence

from lightning_megatron.testing.layout_name import Layout
from lightning_megatron.testing.outcome import Difference
from lightning_megatron.testing.quantities import (
    BATCH,
    BUFFERS,
    CALLBACK,
    CLIPPED,
    GRADIENT,
    INITIAL,
    LOGGED,
    LOSS,
    NORM,
    VALIDATION,
    WEIGHTS,
    Deviation,
)
from lightning_megatron.testing.run import Facts

_MOST_NAMES = 3
# Of the halves of a batch: how much a rule about them may be off.
_SAME = 1e-6


class Evidence:
    """What is known about a difference of one layout."""

    def __init__(
        self,
        first: Deviation,
        layout: Layout,
        facts: Facts,
        deviations: Sequence[Deviation],
        tolerance: float,
        *,
        is_right_by_rows: bool,
    ) -> None:
        self.first, self.layout, self.facts = first, layout, facts
        self.is_right_by_rows = is_right_by_rows
        self.alike = [one for one in deviations if (one.quantity, one.step) == (first.quantity, first.step)]
        self.differing = [one for one in self.alike if one.relative > tolerance]
        moved = [one for one in deviations if one.quantity == BUFFERS and one.relative > tolerance]
        # Buffers that are others by the end of the step.
        self.moved_buffers = sorted({one.name for one in moved if one.step <= first.step})

    @property
    def names(self) -> str:
        """Some of the names that differ."""
        names = list(dict.fromkeys(one.name for one in self.differing))
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return ", ".join(names[:_MOST_NAMES]) + more

    @property
    def differs_in_all(self) -> bool:
        """Whether every name of the quantity differs somewhere."""
        return {one.name for one in self.differing} == {one.name for one in self.alike}

    @property
    def factor(self) -> float | None:
        """The one factor of everything that differs."""
        factors = [one.factor for one in self.differing]
        if not factors or any(factor is None for factor in factors):
            return None
        middle = factors[0]
        assert middle is not None
        return middle if all(_near(factor, middle, 1e-4) for factor in factors if factor is not None) else None

    @property
    def has_different_copies(self) -> bool:
        """Whether ranks that hold the same part of a tensor, or the same number, differ from each other."""
        seen: dict[tuple[object, ...], tuple[int, float]] = {}
        for one in self.alike:
            value = one.digest, one.ours
            other = seen.setdefault((one.name, one.box), value)
            if other[0] != value[0] or not _near(other[1], value[1], 1e-6):
                return True
        return False

    @property
    def differs_on_some_ranks(self) -> bool:
        """Whether other ranks are right."""
        return {one.rank for one in self.differing} < {one.rank for one in self.alike}

    @property
    def may_be_rows(self) -> bool:
        """Whether the cause may be that the rows of a batch are divided."""
        return self.layout.num_parts > 1 and not self.is_right_by_rows

    @property
    def divides_weights(self) -> bool:
        return self.layout.tp > 1 or self.layout.pp > 1 or self.layout.ep > 1

    @property
    def counts(self) -> str:
        """The parts of a batch, in words."""
        layout = self.layout
        said = [f"{layout.microbatches} microbatches"] * (layout.microbatches > 1)
        said += [f"{layout.dp} data-parallel ranks"] * (layout.dp > 1)
        return " x ".join(said)

    def halves(self, quantity: str, name: str, whole: float) -> str:
        """What the halves of a batch say of a number: `mean`, `sum`, `own mean`, `coupled`, or nothing."""
        return kind_of(self.facts.halves.get((quantity, name)), whole)


def kind_of(halves: tuple[float, float] | None, whole: float) -> str:
    """What a number is over the rows of a batch, by its value for either half alone."""
    if halves is None or not all(map(math.isfinite, (*halves, whole))):
        return ""
    first, second = halves
    scale = max(abs(first), abs(second), abs(whole))
    if _near(whole, (first + second) / 2, _SAME, scale):
        return "mean"
    if _near(whole, first + second, _SAME, scale):
        return "sum"
    margin = _SAME * scale
    return "own mean" if min(halves) - margin <= whole <= max(halves) + margin else "coupled"


def _near(a: float, b: float, relative: float, scale: float = 0.0) -> bool:
    return (math.isnan(a) and math.isnan(b)) or abs(a - b) <= relative * (scale or max(abs(a), abs(b), 1e-30))


def explained(
    first: Deviation,
    layout: Layout,
    facts: Facts,
    deviations: Sequence[Deviation],
    tolerance: float,
    *,
    is_right_by_rows: bool = False,
) -> Difference:
    """The difference with its likely cause. `is_right_by_rows`: the quantity is equal on a layout that divides nothing
    but the rows of a batch."""
    evidence = Evidence(first, layout, facts, deviations, tolerance, is_right_by_rows=is_right_by_rows)
    cause, mend = _CAUSES[first.quantity](evidence)
    return Difference(deviation=first, cause=cause, mend=mend)


Found = tuple[str, str]
"""Cause and mend."""

_RANDOM = (
    "the step draws random numbers, which ranks and microbatches draw differently",
    "turn what is random off for the certificate, or draw it from a generator that is seeded by the sample",
)


def _initial(of: Evidence) -> Found:
    return (
        f"{of.names} begin with other values: they are drawn from the default generator, and a rank that builds only "
        "its own parts has drawn other numbers before; the rest of this row starts from one device's",
        "give each part a generator with a seed of its own, or initialise by lightning_megatron.transformer.init's "
        "`initialise`, which draws by name",
    )


def _batch(of: Evidence) -> Found:
    if of.facts.is_random:
        return "a hook changes batches at random (on_after_batch_transfer, collate)", _RANDOM[1]
    return (
        "what reaches training_step is another batch: a hook around the transfer looks at all of its rows, or at the "
        "rank",
        "transform rows one by one, in the data set or in the hooks",
    )


def _loss(of: Evidence) -> Found:
    theirs, parts, kind = of.first.theirs, of.layout.num_parts, ""
    if of.facts.is_random:
        return _RANDOM
    if of.moved_buffers and not of.facts.batch_norms:
        return _moved(of, ", ".join(of.moved_buffers[:_MOST_NAMES]))
    if of.may_be_rows:
        kind = of.halves(LOSS, "loss", theirs) if of.first.step == 1 else ""
        if (kind in ("coupled", "own mean", "")) and of.facts.batch_norms:
            return _batch_norm(of)
        if kind == "sum" or (of.factor is not None and parts > 1 and _near(of.factor, 1 / parts, 1e-6)):
            return (
                f"the loss is a sum over rows, and a step takes the mean over {of.counts}: a factor of 1/{parts}",
                'say that it is a sum: return {"loss": loss, "loss_reduction": "sum"}; or return a mean',
            )
        if kind == "own mean":
            return (
                f"the loss is a mean over something else than rows (a mask, classes with weights), and {of.counts} "
                "have differently much of it: a mean of means; or it is of statistics of its rows",
                'return {"loss": loss, "loss_weight": number} with what the mean is over (the sum of the mask or '
                "of the weights); no number mends statistics of a part of the rows, which takes one part",
            )
        if kind == "coupled":
            return (
                f"rows of the batch are coupled (in-batch negatives, statistics of the batch), and each of {of.counts} "
                "sees its own rows alone",
                "num_microbatches=1 and no data-parallel ranks for such a step, or gather what couples rows "
                "(self.all_gather with sync_grads=True over data-parallel ranks)",
            )
    # A mean over rows is the same however rows are divided.
    if of.divides_weights and (not of.may_be_rows or kind == "mean" or of.has_different_copies):
        where = "pipeline stage" if of.layout.pp > 1 else "tensor-parallel rank"
        return (
            f"the loss has a term over self.parameters() or something else that a {where} has only a part of"
            + ("; ranks return different losses" if of.has_different_copies else ""),
            "use the optimizer's weight_decay for a penalty of weights; a term of the loss may use what the model "
            "returns alone",
        )
    return _unknown(of)


def _batch_norm(of: Evidence) -> Found:
    names = ", ".join(of.facts.batch_norms[:_MOST_NAMES])
    return (
        f"batch norm ({names}) takes its statistics from each of {of.counts or 'the rows that it sees'} alone, and "
        "moves its buffers as often",
        "use GroupNorm or LayerNorm; or one microbatch, with Trainer(sync_batchnorm=True) for data-parallel ranks",
    )


def _logged(of: Evidence) -> Found:
    name, theirs, parts = of.first.name, of.first.theirs, of.layout.num_parts
    if math.isnan(of.first.ours) or math.isnan(theirs):
        return (
            f"{name!r} is logged {'on one device' if math.isnan(of.first.ours) else 'under the layout'} alone: by a "
            "branch on the rank, the batch or the stage",
            "log the same names in every step, on every rank",
        )
    if of.facts.is_random:
        return _RANDOM
    if of.divides_weights and of.has_different_copies:
        return _of_a_part(of)
    kind = of.halves(of.first.quantity, name, theirs) if of.first.step == 1 and of.may_be_rows else ""
    # In a later step a factor may come by chance.
    is_factor = of.first.step == 1 and of.factor is not None and _near(of.factor, 1 / parts, 1e-6)
    if of.may_be_rows and (kind == "sum" or is_factor):
        return (
            f"{name!r} is a sum or a count, and the mean over {of.counts} was logged: a factor of 1/{parts}",
            f'self.log({name!r}, value, reduce_fx="sum")',
        )
    if kind == "own mean":
        return (
            f"{name!r} is a mean over something else than rows, and the mean over {of.counts} was logged: a mean of "
            "means",
            f"self.log({name!r}, value, batch_size=number) with what it is a mean over, or log a torchmetrics.Metric",
        )
    if kind == "coupled":
        return (
            f"{name!r} is no mean of values of single rows, and is made for each of {of.counts} alone",
            "log a torchmetrics.Metric, which is updated with rows and computed at the end",
        )
    if not of.divides_weights:
        return (
            f"{name!r} is of the rows of one rank (logged in a hook, or of a list that steps fill), or no mean of "
            "values of single rows (a root of a mean, a mean over a mask, a score)",
            "log a torchmetrics.Metric; or self.log(..., batch_size=number) with what it is a mean over, and in a hook "
            "of an epoch self.log(..., sync_dist=True)",
        )
    return _of_a_part(of)


def _of_a_part(of: Evidence) -> Found:
    return (
        f"{of.first.name!r} is read off gradients or weights, of which a rank has only a part"
        + (", and ranks log different values" if of.has_different_copies else ""),
        "use grad_norm(self), weight_norm(self) and named_gradients(self) of lightning_megatron, which are the full "
        "model's on every rank",
    )


def _gradient(of: Evidence) -> Found:
    if of.facts.is_random:
        return _RANDOM
    factor = of.factor
    if factor is not None and of.differs_in_all:
        candidates = {
            "num_microbatches": of.layout.microbatches,
            "the data-parallel size": of.layout.dp,
            "the tensor-parallel size": of.layout.tp,
            "the context-parallel size": of.layout.cp,
            "the parts of the batch": of.layout.num_parts,
        }
        for what, size in candidates.items():
            if size > 1 and (_near(factor, size, 1e-4) or _near(factor, 1 / size, 1e-4)):
                return (
                    f"every gradient is multiplied by {factor:.4g}: a factor of {what}",
                    "divide nothing by the number of ranks or microbatches: the step's loss is averaged over them",
                )
        return (
            f"every gradient is multiplied by {factor:.4g}: a hook scales them (on_after_backward, backward), or "
            "clips them by what one rank has",
            "let the Trainer clip (gradient_clip_val)",
        )
    if of.has_different_copies:
        return _drifting(of, "gradients")
    if of.facts.batch_norms:
        return _batch_norm(of)
    return (
        f"the gradient of {of.names} alone is another one: a hook on it, a custom backward, or a use of the weight "
        "outside of the model",
        "use weights through the model's forward alone, and change gradients in on_before_optimizer_step on all ranks "
        "alike",
    )


def _norm(of: Evidence) -> Found:
    return (
        "the gradients are equal and their norm is not: a weight is counted twice, or not at all",
        "if the module holds a layer of your own with shards, its Shard must name the axes of its copies (replicas)",
    )


def _clipped(of: Evidence) -> Found:
    by_rank = {one.rank: one.factor for one in of.alike if one.factor is not None}
    factors = sorted({round(factor, 6) for factor in by_rank.values()})
    numbers = f" (by {', '.join(f'{factor:.4g}' for factor in factors[:4])})" if factors else ""
    return (
        f"a hook or configure_gradient_clipping changed gradients by something that a rank has a part of{numbers}: "
        "the norm of its own gradients is not the model's",
        "clip by Trainer(gradient_clip_val=...), self.clip_gradients(...) or clip_grad_norm_(self, max_norm) of "
        "lightning_megatron, which take the norm of the full model",
    )


def _buffers(of: Evidence) -> Found:
    if of.facts.batch_norms and any(of.first.name.startswith(f"{name}.") for name in of.facts.batch_norms):
        return _batch_norm(of)
    return _moved(of, of.names)


def _moved(of: Evidence, names: str) -> Found:
    per = f"moves once for each of {of.counts}" if of.may_be_rows else "moves on some ranks alone"
    return (
        f"{names}: a buffer that is changed in forward or training_step {per}, where one device moves it once a batch",
        "change it in on_train_batch_end or on_before_optimizer_step, from values of the whole batch",
    )


def _weights(of: Evidence) -> Found:
    if of.has_different_copies or of.differs_on_some_ranks:
        return _drifting(of, "weights")
    if of.layout.tp > 1 or of.layout.optimizer != "replicated":
        return (
            f"the gradients are equal and {of.names} moved otherwise: the optimizer looks at more than single numbers "
            "(norms of matrices), and a rank has a part of them; or a rate goes by trainer.world_size",
            "use an optimizer that treats each number by itself, as SGD or AdamW do, and a rate that counts replicas "
            "only",
        )
    return (
        f"the gradients are equal and {of.names} moved otherwise: optimizer_step, a scheduler or a hook does something "
        "else than on one device, or a rate goes by trainer.world_size",
        "call super().optimizer_step(...), or optimizer.step(closure=optimizer_closure); count replicas only",
    )


def _drifting(of: Evidence, what: str) -> Found:
    return (
        f"ranks drift apart: a hook or a callback changes the {what} of {of.names} by something that ranks do not "
        "share, or on some of them alone",
        "change gradients and weights by values that all ranks have: reduce them first (self.trainer.strategy.reduce)",
    )


def _unknown(of: Evidence) -> Found:
    return (
        f"not known: {of.names} is not what one device has; a step that counts its calls, or keeps something from one "
        "to the next, is entered once for each microbatch and stage",
        "leave parts out of the module until it is equal; what was left out last is the cause",
    )


_CAUSES = {
    INITIAL: _initial,
    BATCH: _batch,
    LOSS: _loss,
    LOGGED: _logged,
    GRADIENT: _gradient,
    NORM: _norm,
    CLIPPED: _clipped,
    BUFFERS: _buffers,
    WEIGHTS: _weights,
    VALIDATION: _logged,
    CALLBACK: _logged,
}
