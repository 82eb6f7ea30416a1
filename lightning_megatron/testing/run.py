"""What a process of a certificate does: one fit of the user's module, on one device or as a rank of a layout."""

import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_megatron.any_module.cut_error import CutError
from lightning_megatron.mesh import Sizes
from lightning_megatron.optim.replica_check import DifferingCopiesError
from lightning_megatron.pipeline.microbatches import split
from lightning_megatron.testing.batches import loader_of, read_global_batches
from lightning_megatron.testing.islands import LiftedIslands
from lightning_megatron.testing.layout_name import Layout
from lightning_megatron.testing.quantities import CALLBACK, INITIAL, LOGGED, LOSS, Deviation
from lightning_megatron.testing.recorder import Recorder, Sink, SinkLogger, load_parts
from lightning_megatron.testing.sinks import ComparisonSink, Reference, ReferenceSink
from lightning_megatron.testing.subject import MakeSubject, Subject, SubjectError
from lightning_megatron.testing.telling import PACKAGE, telling, told
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.setup.checks import architecture_of
from lightning_megatron.trainer.setup.memory_checks import memory_faults
from lightning_megatron.trainer.step.microbatches import rows_of

SEED = 0
BATCHES, REFERENCE = "batches.pt", "reference.pt"
"""Files in the folder of a certificate: its global batches with those of validation, and what one device did."""
NUM_VALIDATED = 2
"""Global batches of a validation, of each loader."""
# Of waiting for another rank in a collective.
_COLLECTIVE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all runs of a certificate have in common."""

    make: MakeSubject
    steps: int
    rows: int
    folder: Path
    """Where processes leave what others read."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process of a layout."""

    rank: int
    world: int
    port: int


class _RankEnvironment(LightningEnvironment):
    """Ranks whose processes are there already, as under torchrun; told by values and not by the environment."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._place.port

    def world_size(self) -> int:
        return self._place.world

    def set_world_size(self, size: int) -> None:
        """It is known."""

    def global_rank(self) -> int:
        return self._place.rank

    def set_global_rank(self, rank: int) -> None:
        """It is known."""

    def local_rank(self) -> int:
        return self._place.rank


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one device tells of a module, by which causes are found."""

    module: str
    precision: str
    num_parameters: int
    optimizer_steps: int
    batch_norms: tuple[str, ...]
    dropouts: tuple[str, ...]
    has_experts: bool
    float64_error: str
    """Why the module did not run in float64; empty where it did."""
    halves: Mapping[tuple[str, str], tuple[float, float]]
    """Numbers of the first step on each half of its rows alone, by quantity and name."""
    is_random: bool
    """Whether the first loss depends on the seed of the default generator."""
    held: list[tuple[str, int, str]]
    """Quantity, step and name of all that was recorded."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """How a rank's run under a layout ended."""

    rank: int
    deviations: list[Deviation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str = ""
    """The message of what it raised."""
    is_refused: bool = False
    """Whether the package raised it, and not what it runs on."""
    ended_seconds: float = 0.0
    """When the run ended, by the machine's monotonic clock: the first error is the cause of the others."""


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """How the module is trained: what differs between the runs of a certificate."""

    strategy: Strategy
    precision: str
    place: Place | None = None
    dp_rank: int = 0
    dp_size: int = 1
    seed: int = SEED
    begin: Callable[[pl.Trainer, pl.LightningModule], None] = lambda trainer, module: None

    def run(self, subject: Subject, batches: Sequence[Any], validated: Sequence[Sequence[Any]], sink: Sink) -> Recorder:
        """Trains the module on its share of the batches, one epoch, and validates it with those of each loader."""
        logger = SinkLogger(sink)
        recorder = Recorder(sink, logger, self.begin)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1 if self.place is None else self.place.world,
            strategy=self.strategy,
            plugins=[] if self.place is None else [_RankEnvironment(self.place)],
            precision=self.precision,  # type: ignore[arg-type]
            max_epochs=1,
            limit_val_batches=1.0 if validated else 0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            log_every_n_steps=1,
            logger=[logger],
            callbacks=[recorder],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **subject.trainer,
        )
        data = subject.data
        loader, *others = (loader_of(one, rank=self.dp_rank, size=self.dp_size) for one in (batches, *validated))
        pl.seed_everything(self.seed, workers=True, verbose=False)
        with LiftedIslands() if self.precision == "64-true" else nullcontext():
            if isinstance(data, pl.LightningDataModule):
                # Its hooks and attributes are what a step may use; its batches are those that every run has.
                data.train_dataloader = lambda: loader  # type: ignore[method-assign]
                data.val_dataloader = lambda: others  # type: ignore[method-assign]
                trainer.fit(subject.module, datamodule=data)
            else:
                trainer.fit(subject.module, train_dataloaders=loader, val_dataloaders=others)
        return recorder


def _made(plan: Plan) -> Subject:
    pl.seed_everything(SEED, workers=True, verbose=False)
    return plan.make()


def _on_one_device(
    plan: Plan, batches: Sequence[Any], validated: Sequence[Sequence[Any]], **settings: Any
) -> tuple[pl.LightningModule, Recorder, Reference]:
    """The module, trained; its recorder, and what was recorded."""
    subject, sink = _made(plan), ReferenceSink()
    recorder = _Fit(strategy=SingleDeviceStrategy("cpu"), **settings).run(subject, batches, validated, sink)
    return subject.module, recorder, sink.reference


