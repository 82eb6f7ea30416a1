"""`MegatronStrategy`: Megatron's parallelism under `Trainer(strategy=...)`, for ordinary LightningModules.

It wires the rooms together and answers Lightning's hooks: `run` holds what lives during a run, `step/` runs the steps,
`checkpointing/` saves and loads.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_megatron.any_module.pipelined_modules import pipelined_modules, plain_linears, whole_backwards
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.checkpoint import CheckpointConfig, read_meta
from lightning_megatron.comm import collectives, differentiable
from lightning_megatron.comm.raise_on_all_ranks import read_on_first_rank
from lightning_megatron.comm.tree_axis import FAN_OUT
from lightning_megatron.config_dataclass import type_faults
from lightning_megatron.context.balance import DynamicContextConfig
from lightning_megatron.context.config import ContextConfig
from lightning_megatron.mesh import Axis, Mesh, Sizes, ambient
from lightning_megatron.optim.config import LossScaleConfig, OptimizerConfig
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.pipeline.registry import placement_of, spec_of
from lightning_megatron.pipeline.schedule_spec import Schedule
from lightning_megatron.pipeline.step_hooks import StepHook
from lightning_megatron.planner.balanced_batch import BalancedBatch
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.precision.kernels import KernelConfig
from lightning_megatron.rules import cross_config
from lightning_megatron.sharding import deferring, is_deferred, materialize
from lightning_megatron.tensor.whole_linear import lend
from lightning_megatron.trainer.checkpointing import (
    checkpoint_dict,
    contents,
    hook_dictionary,
    hyper_parameters,
    last_checkpoint,
    owned_folders,
    run_history,
    single_file,
)
from lightning_megatron.trainer.checkpointing.checkpoint_saver import CheckpointSaver
from lightning_megatron.trainer.checkpointing.contents import MasterSlots
from lightning_megatron.trainer.checkpointing.hook_dictionary import SavedOptimizers
from lightning_megatron.trainer.checkpointing.local_checkpoint import LocalCheckpoint
from lightning_megatron.trainer.checkpointing.local_state import LocalState
from lightning_megatron.trainer.checkpointing.single_file import FileIO
from lightning_megatron.trainer.config import ConfigurationError, PipelineConfig
from lightning_megatron.trainer.dynamic_context import measured_cost
from lightning_megatron.trainer.dynamic_context.prefetch import DynamicContext
from lightning_megatron.trainer.fault_tolerance.early_end import EarlyEnd
from lightning_megatron.trainer.fault_tolerance.failure_watch import FailureWatch, end_none
from lightning_megatron.trainer.fault_tolerance.preemption import Preemption
from lightning_megatron.trainer.fault_tolerance.stop_vote import StopVote
from lightning_megatron.trainer.precision import MegatronPrecision, compute_dtype
from lightning_megatron.trainer.resume import data_position, run_state
from lightning_megatron.trainer.run import ActiveRun, FitRecord
from lightning_megatron.trainer.setup import (
    attention_library,
    checks,
    compiled_layers,
    expert_replicas,
    fp8_layers,
    initial_sync,
    metric_sync,
    model_checks,
    optimizer_checks,
    optimizers,
    pipelined_models,
)
from lightning_megatron.trainer.setup.attempt_store import attempt_store
from lightning_megatron.trainer.setup.connections import Connections
from lightning_megatron.trainer.setup.launcher import CheckingLauncher
from lightning_megatron.trainer.setup.process_groups import Groups
from lightning_megatron.trainer.setup.whole_shapes import WholeShapes
from lightning_megatron.trainer.step.first_steps import NUM_CHECKED, FirstSteps
from lightning_megatron.trainer.step.global_batches import is_stream
from lightning_megatron.trainer.step.held_memory import tell_what_was_held
from lightning_megatron.trainer.step.hook_check import GRADIENTS, WEIGHTS, HookCheck
from lightning_megatron.trainer.step.loader_sync import LoaderSync
from lightning_megatron.trainer.step.microbatches import Cutting
from lightning_megatron.trainer.step.reduction import reduced
from lightning_megatron.trainer.step.step_log import REDUCED
from lightning_megatron.trainer.step.steps import Steps
from lightning_megatron.trainer.step.uneven_inputs import join_uneven
from lightning_megatron.transformer.recompute import RecomputeConfig


class MegatronStrategy(ParallelStrategy):
    """Trains one model over tensor, sequence, pipeline, context and data parallel ranks, with one device's numbers.

    The data-parallel size is what the world leaves: processes / (tensor x pipeline x context). Raises
    ConfigurationError, telling all faults at once, before Lightning starts further processes.
    """

    def __init__(
        self,
        *,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        expert_tensor_parallel_size: int = 1,
        sequence_parallel: bool = False,
        num_microbatches: int = 1,
        microbatch_size: int = 0,
        pipeline: PipelineConfig | None = None,
        context: ContextConfig | None = None,
        dynamic_context: DynamicContextConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        loss_scale: LossScaleConfig | None = None,
        fp8: Fp8Config | None = None,
        recompute: RecomputeConfig | None = None,
        kernels: KernelConfig | None = None,
        plan: ModelPlan | None = None,
        checkpoint: CheckpointConfig | None = None,
        timeout_seconds: float = 1800.0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        """Sets up nothing yet: processes, mesh and model are made when a run starts.

        Args:
            tensor_model_parallel_size: Ranks over which each weight matrix is cut.
            pipeline_model_parallel_size: Ranks over which the layers are divided into stages.
            virtual_pipeline_model_parallel_size: Model chunks (stages) on each pipeline rank; 1 is no interleaving.
            context_parallel_size: Ranks over which each sequence is cut.
            expert_model_parallel_size: Ranks over which the experts of a layer are divided. The expert sizes fold the
                ranks of a stage differently: processes / (pipeline x expert x expert tensor) ranks hold one expert.
            expert_tensor_parallel_size: Ranks over which the weight matrices of each expert are cut.
            sequence_parallel: Whether tensor-parallel ranks also divide the tokens of norms, dropout and residuals.
            num_microbatches: Microbatches of a data-parallel rank's batch in one training step.
            microbatch_size: Rows of a microbatch, from which their number follows for each batch, as batches that grow
                need it; 0 leaves the number to num_microbatches.
            pipeline: Schedule, placement of layers and mode of the pipeline; None is PipelineConfig().
            context: How context-parallel ranks exchange keys and values, and the attention kernel; None is
                ContextConfig().
            dynamic_context: How the documents of each microbatch are packed and cut; None cuts every sequence over
                context_parallel_size ranks.
            optimizer: How gradients, optimizer states and master weights are sharded and communicated over
                data-parallel ranks; None is OptimizerConfig().
            loss_scale: Scaling of the loss in precision 16-mixed; None is LossScaleConfig().
            fp8: How linear layers multiply in FP8; None multiplies in the precision of the Trainer.
            recompute: Activation checkpointing: which activations are recomputed in the backward instead of saved;
                None is RecomputeConfig().
            kernels: Ways to compute that take the place of torch's own, such as a loss in chunks of tokens, or layers
                compiled by torch.compile; None is KernelConfig().
            plan: How a network that knows nothing of parallelism is cut: its layers and the style of its linears;
                None is what the module's hook `model_plan` returns, or finds the layers, and takes the styles that a
                model of transformers brings along.
            checkpoint: How and where checkpoints are written; None is CheckpointConfig().
            timeout_seconds: Seconds after which a rank that waits in a collective gives up, and after which one that
                is silent is taken for lost.
            accelerator: Lightning's accelerator; the Trainer sets it.
            parallel_devices: Devices of this machine, one a process; the Trainer sets them.
            cluster_environment: Lightning's description of the launcher; the Trainer detects it.
            checkpoint_io: Lightning's plugin by which checkpoints that are one file are read and written.
            precision_plugin: Lightning's precision plugin; the Trainer makes it from its `precision`.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        if faults := type_faults(get_type_hints(MegatronStrategy.__init__), given):
            raise ConfigurationError(faults)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io if checkpoint_io is not None else FileIO(),
            precision_plugin=precision_plugin,
        )
        self._tp = tensor_model_parallel_size
        self._pp = pipeline_model_parallel_size
        self._vp = virtual_pipeline_model_parallel_size
        self._cp = context_parallel_size
        self._ep = expert_model_parallel_size
        self._etp = expert_tensor_parallel_size
        self._sequence_parallel = sequence_parallel
        self.num_microbatches = num_microbatches
        self.microbatch_size = microbatch_size
        self.pipeline = pipeline if pipeline is not None else PipelineConfig()
        self.context = context if context is not None else ContextConfig()
        # How each microbatch is packed and cut; None: by the sizes.
        self.dynamic_context = dynamic_context
        self.optimizer = optimizer if optimizer is not None else OptimizerConfig()
        # It is used with precision 16-mixed.
        self.loss_scale = loss_scale if loss_scale is not None else LossScaleConfig()
        self._fp8 = fp8
        self.recompute = recompute if recompute is not None else RecomputeConfig()
        self.kernels = kernels if kernels is not None else KernelConfig()
        self.plan = plan
        self.checkpoint = checkpoint if checkpoint is not None else CheckpointConfig()
        self.timeout_seconds = timeout_seconds
        self._groups = Groups(timeout_seconds)
        self._num_nodes = 1
        # The world over host memory, and all other connections: made by the first run and reused by the later ones.
        self._host: Axis | None = None
        self._connections: Connections | None = None
        # It lives from `setup_environment` to `teardown`.
        self._run: ActiveRun | None = None
        self._last_fit = FitRecord()

    # --- who this rank is -------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> Sizes:
        """Ranks on each axis; known as soon as the Trainer is made."""
        sizes = Sizes(
            world=self.num_nodes * self.num_processes,
            tp=self._tp,
            pp=self._pp,
            cp=self._cp,
            cp_ulysses=self.context.ulysses_size_of(self._cp),
            cp_exchange="all_gather" if self.context.comm_type == "all_gather" else "ring",
            attention_kernel=self.context.kernel,
            pads_uneven=self.context.uneven == "pad",
            ep=self._ep,
            etp=self._etp,
            sequence_parallel=self._sequence_parallel,
            vp=self._vp,
            placement=placement_of(self.schedule.name),
            stage_layout=self.pipeline.layout,
        )
        if self.dynamic_context is None or sizes.faults():
            return sizes
        return cross_config.with_context_groups(sizes, self.dynamic_context, self.context)

    @property
    def balanced_step(self) -> BalancedBatch | None:
        """Documents of the training step that runs, or was the last, and the ranks that run them, under dynamic context
        parallelism; None without."""
        prefetch = None if self._run is None else self._run.document_prefetch
        return None if prefetch is None else prefetch.taken

    @property
    def schedule(self) -> Schedule:
        """Pipeline schedule of a full training step."""
        return self.pipeline.schedule_of(pp=self._pp, vp=self._vp, microbatches=self.num_microbatches)

    @property
    def mesh(self) -> Mesh:
        """Mesh of this rank; with several processes, raises RuntimeError before `setup_environment`."""
        return self._require_connections().mesh

    def _require_connections(self) -> Connections:
        """Connections of this process: of the run, of the last one, or of a single process that needs no other."""
        if self._connections is None:
            if self.sizes.world != 1 or self.sizes.faults():
                raise RuntimeError(
                    "the mesh is made when fit, validate, test or predict starts, which connects the processes; it is "
                    "not there yet. What needs it outside of a run (data loaders, checkpoints) works after one"
                )
            self._connections = self._connect()
        return self._connections

    def _connect(self) -> Connections:
        return Connections.opened(
            self.sizes,
            self.global_rank,
            self._groups,
            self.root_device,
            self.checkpoint,
            host=self._host,
            routes_documents=self.dynamic_context is not None,
        )

    @property
    def data_parallel_rank(self) -> int:
        """Data-parallel rank, which says whose data this rank reads."""
        return self.mesh.dp.rank

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel ranks, which read different data."""
        return self.sizes.dp

    @property
    def is_distributed(self) -> bool:
        """Whether several data-parallel ranks read data; Lightning adds samplers and syncs metrics only then."""
        return not self.sizes.faults() and self.sizes.dp > 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        # A launcher may have started more ranks than the Trainer has devices, which is refused on each of them.
        return self.parallel_devices[min(self.local_rank, len(self.parallel_devices) - 1)]

    @property
    def num_nodes(self) -> int:
        """Machines; the Trainer sets it."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    # --- Lightning's choice of dtypes, under our clipping -----------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None and not isinstance(precision_plugin, MegatronPrecision):
            precision_plugin = MegatronPrecision(precision_plugin)
        self._precision_plugin = precision_plugin

    @property
    def fp8(self) -> Fp8Config | None:
        """FP8 configuration of the linears, where `fp8` or `precision="transformer-engine"` asks for one."""
        return self._fp8 if self._fp8 is not None else self._plugin.fp8

    # --- processes --------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = CheckingLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, self._prepare_run
        )

    def _prepare_run(self, trainer: pl.Trainer, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the run that is about to start, with a checkpoint that is complete.

        Raises ConfigurationError for everything that is wrong with it.
        """
        arguments = last_checkpoint.prepared(trainer, arguments)
        faults = checks.faults(trainer, arguments)
        if self._fp8 is not None and self._plugin.fp8 is not None:
            faults.append(
                "FP8 is asked for twice, by precision='transformer-engine' and by MegatronStrategy(fp8=...); "
                "give one of them"
            )
        if faults:
            raise ConfigurationError(faults)
        return arguments

    def set_world_ranks(self) -> None:
        """Sets the ranks of this process in Lightning's environment and its rank-zero helpers."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        # torchelastic and SLURM ignore the setters; what the getter says is the truth.
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        vote = StopVote(self.sizes.world)
        watch = self._join_other_ranks(vote) if self.sizes.world > 1 else None
        try:
            if self._connections is None:
                self._connections = self._connect()
        except BaseException as error:
            if watch is not None:
                watch.publish(error)
                watch.stop()
            raise
        module = self.lightning_module
        self._run = run = ActiveRun(connections=self._connections, watch=watch)
        run.contexts.enter_context(ambient(self.mesh))
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self._last_fit.history = run_history.begun([], module.trainer.global_step, self._saver.world)
            run.local_checkpoint = self._make_local_checkpoint()
        if self.sizes.world > 1 and module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            run.first_steps = FirstSteps(self.mesh.axis("pp+cp+tp"))
            assert watch is not None
            run.early_end = EarlyEnd(watch, module.trainer)
        run.preemption = Preemption(self.checkpoint, vote, self._saver, self.cluster_environment)
        initial_sync.sync_seed(self._saver.world)
        if module is not None:
            run.loader_sync = LoaderSync(self.mesh) if self.mesh.dp.size > 1 else None
            if is_overridden("configure_model", module):
                module._device_mesh = self._connections.device_mesh
            connector: Any = module.trainer._accelerator_connector
            run.cuts_loaders, connector.use_distributed_sampler = connector.use_distributed_sampler, False
            # Callbacks that average weights copy the module when they are set up, which comes next.
            pipelined_models.cut_plain_networks(module, self.mesh, self.plan)

    def _join_other_ranks(self, vote: StopVote) -> FailureWatch:
        """Begins the process group of all ranks, and a watch over them. Collective over the world."""
        environment, device = self.cluster_environment, self.root_device
        assert environment is not None
        # Another launcher, of a class derived from this one, has its own way to end what it started.
        end_ranks = self._launcher.end_ranks if isinstance(self._launcher, CheckingLauncher) else end_none
        options: dict[str, Any] = {"device_id": device if device.type != "cpu" else None}
        backend = _get_default_process_group_backend_for_device(device)
        ranks = tuple(range(self.sizes.world))
        address = environment.main_address if self.num_nodes > 1 else None
        try:
            if (store := attempt_store(self.global_rank, len(ranks), self._groups.timeout)) is not None:
                options["store"] = store
            _init_dist_connection(environment, backend, timeout=self._groups.timeout, **options)
            world = Axis("world", len(ranks), self.global_rank, ranks, dist.group.WORLD)
            if self._host is None:
                # The CPU's own groups talk over host memory; of many ranks one such group would connect each with each.
                is_group = device.type == "cpu" and world.size <= FAN_OUT + 1
                self._host = world if is_group else self._groups.tree_over_host(world)
            return FailureWatch.started(address, world, vote, self.timeout_seconds, end_ranks, tree=self._host)
        except BaseException:
            # Nobody watches yet: they would wait for this rank until their time-out.
            end_ranks(ranks)
            raise

    def _syncs_layers(self, trainer: pl.Trainer) -> bool:
        """Whether batch norms are synchronised in the run, as the Trainer's sync_batchnorm asks."""
        return self._layer_sync is not None and self.is_distributed and trainer.state.fn == TrainerFn.FITTING

    def _make_local_checkpoint(self) -> LocalCheckpoint | None:
        if not self.checkpoint.local_folder or self._require_module().trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        layout = {
            # How microbatches are cut leaves nothing in the state.
            "sizes": asdict(replace(self.sizes, context_groups=(), context_groups_by_heads=False)),
            "optimizer": asdict(self.optimizer),
            "precision": str(self.precision_plugin.precision),
        }
        return LocalCheckpoint(self.checkpoint, self.mesh, self._saver.world, layout)

    # --- model and optimizers ---------------------------------------------------------------------------------------

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with super().tensor_init_context(empty_init):
            if not self._shards_parameters:
                yield
                return
            with deferring() as made:
                yield
            self._require_run().deferred += made

    @property
    def _shards_parameters(self) -> bool:
        """Whether the run is a fit in which data-parallel ranks hold shards of parameters."""
        # Networks may be made outside of a run too, by the Trainer's `init_module`.
        if self._run is None or self._require_module().trainer.state.fn != TrainerFn.FITTING:
            return False
        return self.optimizer.shards_parameters and any(self.mesh.axis(name).size > 1 for name in ("dp+cp", "edp"))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        run, module = self._require_run(), self._require_module()
        run.agree_to_load(None)
        if trainer.state.fn == TrainerFn.FITTING:
            run.owned_folders = owned_folders.take_folders(trainer, self._saver.world)
        self.accelerator.setup(trainer)
        trainer.callbacks.extend(run.own_callbacks)  # type: ignore[attr-defined]
        if self._syncs_layers(trainer):
            assert self._layer_sync is not None
            self.model = self._layer_sync.apply(module)
            metric_sync.sync_batch_norms_over(module, self.mesh.dp)
        pipelined_models.cut_late_networks(module, self.mesh, self.plan)
        model_checks.require_own_mesh(module, self.mesh)
        optimizer_checks.require_values(module)
        model_checks.require_untied_outside(module, self.mesh)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        initial_sync.sync_module_states(module, self.mesh)
        model_checks.share_recomputation(module, self.recompute, self.mesh)
        model_checks.require_used_axes(module, self.mesh)
        if trainer.state.fn == TrainerFn.FITTING:
            model_checks.require_equal_writes(module, self.mesh)
        pipelined = pipelined_modules(module)
        model_checks.share_kernels(module, self.kernels, self.mesh)
        run.contexts.enter_context(attention_library.attention_by(self.kernels.attention))
        if self.dynamic_context is not None and trainer.state.fn == TrainerFn.FITTING:
            model_checks.require_spreading(module)
            run.document_prefetch = self._make_document_prefetch(trainer, self.dynamic_context)
        if self.fp8 is not None:
            plan = pipelined_models.plan_of(module, self.plan)
            self._plugin.fp8_layers = fp8_layers.use_fp8(
                self.fp8,
                module,
                plan,
                pipelined,
                self.mesh,
                self.root_device,
                self._groups.on_device,
                frees_weights=self.optimizer.frees_parameters,
            )
        if self.kernels.compile_layers:
            plan = pipelined_models.plan_of(module, self.plan)
            run.compiled_layers = compiled_layers.compile_layers(self.kernels, module, plan, pipelined, self.mesh)
        if trainer.state.fn == TrainerFn.FITTING:
            is_synced = self._layer_sync is not None
            is_cut = bool(self.microbatch_size) or self.num_microbatches > 1
            if is_cut or self.mesh.pp.size > 1 or self.mesh.dp.size > 1:
                model_checks.warn_of_gradient_hooks(module, self.mesh)
            if is_cut or (self.mesh.dp.size > 1 and not is_synced):
                model_checks.warn_of_batch_statistics(module, self.mesh, is_synced=is_synced)
            self._reset_optimizers_and_schedulers()
            with WholeShapes(module):
                self.setup_optimizers(trainer)
            has_master_weights = optimizers.has_master_weights(self.optimizer, self._plugin)
            optimizer_checks.require_separable(
                self.optimizers, self.optimizer, self.mesh, has_master_weights=has_master_weights
            )
            optimizer_checks.require_fitting(trainer.callbacks, self.optimizer, has_master_weights)  # type: ignore[attr-defined]
            self._last_fit.master_slots = MasterSlots()
            # The optimizers still hold the model's parameters, and not their master weights.
            run.stepped_models = optimizers.names_of_stepped(module, self.optimizers, self.mesh)
            for model in pipelined.values():
                # A run that was interrupted leaves what it had not learnt yet.
                model.end_step(is_skipped=True)
            hooks = optimizers.gradient_hooks(module, self.optimizers)
            if self.mesh.dp.size > 1 and trainer.accumulate_grad_batches > 1:
                model_checks.warn_of_accumulated_parts([name for name in hooks if name.endswith(".on_after_backward")])
            run.dp_comm = optimizers.make_data_parallel_comm(
                module,
                self.optimizers,
                self.optimizer,
                self._plugin,
                self.mesh,
                self._groups.on_device,
                self.root_device,
                pipelined_models.plan_of(module, self.plan),
            )
            # Those of no shards, and models in attributes of which torch knows nothing.
            while run.deferred:
                if (parameter := run.deferred.pop()()) is not None:
                    materialize(parameter)
            self._plugin.begin(
                run.dp_comm,
                self.loss_scale,
                self.optimizers,
                self._before_step,
                self._after_step,
                has_hooks=bool(hooks),
            )
            if self.mesh.world.size > 1 and hooks:
                run.gradient_check = HookCheck(run.dp_comm.gradients, hooks, GRADIENTS)
            # A look at all weights after each step would wait for gathers that the next forward hides, or gather them.
            is_seen = self.mesh.world.size > 1 and not self.optimizer.overlap_param_gather
            is_seen &= self.optimizer.gather_for_hooks
            if is_seen and (hooks := optimizers.weight_hooks(module)):
                run.weight_check = HookCheck(run.dp_comm.gradients, hooks, WEIGHTS)
        self.setup_precision_plugin()
        if not self.is_distributed:
            # Model-parallel ranks log the same values, but Lightning sees several processes and advises to sync.
            warnings.filterwarnings("ignore", "It is recommended to use .*sync_dist=True", PossibleUserWarning)
        run.synced_metrics += metric_sync.sync_metrics_over(module, self.mesh.dp)
        schedule = self.pipeline.schedule_of(pp=self.mesh.pp.size, vp=self.mesh.sizes.vp, microbatches=1)
        if self.mesh.pp.size > 1 and spec_of(schedule.name).splits_backward:
            run.lent_linears = [lend(linear) for linear in plain_linears(pipelined)]
            of_ranks = collectives.gather_objects(whole_backwards(pipelined), self.mesh.pp)
            model_checks.tell_whole_backwards([name for names in of_ranks for name in names], schedule.name)
        run.steps = Steps(
            trainer=trainer,
            module=module,
            pipelined=pipelined,
            mesh=self.mesh,
            device=self.root_device,
            lanes=run.connections.lanes,
            cutting=Cutting(number=self.num_microbatches, size=self.microbatch_size),
            pipeline=self.pipeline,
            dp_comm=run.dp_comm,
            loss_scale=self._plugin.loss_scale,
            log_dtype=torch.promote_types(compute_dtype(str(self.precision_plugin.precision)), torch.float32),
            prefetch=run.document_prefetch,
            loaders=run.loader_sync,
        )
        if run.dp_comm is not None and run.dp_comm.master_weights is not None and run.steps.uses_schedule:
            readers = optimizers.late_gradient_readers(module, self.optimizers)
            model_checks.warn_of_late_readers([name for name in readers if name.endswith(".on_before_zero_grad")])
        prefetch = run.document_prefetch
        if prefetch is not None and prefetch.cost is None:
            with self.whole_weights():
                prefetch.cost = measured_cost.of_module(
                    module, prefetch.config, self.root_device, self._plugin.train_step_context
                )

    def _make_document_prefetch(self, trainer: pl.Trainer, config: DynamicContextConfig) -> DynamicContext:
        routing = self._require_run().connections.document_routing
        assert routing is not None
        return DynamicContext(
            config,
            self.mesh,
            routing,
            num_wanted=lambda: trainer.fit_loop.max_batches,
            schedule_of=partial(self.pipeline.schedule_of, pp=self._pp, vp=self._vp),
            device=self.root_device,
        )

    @property
    def _saver(self) -> CheckpointSaver:
        return self._require_connections().saver

    @property
    def _master_slots(self) -> MasterSlots:
        return self._last_fit.master_slots if self._dp_comm is None else MasterSlots.of(self._dp_comm)

    def whole_weights(self) -> AbstractContextManager[None]:
        """A block, between steps, in which this rank has all of its weights, to be read and written in place."""
        return nullcontext() if self._dp_comm is None else self._dp_comm.whole_weights()

    def restore_networks(self) -> None:
        """Makes the networks that ranks cut for the last run what they were before it, whole in host memory.

        A run that ends without an exception does this by itself, but for a model of which a rank makes, or reads from
        files, what it keeps alone (`hf.new_unchanged`, `hf.load_unchanged`): the whole may be too large for it.
        Then, and after an exception, every rank calls this once the run has ended (`trainer.fit(...)`). Each holds the
        whole of each network then, with its own classes, forward and modules: it can be called, saved by its own
        methods and fitted on another layout. Raises RuntimeError within a run, where a model was built as the part of
        a rank, and where a fit that failed has left weights in shards.
        """
        module = self._require_module()
        if self._run is not None:
            raise RuntimeError(
                "restore_networks() was called within a run, whose ranks train parts of the networks; call it once "
                "the Trainer's fit, validate, test or predict has returned"
            )
        optimizer_checks.require_values(module, self._saver.world)
        self._last_fit.restore_networks(module, self.optimizers, self._saver.world)

    @property
    def _dp_comm(self) -> DataParallelComm | None:
        return None if self._run is None else self._run.dp_comm

    @property
    def _plugin(self) -> MegatronPrecision:
        assert isinstance(self.precision_plugin, MegatronPrecision)
        return self.precision_plugin

    @override
    def process_dataloader(self, dataloader: object) -> object:
        run, trainer = self._run, self._require_module().trainer
        if run is None:
            # Loaders that are set up by hand belong to no run; those of a run are set up again when it begins.
            return dataloader
        checks.require_cuttable(trainer, dataloader, self.num_microbatches, self.microbatch_size)
        dataloader = data_position.unwrapped(dataloader)
        if run.cuts_loaders and run.loader_sync is not None and isinstance(dataloader, DataLoader):
            dataloader = run.loader_sync.cut(dataloader, trainer, is_planned=run.document_prefetch is not None)
        dataloader = initial_sync.seed_workers_by_dp_rank(dataloader, self.mesh.dp)
        if trainer.state.fn == TrainerFn.FITTING:
            dataloader = run_state.wrap(
                dataloader, trainer, self.mesh, self._last_fit.resume_state, run.document_prefetch
            )
        if trainer.training:
            return dataloader
        # Not those of the steps: Lightning's batch size finder sets up loaders in its hook `setup`, before them.
        linked = expert_replicas.linked_dp_ranks(self._require_module(), self.mesh)
        # Outside of a fit all ranks have whole weights.
        is_sharded = self.optimizer.shards_parameters and trainer.state.fn == TrainerFn.FITTING
        if is_sharded or (is_stream(dataloader) and not trainer.predicting):
            return join_uneven(dataloader, self.mesh.dp, self.root_device, share_experts=linked.size > 1)
        return join_uneven(dataloader, linked, self.root_device)

    @override
    def on_train_start(self) -> None:
        if self._last_fit.resume_state is not None:
            self._last_fit.resume_state.start_training(self._require_module().trainer)

    @override
    def on_validation_start(self) -> None:
        if self._last_fit.resume_state is not None:
            self._last_fit.resume_state.start_validation(self._require_module().trainer)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._last_fit.resume_state is not None:
            self._last_fit.resume_state.is_over = True
            self._last_fit.resume_state = None

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> Steps:
        """Steps of the run; raises RuntimeError before `setup`."""
        if self._run is None or self._run.steps is None:
            raise RuntimeError("steps run between the start and the end of fit, validate, test or predict")
        return self._run.steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.train(self.precision_plugin.train_step_context, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.evaluate("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.evaluate("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        plugin, module = self.precision_plugin, self.lightning_module
        closure_loss = plugin.pre_backward(closure_loss, module)
        self.steps.backward(
            closure_loss,
            lambda loss: plugin.backward(loss, module, optimizer, *args, **kwargs),
            reduce_now=self._require_run().is_synchronised,
        )
        run = self._require_run()
        if run.is_synchronised:
            self.steps.dp_comm.show_gradients()
            if run.gradient_check is not None:
                run.gradient_check.begin()
        elif module.automatic_optimization:
            self.steps.dp_comm.end_without_step()
        return plugin.post_backward(closure_loss, module)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        run, module = self._require_run(), self._require_module()
        self._plugin.has_stepped = False
        result = super().optimizer_step(optimizer, *args, **kwargs)
        if self._plugin.fp8_layers is not None:
            self._plugin.fp8_layers.end_step()
        if not self._plugin.has_stepped:
            self.steps.dp_comm.end_without_step()
            run.end_step_of_models(module, self.optimizers, optimizer, has_stepped=False)
        if self._plugin.has_skipped:
            run.skipped_step_schedulers.hold(self.lr_scheduler_configs)
        run.num_steps += 1
        every, step = self.optimizer.check_replicas_every_n_steps, module.trainer.global_step + 1
        if (every > 0 and step % every == 0) or (not every and run.num_steps <= NUM_CHECKED):
            run.check_replicas(step)
        return result

    def _before_step(self, optimizer: Optimizer) -> int:
        """Does what precedes an optimizer's step, whoever takes it; returns the step's number."""
        run, step = self._require_run(), self._require_module().trainer.global_step
        if run.weight_check is not None:
            run.weight_check.end(step)
        if run.gradient_check is not None:
            stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            run.gradient_check.end(step, stepped)
        return step

    def _after_step(self, optimizer: Optimizer) -> None:
        """What follows an optimizer's step, whoever took it."""
        run, module = self._require_run(), self._require_module()
        if not module.automatic_optimization:
            # The same training_step may go on with another forward.
            self.steps.dp_comm.gather_all()
        run.end_step_of_models(module, self.optimizers, optimizer, has_stepped=True)
        if run.weight_check is not None:
            if run.weight_check.is_due:
                self.steps.dp_comm.gather_all()
            run.weight_check.begin()

    @override
    def batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
        # Lightning's first call of a strategy after it has stepped, or not stepped, the schedulers. Not the
        # batches of a validation in between: some schedulers are stepped after it.
        if self._run is not None and self._require_module().trainer.training:
            self._run.skipped_step_schedulers.let_go()
        return super().batch_to_device(*args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Leaves gradients on their ranks inside the block: the batch only accumulates."""
        run = self._require_run()
        run.is_synchronised = False
        try:
            yield
        finally:
            run.is_synchronised = True

    @property
    def gradient_norm(self) -> Tensor | None:
        """Norm of the whole model's gradient before the last clipping, []; None where nothing was clipped yet."""
        return self._plugin.gradient_norm

    def set_step_hook(self, step_hook: StepHook | None) -> None:
        """Sets the hook that is called around what this rank does in a training step; None: no hook."""
        self._plugin.step_hook = step_hook
        self.steps.set_step_hook(step_hook)

    # --- collectives that Lightning and its callbacks ask for -------------------------------------------------------

    @override
    def barrier(self, name: str | None = None) -> None:
        self.refuse_in_schedule("strategy.barrier")
        if name == "run-stage" and self._run is not None and self._run.preemption is not None:
            # Lightning's first call of a strategy after it has registered its signal handlers.
            self._run.preemption.take_over()
        if self._connections is not None:
            collectives.barrier(self.mesh.world)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.refuse_in_schedule("strategy.broadcast")
        return obj if self._connections is None else collectives.broadcast_object(obj, self.mesh.world, src)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """The tensor reduced over data-parallel ranks: model-parallel ranks hold copies, not further terms."""
        self.refuse_in_schedule("strategy.reduce")
        if not isinstance(tensor, Tensor) or self._connections is None or group is REDUCED:
            return tensor
        return reduced(tensor, self.mesh.dp, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._connections is None:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        total = int(collectives.all_reduce(votes, self.mesh.world))
        return total == self.mesh.world.size if all else total > 0

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all data-parallel ranks: [dp, *shape]."""
        self.refuse_in_schedule("strategy.all_gather")
        axis = self.mesh.dp if self._connections is not None else Mesh.single().dp
        if axis.size == 1:
            # Lightning without processes adds no dim either.
            return tensor
        if sync_grads:
            return differentiable.all_gather(tensor.unsqueeze(0), axis)
        with torch.no_grad():
            return collectives.all_gather(tensor.unsqueeze(0), axis)

    def require_gradients(self, what: str) -> None:
        """Raises RuntimeError where `what`, which talks over all ranks, is called within a schedule, or where gradients
        of a batch that only accumulates are not summed over data-parallel ranks yet."""
        self.refuse_in_schedule(what)
        if not self._require_run().is_synchronised:
            raise RuntimeError(
                f"{what} was called for a batch that only accumulates (accumulate_grad_batches), whose gradients are "
                "not summed over data-parallel ranks yet; call it in on_before_optimizer_step"
            )

    def refuse_in_schedule(self, what: str) -> None:
        """Raises RuntimeError where `what`, which talks over all ranks, is called while a schedule runs."""
        if self._run is not None and self._run.steps is not None and self._run.steps.is_scheduled:
            raise RuntimeError(
                f"{what} was called inside training_step while a pipeline schedule runs; the stages are at "
                "different microbatches and would wait for each other for ever. Call it in a hook around the step, or "
                'use MegatronStrategy(pipeline=PipelineConfig(mode="collective"))'
            )

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None and self.checkpoint.kind == "directory":
            raise TypeError(
                "MegatronStrategy.save_checkpoint takes no storage_options for a directory, which its path alone says "
                'where to write; a CheckpointIO plugin takes them for files: CheckpointConfig(kind="file")'
            )
        hook_dictionary.require_unchanged_optimizers(checkpoint, len(self.optimizers))
        self._refuse_to_save_alone()
        if self._dp_comm is not None:
            self._dp_comm.synchronize()
        module = self._require_module()
        # A module that is only connected has no Trainer, and no progress.
        if "optimizer_states" in checkpoint and module._trainer is not None:
            run_state.save_into(checkpoint, module.trainer, self.mesh, self._saver.world, self._last_fit.resume_state)
            checkpoint[run_history.KEY] = list(self._last_fit.history)
        local_checkpoint = None if self._run is None else self._run.local_checkpoint
        if local_checkpoint is not None and local_checkpoint.is_own(filepath):
            local_checkpoint.save(filepath, LocalState.of(checkpoint, module, self.optimizers, self._master_slots))
            return
        path, world = self.broadcast(str(filepath)), self._saver.world
        optimizers, slots, mesh = self.optimizers, self._master_slots, self.mesh
        contents.name_classes(checkpoint)
        if self.checkpoint.kind == "file":
            io = self.checkpoint_io
            single_file.save(path, checkpoint, module, optimizers, slots, mesh, world, io, storage_options)
        else:
            checkpoint_dict.save(path, checkpoint, module, optimizers, slots, mesh, self._saver)

    def wait_for_checkpoint(self) -> None:
        """Returns when no checkpoint is being written any more. Raises RuntimeError where the last one could not be.

        Every rank calls it.
        """
        self._saver.wait()

    def _refuse_to_save_alone(self) -> None:
        """Raises RuntimeError where a callback saves after a failure of this rank alone: it would wait for ever."""
        run = self._run
        if run is None or run.watch is None or run.has_failed or run.is_leaving:
            return
        if not self._require_module().trainer.interrupted or run.watch.meets():
            return
        failure = sys.exception()
        assert failure is not None
        self.on_exception(failure)
        raise RuntimeError("no checkpoint was written on the failure: the other ranks did not fail too") from failure

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        module, run = self.lightning_module, self._run
        if module is None or module._trainer is None:
            # There is no run, and no layout to cut for: Lightning's `connect` alone attaches no Trainer.
            return single_file.load_alone(str(checkpoint_path), self.checkpoint_io, weights_only)
        if run is not None:
            run.agree_to_load(str(checkpoint_path))
            # After a run nobody would make whole again what is cut.
            pipelined_models.cut_late_networks(module, self.mesh, self.plan)
        model_checks.require_own_mesh(module, self.mesh)
        if self._dp_comm is not None:
            # What the checkpoint lacks stays as it is, and the rest is loaded into the module's own weights.
            self._dp_comm.gather_all()
        if compute_dtype(str(self.precision_plugin.precision)) == torch.float64:
            # Lightning converts the module after this; what it has as float32 would be rounded to that.
            self.precision_plugin.convert_module(module)
        # Lightning's batch size finder draws the name of its checkpoint at random, another one on each rank.
        path, world = self.broadcast(str(checkpoint_path)), self._saver.world
        self._saver.wait()
        strict = module.strict_loading
        try:
            checkpoint = self._newest_local(path, weights_only)
            if checkpoint is None:
                io = self.checkpoint_io
                checkpoint = checkpoint_dict.load(
                    path, module, self._master_slots, self.mesh, world, io, weights_only, strict=strict
                )
        except ValueError as error:
            # What is there is no checkpoint, is damaged, or is of another module: all ranks find the same.
            raise ConfigurationError(str(error)) from error
        contents.know_classes(checkpoint, module.trainer.callbacks)  # type: ignore[attr-defined]
        if run is None:
            return checkpoint
        if module.trainer.state.fn == TrainerFn.FITTING:
            checkpoint_dict.require_optimizers(checkpoint, path)
            self._last_fit.history = run_history.begun(
                run_history.fits_of(checkpoint), checkpoint["global_step"], world
            )
        self._last_fit.resume_state = run_state.ResumeState.from_checkpoint(checkpoint, module.trainer, self.mesh)
        if not single_file.is_file(path, world):
            hyper_parameters.warn_after_cli(module, checkpoint, path)
        return checkpoint

    def _newest_local(self, path: str, weights_only: bool | None) -> dict[str, Any] | None:
        """Local checkpoint of a fit that is newer than the one at the path; None where there is none."""
        module = self._require_module()
        local_checkpoint = None if self._run is None else self._run.local_checkpoint
        if local_checkpoint is None or module.trainer.state.fn != TrainerFn.FITTING:
            return None
        world = self._saver.world
        if single_file.is_file(path, world):
            meta = single_file.read_progress(path, self.checkpoint_io, weights_only, world)
        else:
            meta = read_on_first_rank(partial(read_meta, path), world)
        return local_checkpoint.newest(path, meta, self._last_fit.history, module)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self._require_module()
        if hook_dictionary.has_load_hook(module):
            weights = hook_dictionary.fitted(checkpoint["state_dict"], module, self._saver.world, strict=strict)
            checkpoint = {**checkpoint, "state_dict": weights}
        super().load_model_state_dict(checkpoint, strict)
        if self._dp_comm is not None and self._dp_comm.master_weights is not None:
            self._dp_comm.master_weights.load(checkpoint["state_dict"])

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        module, world = self._require_module(), self._saver.world
        saved = checkpoint["optimizer_states"]
        if isinstance(saved, SavedOptimizers) and isinstance(saved.source, LocalState):
            saved.source.load_optimizers(saved.rests, module, self.optimizers, self._master_slots)
            if self._dp_comm is not None and self._dp_comm.master_weights is not None:
                # They were loaded, too.
                self._dp_comm.master_weights.note()
            return
        checkpoint_dict.load_optimizers(checkpoint, module, self.optimizers, self._master_slots, self.mesh, world)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        # Taken from the optimizer itself in `save_checkpoint`, slice by slice; nothing is gathered here.
        return hook_dictionary.unread_optimizer()

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if not self.is_global_zero:
            return
        if self.checkpoint.kind == "file" and not Path(filepath).is_dir():
            # Whatever wrote the file knows where it is.
            self.checkpoint_io.remove_checkpoint(filepath)
        else:
            self._saver.remove(str(filepath))

    def _require_run(self) -> ActiveRun:
        if self._run is None:
            raise RuntimeError(
                "no run is under way: gradients are summed, and optimizers stepped, between the start and the end of "
                "Trainer.fit, and steps evaluate within validate, test and predict"
            )
        return self._run

    def _require_module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # --- the end ----------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        if (module := self.lightning_module) is not None:
            tell_what_was_held(exception, module, self.optimizers, self.global_rank)
        if self._run is not None:
            self._run.fail(exception)

    @override
    def teardown(self) -> None:
        """Ends the run, and makes networks whole that each rank held whole before it.

        Not collective after a failure: a rank may be gone.
        """
        if self._plugin.fp8_layers is not None:
            # Not dropped: a checkpoint may still be saved.
            self._plugin.fp8_layers.release()
        run, module = self._run, self._lightning_module
        try:
            if run is not None:
                run.end(module, self._last_fit)
                self._run = None
            self._plugin.end()
            if run is not None and module is not None and self._syncs_layers(module.trainer):
                assert self._layer_sync is not None
                self.model = self._layer_sync.revert(module)
            if module is not None and any(one.is_meta or is_deferred(one) for one in module.parameters()):
                # It cannot move to the host, and a failure to do so would hide why the run ended before it had weights.
                self._lightning_module = None
            super().teardown()
            self._lightning_module = module
            if run is not None and module is not None and run.has_whole_networks(module):
                self._last_fit.restore_networks(module, self.optimizers, self._saver.world)
        except BaseException as error:
            # The others wait for what this rank has of the networks, and once the watch has ended nobody tells them.
            if run is not None:
                run.fail(error)
            raise
        finally:
            if run is not None and run.watch is not None:
                run.watch.stop()

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Process groups, threads and processes stay where they are.
        of_this_process: dict[str, Any] = {"_connections": None, "_host": None, "_run": None, "_last_fit": FitRecord()}
        if isinstance(self._launcher, CheckingLauncher):
            of_this_process["_launcher"] = None
        return super().__getstate__() | of_this_process
