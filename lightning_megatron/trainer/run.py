"""One run (a fit, validate, test or predict): all that lives from `setup_environment` to `teardown`.

The strategy holds one `ActiveRun` at a time and drops it at the end. A `FitRecord` has what checkpoints need of the
last fit after that.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import lightning.pytorch as pl
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_megatron.any_module.pipelined_modules import pipelined_modules
from lightning_megatron.any_module.uncut import was_held
from lightning_megatron.checkpoint.owner_lock import FolderOwner
from lightning_megatron.comm.async_collectives import no_op
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.replica_check import DifferingCopiesError, bullet_list, differing_copies
from lightning_megatron.pipeline.module import run_alone
from lightning_megatron.tensor import weight_gradients
from lightning_megatron.tensor.weight_gradients import WeightGradients
from lightning_megatron.tensor.whole_linear import WholeLinear, take_back
from lightning_megatron.trainer.checkpointing import last_checkpoint, run_history
from lightning_megatron.trainer.checkpointing.contents import MasterSlots
from lightning_megatron.trainer.checkpointing.local_checkpoint import LocalCheckpoint
from lightning_megatron.trainer.dynamic_context.prefetch import DynamicContext
from lightning_megatron.trainer.fault_tolerance.early_end import EarlyEnd
from lightning_megatron.trainer.fault_tolerance.failure_watch import FailureWatch
from lightning_megatron.trainer.fault_tolerance.preemption import Preemption
from lightning_megatron.trainer.resume.run_state import ResumeState
from lightning_megatron.trainer.setup import compiled_layers, metric_sync, pipelined_models
from lightning_megatron.trainer.setup.connections import Connections
from lightning_megatron.trainer.setup.optimizers import release
from lightning_megatron.trainer.step.first_steps import FirstSteps
from lightning_megatron.trainer.step.hook_check import HookCheck
from lightning_megatron.trainer.step.loader_sync import LoaderSync
from lightning_megatron.trainer.step.skipped_step_schedulers import SkippedStepSchedulers
from lightning_megatron.trainer.step.steps import Steps
from lightning_megatron.transformer.moe import share_yield_to_peer


@dataclass(kw_only=True)
class FitRecord:
    """State of the last fit that a checkpoint saved during or after it records."""

    history: run_history.FitHistory = field(default_factory=list)
    """Fits that led to the weights as they are."""
    master_slots: MasterSlots = field(default_factory=MasterSlots)
    """Weights that the optimizers were left with in place of parameters of the module, as slices of parameters."""
    resume_state: ResumeState | None = None
    """Progress of the loaded checkpoint, until the first batch after it."""

    def restore_networks(self, module: pl.LightningModule, optimizers: Iterable[Optimizer], world: Axis) -> None:
        """Makes the networks of a module whole, as `MegatronStrategy.restore_networks` says. Collective over the world.

        The optimizers are left with the parts that this rank had, which checkpoints know by the names of the whole.
        """
        stepped = {one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        slots = self.master_slots.before_whole(module, stepped)
        pipelined_models.restore_networks(module, world)
        self.master_slots = slots
        for one in stepped:
            # Gradients are zeroed at the beginning of a run, but not those of parts, which are no parameters any more.
            one.grad = None


@dataclass(kw_only=True)
class ActiveRun:
    """State of one run. It is made before anything else of the run; the rest is filled in as set-up goes on."""

    connections: Connections
    owned_folders: list[FolderOwner] = field(default_factory=list)
    """Folders of checkpoints that no other run saves into meanwhile; of the first rank."""
    local_checkpoint: LocalCheckpoint | None = None
    preemption: Preemption | None = None
    early_end: EarlyEnd | None = None
    """Check that all ranks end a fit early, or none; None on a single rank."""
    watch: FailureWatch | None = None
    """Watch for failures of other ranks; None on a single rank."""
    has_failed: bool = False
    """Whether this rank has failed and has said so."""
    has_agreed_to_load: bool = False
    """Whether all ranks have exchanged whether they load a checkpoint."""
    document_prefetch: DynamicContext | None = None
    loader_sync: LoaderSync | None = None
    """What data-parallel ranks know of each other's batches; None where there is one."""
    cuts_loaders: bool = False
    """Whether ordinary loaders give each rank its part, as the Trainer's use_distributed_sampler asks. That option is
    off during the run: Lightning would replace the user's samplers by one that always shuffles, or repeats samples."""
    dp_comm: DataParallelComm | None = None
    deferred: list[ref[nn.Parameter]] = field(default_factory=list)
    """Parameters that were made without values, until data-parallel ranks have their shards."""
    num_steps: int = 0
    """Optimizer steps of this run, those that were skipped too."""
    gradient_check: HookCheck | None = None
    """Check of what a user's hooks do to gradients; None where there are none."""
    weight_check: HookCheck | None = None
    """Check of what a user's hooks do to weights; None where there are none."""
    stepped_models: list[set[str]] = field(default_factory=list)
    """Names, for each optimizer, of the pipelined models of whose weights it has some."""
    lent_linears: list[WholeLinear] = field(default_factory=list)
    """Linears of networks that know nothing of a split backward, which put off their weight gradients in this run."""
    compiled_layers: list[nn.Module] = field(default_factory=list)
    """Layers that are compiled in this run alone."""
    contexts: ExitStack = field(default_factory=ExitStack)
    """What holds in this run alone: the ambient mesh, and the choice of a library for attention."""
    synced_metrics: list[Metric] = field(default_factory=list)
    """Metrics whose sync was changed for this run."""
    skipped_step_schedulers: SkippedStepSchedulers = field(default_factory=SkippedStepSchedulers)
    first_steps: FirstSteps | None = None
    """Check of what the first steps log; None on a single rank."""
    steps: Steps | None = None
    is_synchronised: bool = True
    """Whether the next backward ends an optimizer step, so that its gradients are summed over data-parallel ranks."""

    @property
    def is_leaving(self) -> bool:
        """Whether all ranks have agreed to end the run: none of them has failed."""
        return self.preemption is not None and self.preemption.is_leaving

    @property
    def own_callbacks(self) -> list[pl.Callback]:
        """Callbacks of the strategy's own, which stand after the user's during the run."""
        found = (self.early_end, self.first_steps, self.local_checkpoint, self.preemption, self.loader_sync)
        return [callback for callback in found if callback is not None]

    def agree_to_load(self, path: str | None) -> None:
        """Checks, once a run, that all ranks load one checkpoint, or none. Collective over the world.

        Lightning loads before `setup` or not at all, as each rank has found a checkpoint or none.
        """
        if not self.has_agreed_to_load:
            self.has_agreed_to_load = True
            last_checkpoint.require_alike(path, self.connections.saver.world)

    def end_step_of_models(
        self, module: pl.LightningModule, optimizers: Iterable[Optimizer], optimizer: Optimizer, *, has_stepped: bool
    ) -> None:
        """Updates what models learn from a step, such as expert biases, where the optimizer has some of their weights.

        Models of whose weights no optimizer has any forget what they saw.
        """
        of_this = self.stepped_models[next(i for i, known in enumerate(optimizers) if known is optimizer)]
        of_any = set().union(*self.stepped_models)
        for name, model in pipelined_modules(module).items():
            if name in of_this or name not in of_any:
                is_skipped = not has_stepped or name not in of_any
                model.end_step(is_skipped=is_skipped, replicas=self.connections.mesh.axis("dp+cp"))

    def check_replicas(self, step: int) -> None:
        """Raises DifferingCopiesError where weights that several ranks hold differ. Collective over the world."""
        mesh = self.connections.mesh
        if self.dp_comm is None or mesh.world.size == 1:
            return
        self.dp_comm.synchronize()
        if lines := differing_copies(self.dp_comm.gradients, mesh):
            raise DifferingCopiesError(
                f"weights that several ranks hold differ after step {step}:\n{bullet_list(lines)}\na hook or a callback"
                " changed them on some ranks only, a kernel is not deterministic (torch.use_deterministic_algorithms), "
                "or a rank computes wrongly: a network's own code that uses a weight on a part of the features or "
                "tokens outside of the modules that are looked at; go on from the last checkpoint. "
                "OptimizerConfig(check_replicas_every_n_steps=-1) looks at none"
            )

    def fail(self, exception: BaseException) -> None:
        """Publishes this rank's failure to the others, once the save in flight has had time to complete."""
        if self.is_leaving or self.has_failed:
            return
        # The others must not hear of the failure yet: they are needed to finish what is being written.
        self.connections.saver.end(is_failed=True)
        if self.local_checkpoint is not None:
            self.local_checkpoint.end(is_failed=True)
        self.has_failed = True
        first = None if self.watch is None else self.watch.publish(exception)
        if first is not None:
            exception.add_note(f"this rank failed after another one; the first failure:\n{first}")

    def has_whole_networks(self, module: pl.LightningModule) -> bool:
        """Whether the run ends on all ranks, each of which held whole the networks that were cut for it."""
        is_over = not (self.has_failed or self.is_leaving or module.trainer.interrupted)
        return is_over and was_held(module)

    def end(self, module: pl.LightningModule | None, fit: FitRecord) -> None:
        """Releases what the run took of the module, of the Trainer's callbacks and of the process, but for its watch.

        It is not collective after a failure: a rank may be gone.
        """
        trainer: Any = None if module is None else module.trainer
        is_interrupted = trainer is not None and trainer.interrupted
        is_leaving = self.is_leaving
        if self.preemption is not None:
            self.preemption.give_back()
        if self.local_checkpoint is not None:
            self.local_checkpoint.end(is_failed=is_interrupted)
        for callback in self.own_callbacks:
            if trainer is not None and callback in trainer.callbacks:
                trainer.callbacks.remove(callback)
        if trainer is not None and self.cuts_loaders:
            trainer._accelerator_connector.use_distributed_sampler = True
        try:
            self.connections.saver.end(is_failed=is_interrupted)
        finally:
            # Lightning may call this again after an error.
            while self.owned_folders:
                self.owned_folders.pop().release()
        if self.document_prefetch is not None:
            self.document_prefetch.stop(is_failed=is_interrupted and not is_leaving)
        self.contexts.close()
        if module is not None:
            for pipelined in pipelined_modules(module).values():
                pipelined.driver = run_alone
            # The layers held on to the last fit's gradients.
            weight_gradients.share(module, WeightGradients())
            while self.lent_linears:
                take_back(self.lent_linears.pop())
            share_yield_to_peer(module, no_op)
        while self.compiled_layers:
            compiled_layers.restore(self.compiled_layers.pop())
        metric_sync.restore_metrics(self.synced_metrics)
        self.skipped_step_schedulers.let_go()
        if self.dp_comm is not None:
            release(self.dp_comm, is_interrupted=is_interrupted)
            fit.master_slots = MasterSlots.of(self.dp_comm)
        if is_interrupted:
            # The run never came to its first batch; another fit starts from its own checkpoint, or from none.
            fit.resume_state = None