def run_one_device(plan: Plan) -> Facts:
    """Runs the module on one device, and leaves its batches and all that it did in the plan's folder.

    Raises SubjectError where the module does not train there.
    """
    with telling("the module or its data cannot be made"):
        architecture = architecture_of(_made(plan).module)
    # Up to four processes hold a model at once.
    if faults := memory_faults(architecture, Sizes(), num_processes=4, precision="64-true"):
        raise SubjectError(f"{'; '.join(faults)}; --tiny trains its small twin")
    with telling("the module does not train on one device"):
        batches, validated = _read_batches(plan)
        torch.save((batches, validated), plan.folder / BATCHES)
        try:
            precision, float64_error = "64-true", ""
            module, recorder, reference = _on_one_device(plan, batches, validated, precision=precision)
        except Exception as error:
            precision, float64_error = "32-true", told(error)
            module, recorder, reference = _on_one_device(plan, batches, validated, precision=precision)
        if module.automatic_optimization and not any(quantity == LOSS for quantity, _ in reference.numbers):
            raise SubjectError(
                f"training_step of {type(module).__name__} returns no loss in any step, so nothing trains; return the "
                "loss, or a dictionary with 'loss'"
            )
        torch.save((reference.numbers, reference.tensors), plan.folder / REFERENCE)
        architecture = architecture_of(module)
        return Facts(
            module=type(module).__name__,
            precision=precision,
            num_parameters=sum(p.numel() for p in module.parameters()),
            optimizer_steps=module.trainer.global_step,
            batch_norms=tuple(name for name, part in module.named_modules() if isinstance(part, _BatchNorm)),
            dropouts=tuple(recorder.dropouts),
            has_experts=architecture is not None and architecture.moe is not None,
            float64_error=float64_error,
            halves=_halves(plan, batches[0], validated, precision),
            is_random=_is_random(plan, batches[0], validated, precision, reference),
            held=reference.held,
            notes=_made(plan).notes,
        )


def _read_batches(plan: Plan) -> tuple[list[Any], list[list[Any]]]:
    subject = _made(plan)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=SingleDeviceStrategy("cpu"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    accumulated = int(subject.trainer.get("accumulate_grad_batches", 1))
    number = plan.steps * accumulated
    return read_global_batches(subject, trainer, number=number, num_validated=NUM_VALIDATED, rows=plan.rows)


def _halves(
    plan: Plan, batch: Any, validated: Sequence[Sequence[Any]], precision: str
) -> dict[tuple[str, str], tuple[float, float]]:
    """The numbers of the first step on each half of its rows: what the rows of a mean or a sum are is seen by them."""
    halves = split(batch, 2) if rows_of(batch) > 1 else []
    if len(halves) < 2:
        return {}
    found = []
    for half in halves:
        try:
            found.append(_on_one_device(plan, [half], validated, precision=precision)[2].numbers)
        except Exception:
            # A module that takes batches of one size alone: its causes are told with less certainty.
            return {}
    first, second = found
    return {
        (quantity, name): (value, second[quantity, step][name])
        for (quantity, step), values in first.items()
        if step == 1 and quantity in (LOSS, LOGGED, CALLBACK)
        for name, value in values.items()
        if name in second.get((quantity, step), {})
    }


def _is_random(
    plan: Plan, batch: Any, validated: Sequence[Sequence[Any]], precision: str, reference: Reference
) -> bool:
    """Whether the first loss depends on the seed, with one device's initial weights."""
    wanted = reference.numbers.get((LOSS, 1), {})
    full = reference.tensors[INITIAL, 0]
    settings = {"precision": precision, "seed": SEED + 1, "begin": partial(load_parts, full)}
    found = _on_one_device(plan, [batch], validated, **settings)[2].numbers.get((LOSS, 1), {})
    return any(abs(found[name] - wanted[name]) > 1e-6 * abs(wanted[name]) for name in found.keys() & wanted.keys())


def run_rank(plan: Plan, layout: Layout, precision: str, place: Place) -> RankReport:
    """Runs the module as one rank of a layout, beside what one device did."""
    batches, validated = torch.load(plan.folder / BATCHES, weights_only=False)
    reference = Reference(*torch.load(plan.folder / REFERENCE, weights_only=True, mmap=True))
    dp_rank = place.rank // (layout.tp * layout.cp) % layout.dp
    sink = ComparisonSink(reference, place.rank, dp_rank=dp_rank, dp_size=layout.dp)
    full = reference.tensors[INITIAL, 0]
    error: BaseException | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _Fit(
                strategy=layout.strategy(_COLLECTIVE_SECONDS),
                precision=precision,
                place=place,
                dp_rank=dp_rank,
                dp_size=layout.dp,
                begin=partial(load_parts, full),
            ).run(_made(plan), batches, validated, sink)
        except (Exception, SystemExit) as raised:
            error = raised
    ended_seconds = time.monotonic()
    own = str(PACKAGE)
    return RankReport(
        rank=place.rank,
        deviations=sink.deviations,
        warnings=list(dict.fromkeys(str(one.message) for one in caught if one.filename.startswith(own))),
        error="" if error is None else str(error) if isinstance(error, ConfigurationError) else told(error),
        is_refused=error is not None and _is_refusal(error),
        ended_seconds=ended_seconds,
    )


def _is_refusal(error: BaseException) -> bool:
    """Whether the package itself raised the error: what fails further down is a failure."""
    if isinstance(error, (ConfigurationError, MisconfigurationException, CutError)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].name in ("__torch_function__", "__torch_dispatch__"):
        # An operation of torch failed, in whose way a mode of the package stands.
        return False
    is_told = isinstance(error, (ValueError, RuntimeError)) and not isinstance(error, DifferingCopiesError)
    return is_told and PACKAGE in Path(frames[-1].filename).parents
