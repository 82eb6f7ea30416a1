"""Entry to the user's step: it prepares the models for a batch, aligns random numbers, and reads loss and weight.

Every mode enters the step by `UserStep`: a schedule once per microbatch on every stage, the others once per batch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_megatron.any_module.cut_model import CutModel
from lightning_megatron.any_module.loss_count import counts_other_than_rows, is_returned, mean_count
from lightning_megatron.mesh import Mesh
from lightning_megatron.pipeline.module import Driver, PipelineModule
from lightning_megatron.trainer.step.batch_metrics import full_state, restore
from lightning_megatron.trainer.step.global_batches import BatchShare
from lightning_megatron.trainer.step.loader_sync import LoaderSync, Whereabouts
from lightning_megatron.trainer.step.microbatches import StepBatch, rows_of
from lightning_megatron.trainer.step.rng_sync import aligned_random, seed_random

OWN_KEYS = ("loss", "loss_weight", "loss_reduction")
"""Keys of a step's output that have a meaning here."""

Context = Callable[[], AbstractContextManager[Any]]


# Losses of manual optimization that are looked at, which waits for the device: those of the first steps.
_NUM_ASKED = 8


@dataclass(eq=False)
class UserStep:
    """The steps of a user's module, and the pipelined models that they call."""

    trainer: pl.Trainer
    module: pl.LightningModule
    models: list[PipelineModule]
    mesh: Mesh
    loaders: LoaderSync | None = None
    """What data-parallel ranks know of each other's batches; None where there is one."""
    num_evaluated: int = 0
    """Batches of validation, test and prediction since the last of training; the loops' own counters stand still."""
    _has_told_of_rows: bool = False
    _num_asked: int = 0

    @property
    def share(self) -> BatchShare | None:
        """This rank's part of the global batch; None where the loader gives each rank a batch of its own."""
        return None if self.loaders is None else self.loaders.share

    @property
    def num_copies(self) -> float:
        """Ranks that run the batch together, among which it counts once; infinite where it counts for nothing."""
        is_copy = self.share is not None and self.share.is_copy
        return math.inf if is_copy else self.mesh.cp.size

    @property
    def whereabouts(self) -> Whereabouts:
        """Where this rank is in its data, which all data-parallel ranks of a step must have in common."""
        return {} if self.loaders is None else self.loaders.whereabouts(self.trainer, self.num_evaluated)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Has the module's metrics forget what they take in inside the block where the batch counts for nothing."""
        metrics = (
            [one for one in self.module.modules() if isinstance(one, Metric)] if self.num_copies == math.inf else []
        )
        before = [full_state(metric) for metric in metrics]
        yield
        for metric, state in zip(metrics, before, strict=True):
            restore(metric, state)

    def begin_training(self) -> None:
        """Sets the number of the next training step in the models, of which their random numbers are a function."""
        # What is drawn must not depend on how much was evaluated before: a resumed run does not repeat that.
        self.num_evaluated = 0
        for model in self.models:
            model.draws.step = self.trainer.fit_loop.epoch_loop.total_batch_idx

    def begin_evaluation(self) -> None:
        """Counts one more batch of evaluation, of which random numbers are a function."""
        self.num_evaluated += 1

    def begin_batch(self, args: tuple[Any, ...], driver: Driver) -> int:
        """Makes the models ready to be called with a whole batch; returns its rows, 1 where it has none."""
        rows = rows_of(args[0]) if args else 1
        first = self.mesh.dp.rank * rows if self.share is None else self.share.first_row
        for model in self.models:
            model.draws.first_sample, model.draws.call = first, 0
            model.driver, model.loss_weight = driver, None
        return rows

    def begin_microbatch(self, part: StepBatch) -> None:
        """Makes the models ready to be called with a microbatch; the schedule sets its first sample in them."""
        for model in self.models:
            model.loss_weight = None
            model.context_group, model.draws.documents = part.context_group, part.documents

    def end_microbatches(self) -> None:
        """Has the models cut whatever comes next as the mesh says."""
        for model in self.models:
            model.context_group = model.draws.documents = None

    def drive(self, driver: Driver) -> None:
        """Has a driver run the models' calls."""
        for model in self.models:
            model.driver = driver

    def synced_random(self) -> AbstractContextManager[None]:
        """Random numbers of the user's code that agree on all ranks that run a batch together, and differ between those
        that do not."""
        # Tensor-parallel ranks run the same code on the same data: their generators stay equal, and draw what one
        # device would.
        if self.mesh.axis("dp+cp").size == 1 and self.mesh.pp.size == 1:
            return nullcontext()
        return aligned_random(*self._random_key(torch.initial_seed()))

    def seed_random(self, seed: int, microbatch: int, group_index: int | None) -> None:
        """Seeds, by that of the run, what a microbatch of a schedule draws: alike on all ranks that run it together,
        which have one `group_index`, their data-parallel rank unless it is given."""
        seed_random(*self._random_key(seed, microbatch, group_index))

    def _random_key(self, seed: int, microbatch: int = 0, group_index: int | None = None) -> tuple[int | str, ...]:
        fit_loop, state = self.trainer.fit_loop, self.trainer.state
        # A validation of its own is not the one at the end of the fit before it.
        stage = str(state.stage) if state.fn == TrainerFn.FITTING else f"{state.fn} alone"
        index = self.mesh.dp.rank if group_index is None else group_index
        call = (stage, fit_loop.epoch_loop.total_batch_idx, fit_loop.batch_idx, self.num_evaluated, index)
        return (seed, *call, microbatch)

    def refuse_sums(self, output: Any, num_parts: int) -> None:
        """Raises ValueError where a step under manual optimization says that its loss is a sum: too late to count."""
        if num_parts > 1 and loss_reduction_of(output) == "sum":
            raise ValueError(
                'training_step returned loss_reduction ("sum") under manual optimization, whose backwards have run by '
                "then with the rows of each data-parallel rank as weights; weigh the loss before manual_backward"
            )

    def loss_weight(self, output: Any, rows: float | None, device: torch.device, *, num_parts: int = 1) -> Tensor:
        """Weight that the step's loss is a mean over, [], float64: by the step, by the operation that made the loss,
        by the model, else its rows.

        With several parts of a global batch, `num_parts`, rows that nobody has confirmed are told once. Raises
        ValueError where none of them has one, or several models do.
        """
        if (known := self._known_weight(output)) is not None:
            return torch.as_tensor(known, device=device).detach().double().reshape(())
        reduction = loss_reduction_of(output)
        if rows is None:
            raise ValueError(
                "dynamic context parallelism packs documents of any rows, so a mean over rows means nothing; say what "
                'the loss is a mean over: return {"loss": loss, "loss_weight": number of tokens}, or call the model '
                "with labels"
            )
        # Under manual optimization the backwards have run by then, with rows as weights.
        is_asked = num_parts > 1 and reduction is None and self.module.automatic_optimization
        if is_asked and not self._has_told_of_rows:
            self._has_told_of_rows = True
            rank_zero_warn(
                f"the loss of {type(self.module).__name__}.training_step is taken for a mean over the rows of its "
                f"batch, of which a step has {num_parts} parts (microbatches of data-parallel ranks). A mean over "
                'something else, as tokens or masked rows, is right with {"loss": loss, "loss_weight": their number}, '
                'a sum with {"loss": loss, "loss_reduction": "sum"}; "loss_reduction": "mean" confirms the rows',
                category=UserWarning,
            )
        return torch.tensor(rows, device=device).double().reshape(())

    def counts_rows(self, output: Any, rows: float | None) -> bool:
        """Whether the step's loss is taken for a mean over its rows because nothing says another number."""
        if says_what_it_counts(output):
            return False
        loss = loss_of(output)
        if (count := None if loss is None else mean_count(loss)) is not None:
            return isinstance(count, int) or float(count) == rows
        return self._known_weight(output) is None

    def _known_weight(self, output: Any) -> Tensor | float | None:
        """What the step's loss is said or known to be a mean over; None where that is neither."""
        if isinstance(output, dict) and output.get("loss_weight") is not None:
            said: Tensor | float = output["loss_weight"]
            return said
        loss = loss_of(output)
        if loss_reduction_of(output) is None and loss is not None and (count := mean_count(loss)) is not None:
            return count
        own = [
            model.loss_weight
            for model in self.models
            if model.loss_weight is not None and (is_returned(loss) or not isinstance(model, CutModel))
        ]
        if len(own) > 1:
            raise ValueError(
                f"{len(own)} models computed losses in one step, each a mean over its own tokens; say what the step's "
                'loss is a mean over: return {"loss": loss, "loss_weight": number of tokens or samples}'
            )
        return own[0] if own else None

    def ask_of_manual_loss(self, loss: Tensor, rows: int, *, num_parts: int) -> None:
        """Warns, once, of a loss of manual optimization that shows that it is no mean over the rows of its batch."""
        if num_parts == 1 or self._has_told_of_rows or self._num_asked >= _NUM_ASKED:
            return
        self._num_asked += 1
        if not counts_other_than_rows(loss, rows):
            return
        self._has_told_of_rows = True
        rank_zero_warn(
            f"a loss that {type(self.module).__name__} gives to manual_backward is taken for a mean over the rows of "
            f"its batch, of which {num_parts} data-parallel ranks have a part each. Multiply a sum by their number, "
            "and a mean over something else, as masked rows, by what it counts over the mean of that over the ranks",
            category=UserWarning,
        )


