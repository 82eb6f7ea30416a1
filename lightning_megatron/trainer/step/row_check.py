"""Look, at the start of a fit, at whether the rows of a batch depend on each other in the user's step.

A loss that is made of rows one by one, as a sum or as a mean over what they have, is as large over two batches (a, b)
and (b, a) of two halves as over (a, a) and (b, b). In-batch negatives, statistics of the batch or a root of a mean are
not; and they are others where a batch is cut into microbatches and over data-parallel ranks. The step runs on these
four after the first step of a fit, with the same random numbers, in evaluation, without gradients; of what it leaves
in the module, the metrics and the loggers nothing stays.
"""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_megatron.any_module.deviation import coarsest
from lightning_megatron.any_module.loss_count import CountedMeans
from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Mesh
from lightning_megatron.pipeline.microbatches import arranged
from lightning_megatron.pipeline.module import Driver
from lightning_megatron.trainer.step.first_steps import NUM_CHECKED
from lightning_megatron.trainer.step.microbatches import Cutting, rows_of
from lightning_megatron.trainer.step.rng_sync import aligned_random
from lightning_megatron.trainer.step.step_checks import BufferWatch
from lightning_megatron.trainer.step.step_log import StepLog, full_state, restore
from lightning_megatron.trainer.step.user_step import Context, UserStep, loss_of, loss_reduction_of

# By how much sums over the same rows may differ, relative to the largest.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_IN_16_BITS = 1e-2
_CONTAINERS = (list, dict, set, deque, Counter, OrderedDict, defaultdict)


@dataclass(frozen=True)
class Look:
    """What a rank found of the user's step."""

    couples: bool = False
    """Whether its loss is not made of rows one by one."""
    couples_in_model: bool = False
    """Whether its loss is another one where the calls of the model are cut into microbatches."""
    talks: bool = False
    """Whether its loss changes with the rows of another data-parallel rank: the step joins them itself."""