def loss_of(output: Any) -> Tensor | None:
    """The loss that a step returned; None where it returned none. Raises ValueError for a DTensor."""
    loss = output.get("loss") if isinstance(output, dict) else output
    if isinstance(loss, DTensor):
        raise ValueError(
            "the step returned a DTensor as its loss, which cannot be weighed beside those of other ranks; return "
            "loss.full_tensor(), or let the head return plain logits: ColwiseParallel(output_layouts=Replicate())"
        )
    return loss if isinstance(loss, Tensor) else None


def no_loss(of_what: str) -> RuntimeError:
    """Error of a step that returned no loss for a microbatch or a batch where it must."""
    return RuntimeError(
        f"training_step returned no loss for a {of_what}; a schedule cannot skip one, and with several processes "
        "Lightning skips no batch either; return a loss of zero that depends on the model"
    )


def loss_reduction_of(output: Any) -> Literal["mean", "sum"] | None:
    """What a step says its loss is over its batch; None where it says nothing. Raises ValueError for another word."""
    said = output.get("loss_reduction") if isinstance(output, dict) else None
    if said not in (None, "mean", "sum"):
        raise ValueError(f"loss_reduction ({said!r}) of training_step must be 'mean' or 'sum'")
    if said is not None and output.get("loss_weight") is not None:
        raise ValueError(
            f"training_step returned both loss_reduction ({said!r}) and loss_weight; the second is the number of "
            "things that the loss is a mean over: return one of them"
        )
    return said


def says_what_it_counts(output: Any) -> bool:
    """Whether a step says what its loss is a mean or a sum over: how its parts add up is then the user's word."""
    said = output if isinstance(output, dict) else {}
    return any(said.get(name) is not None for name in ("loss_weight", "loss_reduction"))


def reciprocal(weight: Tensor) -> Tensor:
    """1/weight, and 0 for a weight of 0: nothing was valid, and every gradient is zero."""
    return torch.where(weight > 0, 1.0 / weight, torch.zeros_like(weight))