@dataclass(kw_only=True, eq=False)
class RowCheck:
    """Warns, once a fit, of a step whose rows depend on each other, where a global batch runs in several parts."""

    user_step: UserStep
    mesh: Mesh
    device: torch.device
    log: StepLog
    cutting: Cutting
    buffer_watch: BufferWatch
    is_scheduled: bool
    """Whether the step is entered once for each microbatch, and not once for all."""
    whole_call: Driver
    """Runs the model on all rows of a call at once."""
    cut_call: Driver
    """Runs it as steps outside of a schedule do."""
    num_tried: int = 0

    def kept(self, args: tuple[Any, ...]) -> Any:
        """A copy of as many rows as the step sees at once, and two at least; None where nothing is to be looked at."""
        if self.num_tried >= NUM_CHECKED or not args:
            return None
        rows = rows_of(args[0])
        count = self.cutting.count_of(rows)
        if self.mesh.dp.size * count == 1:
            return None
        num_seen = max(2, -(-rows // count)) if self.is_scheduled else rows
        try:
            return arranged(args[0], range(min(rows, num_seen)))
        except (ValueError, IndexError, TypeError):
            # It has no rows, or none that are known; the step itself says so where it needs them.
            return ()

    def look(self, kept: Any, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Looks at the step on the rows that were `kept`. Collective over the world."""
        self.num_tried += 1
        # One data-parallel rank changes its rows, and the others tell by theirs whether the step talks over ranks.
        is_able = rows_of(kept) > 1 or not self.mesh.dp.is_first
        # A state that the step moves would have to be moved back; and who confirms the rows knows what they are.
        is_able &= not self.buffer_watch.has_found and not self.user_step.has_confirmed_rows
        if not all(collectives.gather_objects(is_able, self.mesh.world)):
            return
        self.num_tried = NUM_CHECKED
        try:
            with _leaving_no_trace(self.user_step.module, self.log), torch.no_grad():
                found = self._look(kept, context, args, kwargs)
        except Exception:
            # A step that needs gradients, or its own batch, cannot be looked at; what is wrong with it would have
            # ended the step before.
            found = Look()
        self.user_step.drive(self.cut_call)
        # Code behind the model's call is that of a schedule's last stage.
        looks = collectives.gather_objects(found if self.mesh.pp.is_last else Look(), self.mesh.world)
        self._tell(looks)

    def _look(self, kept: Any, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Look:
        rows = rows_of(kept)
        half = rows // 2
        first, second, rest = range(half), range(half, 2 * half), range(2 * half, rows)
        own = [*range(rows)]
        swapped = [own, [*second, *first, *rest], [*first, *first, *rest], [*second, *second, *rest]]
        sums: list[float] = []
        means: list[float] = []
        is_known, tolerance = True, 0.0
        for places in swapped if self.mesh.dp.is_first else [own] * len(swapped):
            output = self._enter(arranged(kept, places), self.whole_call, context, args, kwargs)
            loss, is_sum = loss_of(output), loss_reduction_of(output) == "sum"
            if loss is None:
                return Look()
            weight = self.user_step.known_weight(output, self.device)
            is_known &= is_sum or weight is not None
            means.append(float(loss))
            sums.append(means[-1] if is_sum else _times(means[-1], float(rows if weight is None else weight)))
            tolerance = _TOLERANCES.get(self._coarsest(loss, context), _IN_16_BITS)
        margin = tolerance * max(map(abs, sums))
        if not all(map(math.isfinite, sums)):
            return Look()
        if not self.mesh.dp.is_first:
            return Look(talks=max(sums) - min(sums) > margin)
        # A mean over something that nobody says lies between those of the halves, and has been told.
        is_told = not is_known and min(means[2:]) <= means[0] <= max(means[2:])
        # Outside of a schedule the step of one data-parallel rank has all rows.
        is_cut = self.is_scheduled or self.mesh.dp.size > 1
        return Look(
            couples=is_cut and not is_told and abs(sums[0] + sums[1] - sums[2] - sums[3]) > margin,
            couples_in_model=self._couples_in_model(kept, means[0], margin / rows, context, args, kwargs),
        )

    def _couples_in_model(
        self, kept: Any, whole: float, margin: float, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether the model computes another loss where its call is cut as this run cuts it."""
        if self.is_scheduled or self.mesh.pp.size == 1 or self.mesh.dp.size > 1:
            return False
        loss = loss_of(self._enter(arranged(kept, range(rows_of(kept))), self.cut_call, context, args, kwargs))
        return loss is not None and abs(float(loss) - whole) > max(margin, 1e-12)

    def _enter(
        self, batch: Any, driver: Driver, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.user_step.begin_batch((batch,), driver)
        # The same numbers for a row's place, whatever stands there.
        with aligned_random("rows", torch.initial_seed()), context(), CountedMeans():
            return self.user_step.module.training_step(batch, *args[1:], **kwargs)

    def _coarsest(self, loss: Tensor, context: Context) -> torch.dtype:
        with context():
            dtypes = {coarsest(loss), *(parameter.dtype for parameter in self.user_step.module.parameters())}
        return max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps)

    def _tell(self, looks: Sequence[Look]) -> None:
        name = type(self.user_step.module).__name__
        if any(look.couples for look in looks) and not any(look.talks for look in looks):
            rank_zero_warn(
                f"the loss of {name}.training_step is not made of its rows one by one: it compares them (in-batch "
                "negatives), takes statistics of them, or is a root or a quotient of means. Each microbatch of each "
                "data-parallel rank is computed by itself, where one device would compute all rows together. Use "
                "num_microbatches=1, and one data-parallel rank or self.all_gather(rows, sync_grads=True) over them; "
                'return {"loss": loss, "loss_reduction": "mean"} where each part may stand for itself',
                category=UserWarning,
            )
        if any(look.couples_in_model for look in looks):
            rank_zero_warn(
                f"the model of {name} computes rows of a batch together, and its calls are cut into microbatches: one "
                "device would compute all rows in one call. Use num_microbatches=1",
                category=UserWarning,
            )


def _times(mean: float, weight: float) -> float:
    # A mean over nothing is no number, and adds nothing.
    return mean * weight if weight else 0.0


@contextmanager
def _leaving_no_trace(module: pl.LightningModule, log: StepLog) -> Iterator[None]:
    """Has what runs inside the block leave the module, its metrics and its loggers as they were, in evaluation."""
    trainer, loggers = module.trainer, module.trainer.loggers
    with ExitStack() as stack:
        stack.callback(setattr, trainer, "loggers", loggers)
        trainer.loggers = [DummyLogger() for _ in loggers]
        for child in module.modules():
            if isinstance(child, Metric):
                # Put back last: its attributes are tensors to which a step may add in place.
                stack.callback(restore, child, full_state(child))
            stack.callback(_put_back, child, vars(child).copy(), _contents(child))
        for child in module.modules():
            # Not by `eval()`, which a module may override.
            child.training = False
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(log.recording())
        yield


def _contents(module: nn.Module) -> dict[str, Any]:
    return {name: copy(value) for name, value in vars(module).items() if type(value) in _CONTAINERS}


def _put_back(module: nn.Module, attributes: dict[str, Any], contents: dict[str, Any]) -> None:
    for name in vars(module).keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)
    for name, content in contents.items():
        value = attributes[name]
        value.clear()
        value.extend(content) if isinstance(value, (list, deque)) else value.update(content)
