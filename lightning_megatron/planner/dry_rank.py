"""One rank of a run, built by the package's own code: model, gradients, master weights and optimizer, on any device.

On the meta device its tensors have no values, so that a rank of any model is built in a moment. Without Lightning, all
steps of the strategy between `configure_model` and the first training step run here in the same order.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.any_module.loss_count import mean_count
from lightning_megatron.any_module.model_parts import ModuleParts
from lightning_megatron.any_module.pipelined_modules import (
    names_inside,
    pipelined_modules,
    plain_linears,
    stages_by_name,
)
from lightning_megatron.comm.p2p import Payload, TensorMeta
from lightning_megatron.context.balance import RankGroup
from lightning_megatron.context.context_layout import cut
from lightning_megatron.context.document_exchange import SEGMENTS
from lightning_megatron.context.documents import NO_DOCUMENT
from lightning_megatron.mesh import Axis, Mesh, NewGroup, StageLayout
from lightning_megatron.models import BertConfig, BertModel, GPTModel, LlavaConfig, LlavaModel, T5Config, T5Model
from lightning_megatron.models.kernels import set_kernels
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.optim.owned_weights import OwnedWeights
from lightning_megatron.optim.part_gathers import ModelParts, first_parts
from lightning_megatron.optim.separable import separable_faults
from lightning_megatron.optim.update_scope import is_elementwise, update_scope_of
from lightning_megatron.pipeline import microbatches
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.pipeline.ragged import Ragged
from lightning_megatron.pipeline.registry import spec_of
from lightning_megatron.planner.balanced_batch import BalancedBatch
from lightning_megatron.planner.fake_process_group import fake_mesh
from lightning_megatron.planner.memory_tracker import MemoryTracker
from lightning_megatron.planner.run import Run, RunSettings, UnmeasuredError
from lightning_megatron.planner.step_work import choose_foreach, states_of
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.tensor import weight_gradients
from lightning_megatron.tensor.weight_gradients import WeightGradients
from lightning_megatron.tensor.whole_linear import lend
from lightning_megatron.transformer import cost, recompute
from lightning_megatron.transformer.fp8_layers import TorchFp8Layers, use_torch
from lightning_megatron.transformer.lora import add_lora
from lightning_megatron.transformer.moe import MoELayer

Batch = dict[str, Any]
_LOW = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
TRUE_DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
"""Dtypes of all weights of a run, where that is not float32, by the precision."""
_GRADIENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The ready LightningModules call their model so, and its parameters' names begin with it.
_PREFIX = "model"


class Trained(Protocol):
    """What a run trains, on any of its ranks."""

    def build(self, mesh: Mesh, device: torch.device) -> nn.Module:
        """A module that holds the part of this rank."""
        ...

    def use_fp8(self, own: nn.Module, config: Fp8Config, mesh: Mesh, device: torch.device) -> TorchFp8Layers:
        """Lets the layers of the module `own` multiply in FP8."""
        ...

    def layers(self, own: nn.Module) -> Mapping[str, Sequence[str]]:
        """Names of the layers of each network in the module `own` that is not pipelined, by the network's name."""
        ...

    @property
    def layer_kinds(self) -> Mapping[str, Hashable]:
        """What the layers are that a network's own forward calls, by their names in the module and in order; those of
        one kind do the same. Empty where nobody knows."""
        ...

    def names_by_rank(self, own: nn.Module) -> list[list[str]]:
        """Names of the parameters on each rank of pp, of which this one has the module `own`."""
        ...

    def output_metas(self, own: nn.Module) -> dict[int, TensorMeta]:
        """Shapes of the tensors that each stage but the last sends to the next."""
        ...

    def batch(self, num_samples: int, device: torch.device) -> Batch:
        """A batch of so many samples in which every token has a loss; on the meta device it has no values."""
        ...

    def loss(self, own: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch [], from the call that a training step makes."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank: its part of what is trained, gradients, master weights and optimizer."""

    run: RunSettings
    mesh: Mesh
    device: torch.device
    trained: Trained
    module: nn.Module
    models: dict[str, PipelineModule]
    """The pipelined models of the module, by name."""
    gradients: Gradients
    master_weights: MasterWeights | None
    dp_comm: DataParallelComm
    optimizer: Optimizer
    weight_gradients: WeightGradients
    fp8: TorchFp8Layers | None

    @property
    def stepped(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def on_host(self) -> list[Tensor]:
        """Tensors in host memory: main weights and gradients, and moments as soon as there are some."""
        main = [] if self.master_weights is None else self.master_weights.on_host
        storages = {tensor.untyped_storage()._cdata for tensor in main}
        stepped = [x for x in self.optimizer.state if x.untyped_storage()._cdata in storages]
        states = [value for x in stepped for value in self.optimizer.state[x].values()]
        return [*main, *(value for value in states if isinstance(value, Tensor) and value.dim())]

    def moments(self) -> Iterator[Tensor]:
        """Tensors of the optimizer's state, which exist after its first step."""
        return states_of(self.optimizer)


def build_rank(run: RunSettings, mesh: Mesh, new_group: NewGroup, device: torch.device, trained: Trained) -> Rank:
    """The rank of a mesh, ready for its first step. The run must have no errors; raises UnmeasuredError where its
    optimizer cannot step what a rank holds."""
    module = trained.build(mesh, device)
    models = pipelined_modules(module)
    fp8 = None
    if run.fp8 is not None:
        fp8 = trained.use_fp8(module, run.fp8, mesh, device)
        if run.optimizer.frees_parameters:
            fp8.cast_anew()
    optimizer = run.make_optimizer(module)
    choose_foreach(optimizer)
    config, low = run.optimizer, _LOW.get(run.precision)
    has_master_weights = config.needs_master_weights or low is not None
    faults, _ = separable_faults([optimizer], config, mesh, has_master_weights=has_master_weights)
    if faults:
        raise UnmeasuredError("\n".join(faults))
    parts = ModuleParts(module, trained.layers(module) if config.shards_parameters else {})
    gradients = Gradients(
        module.named_parameters(),
        names_inside(module),
        mesh,
        new_group,
        device,
        config=config,
        stages=stages_by_name(module),
        dtype=_GRADIENTS.get(config.grad_dtype),
        no_split=not is_elementwise(optimizer, config.update_scope),
        low=low,
        names_by_rank=trained.names_by_rank(module),
        part_of=first_parts(parts.parameters).get,
        kept=[parameter for group in optimizer.param_groups for parameter in group["params"]],
        casts={} if fp8 is None else fp8.weight_casts(module),
    )
    master_weights = MasterWeights(gradients, [optimizer]) if has_master_weights else None
    sharded = None
    if master_weights is not None and master_weights.sharded:
        sharded = ModelParts.of(
            master_weights.sharded, parts.parameters, parts.stages, parts.lasts, layers=parts.layers
        )
    owned = OwnedWeights([optimizer] if update_scope_of(optimizer, config.update_scope) == "parameter" else ())
    dp_comm = DataParallelComm(gradients, master_weights, parts.parameters, parts=sharded, owned=owned)
    if config.overlap_param_gather or sharded is not None:
        parts.hook(dp_comm)
    if mesh.pp.size > 1 and spec_of(run.schedule.name).splits_backward:
        for linear in plain_linears(models):
            lend(linear)
    shared = WeightGradients(dp_comm.grad_view)
    weight_gradients.share(module, shared)
    return Rank(
        run=run,
        mesh=mesh,
        device=device,
        trained=trained,
        module=module,
        models=models,
        gradients=gradients,
        master_weights=master_weights,
        dp_comm=dp_comm,
        optimizer=optimizer,
        weight_gradients=shared,
        fp8=fp8,
    )


def in_prefix(model: PipelineModule) -> nn.Module:
    """A module that calls a model as the ready LightningModules do."""
    return nn.ModuleDict({_PREFIX: model})


def build_model(run: Run, mesh: Mesh, device: torch.device) -> PipelineModule:
    """This rank's part of the model, ready to train."""
    with device:
        model = _model(run, mesh)
        if run.trained.lora is not None:
            add_lora(model, run.trained.lora, seed=0)
    if (dtype := TRUE_DTYPES.get(run.precision)) is not None:
        model.to(dtype)
    recompute.set_recomputed(model, run.recompute)
    model.runner = recompute.RecomputeRunner(run.recompute, tp=mesh.tp, sp=mesh.sp)
    set_kernels(model, run.dry_kernels)
    if device.type == "meta":
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                layer.dispatcher.read = partial(_equal_counts, run, layer.config)
    return model


def _model(run: Run, mesh: Mesh) -> PipelineModule:
    config = run.model
    if isinstance(config, T5Config):
        return T5Model(config, mesh=mesh, seed=0)
    if isinstance(config, BertConfig):
        return BertModel(config, mesh=mesh, seed=0)
    if isinstance(config, LlavaConfig):
        llava = LlavaModel(config, mesh=mesh, seed=0)
        llava.freeze(*run.trained.frozen)
        return llava
    return GPTModel(config, mesh=mesh, seed=0)


def _equal_counts(run: Run, moe: MoEConfig, counts: Tensor, shape_TK: torch.Size) -> Tensor:
    """Tokens by expert [..., E], which a meta tensor does not know: all experts get equally many, within a capacity of
    complete sequences."""
    sequence, num_ranks, num_tokens = run.lengths.sequence, run.sizes.tp * run.sizes.cp, shape_TK[0]
    chosen = cost.expert_rows(
        moe,
        run.sizes,
        own=num_tokens,
        batch=num_tokens * num_ranks / sequence,
        sequence=sequence,
        is_packed=run.lengths.are_packed,
    )
    share, rest = divmod(math.ceil(chosen), counts.shape[-1])
    even = torch.full(counts.shape, share)
    even[..., :rest] += 1
    return even


# --- a call of the model ----------------------------------------------------------------------------------------------


def call_context(run: RunSettings, device: torch.device) -> AbstractContextManager[Any]:
    """Context of a model call under the run's precision, as Lightning's plugins enter it."""
    stack = ExitStack()
    if (low := _LOW.get(run.precision)) is not None:
        # A meta tensor goes by the host's autocast.
        stack.enter_context(torch.autocast("cpu" if device.type == "meta" else device.type, dtype=low))
    elif (dtype := TRUE_DTYPES.get(run.precision)) is not None:
        stack.enter_context(_default_dtype(dtype))
    return stack


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def lower_weights(module: nn.Module, run: RunSettings) -> None:
    """Gives weights the precision that master weights leave them in."""
    if (low := _LOW.get(run.precision)) is not None:
        for parameter in module.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.data = parameter.data.to(low)


def _make_batch(run: Run, num_samples: int, device: torch.device) -> Batch:
    """A batch of so many samples in which every token has a loss; packed samples have one document each. On the meta
    device it has no values."""
    config, lengths = run.model, run.lengths

    def tokens(length: int) -> Tensor:
        if device.type == "meta":
            return torch.empty(num_samples, length, dtype=torch.int64, device=device)
        return torch.randint(config.vocab_size, (num_samples, length), device=device)

    num_labels = lengths.decoder_sequence or lengths.sequence
    batch: Batch = {"labels": tokens(num_labels), "loss_mask": torch.ones(num_samples, num_labels, device=device)}
    if isinstance(config, T5Config):
        stacks = {"encoder": tokens(lengths.sequence), "decoder": tokens(num_labels)}
        batch |= {f"{stack}_tokens": ids for stack, ids in stacks.items()}
        if lengths.are_packed:
            batch |= {f"{stack}_segments": torch.zeros_like(ids) for stack, ids in stacks.items()}
        return batch
    batch["tokens"] = tokens(lengths.sequence)
    if lengths.are_packed:
        batch["segments"] = torch.zeros_like(batch["tokens"])
    if isinstance(config, BertConfig):
        batch["padding_mask"] = torch.ones_like(batch["tokens"], dtype=torch.bool)
        if config.num_token_types:
            batch["token_types"] = torch.zeros_like(batch["tokens"])
        if config.add_binary_head:
            batch["sentence_order_labels"] = torch.zeros(num_samples, dtype=torch.int64, device=device)
    if isinstance(config, LlavaConfig):
        vision = config.vision
        shape = (num_samples * lengths.images, vision.num_channels, vision.image_size, vision.image_size)
        batch["images"] = Ragged(torch.empty(shape, device=device), [lengths.images] * num_samples)
        if device.type != "meta":
            batch["tokens"] = batch["tokens"] % (config.vocab_size - 1) + 1
            batch["tokens"][:, : lengths.images * config.features_per_image] = config.image_token
    return batch


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """One microbatch of a rank."""

    batch: Batch
    num_copies: int
    """Number of ranks that run it together."""
    group: Axis | None = None
    """Axis of these ranks; None: cp."""
    documents: Tensor | None = None
    """Names of its documents, where they come from other ranks."""


def microbatches_of(own: Rank) -> list[Microbatch]:
    """The microbatches of a batch on a rank."""
    run, mesh, device = own.run, own.mesh, own.device
    if run.balanced is not None:
        groups = run.balanced.plan.groups_of(mesh.axis("dp+cp").rank)
        return [_packed(run.balanced, group, mesh, device) for group in groups]
    batch = own.trained.batch(run.num_microbatches * run.micro_batch_size, device)
    return [Microbatch(batch=one, num_copies=mesh.cp.size) for one in microbatches.split(batch, run.num_microbatches)]


def _packed(step: BalancedBatch, group: RankGroup, mesh: Mesh, device: torch.device) -> Microbatch:
    """The documents of a group, packed as by `context.document_exchange`; only their bounds have values."""
    lengths = torch.tensor(step.lengths_of(group), dtype=torch.int64)
    segments = torch.arange(len(lengths)).repeat_interleave(lengths)
    if not group.documents:
        segments = torch.full((1,), NO_DOCUMENT)
    tokens, labels = (torch.zeros(1, len(segments), dtype=torch.int64, device=device) for _ in range(2))
    return Microbatch(
        batch={
            "tokens": tokens,
            "labels": labels,
            "loss_mask": torch.ones(1, len(segments), device=device),
            SEGMENTS: segments.unsqueeze(0).to(device),
        },
        num_copies=group.size,
        group=mesh.context_group(group.size),
        documents=torch.tensor([[one, NO_DOCUMENT] for one in group.documents], dtype=torch.int64).view(-1, 2),
    )


def hidden_tokens(step: BalancedBatch, group: RankGroup, mesh: Mesh) -> int:
    """Number of tokens of a group's microbatch in the hidden state of a rank."""
    outer, inner = (1, group.size) if mesh.sizes.context_groups_by_heads else (group.size, 1)
    return -(-cut(step.lengths_of(group), ring_size=outer, ulysses_size=inner).num_rows // mesh.sp.size)


def call(own: Rank, microbatch: Microbatch) -> Tensor:
    """The sum of the losses of a microbatch, as far as it is this rank's among those that run it together."""
    for model in own.models.values():
        model.loss_weight = None
        _set_group(model, microbatch)
    with call_context(own.run, own.device):
        loss = own.trained.loss(own.module, microbatch.batch)
    counts = (mean_count(loss), *(model.loss_weight for model in own.models.values()), own.run.micro_batch_size)
    weight = torch.as_tensor(next(one for one in counts if one is not None), device=own.device)
    return loss * (weight / microbatch.num_copies).to(loss.dtype)


def _set_group(model: PipelineModule, microbatch: Microbatch) -> None:
    """Sets the ranks that run the next microbatch, and its documents."""
    model.context_group, model.draws.documents = microbatch.group, microbatch.documents


# --- all stages -------------------------------------------------------------------------------------------------------


class FullModel:
    """One of the package's models, as the ready LightningModules train it.

    It is built once over all stages, on the meta device, as on a rank that holds all of them.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        device, sizes = torch.device("meta"), run.sizes
        one_stage = replace(
            sizes, world=sizes.world // sizes.pp, pp=1, vp=1, placement="loop", stage_layout=StageLayout()
        )
        with fake_mesh(one_stage, 0) as (mesh, _), MemoryTracker(device):
            model = build_model(run, mesh, device)
            lower_weights(model, run)
            names = {parameter: f"{_PREFIX}.{name}" for name, parameter in model.named_parameters()}
            self._names = [[names[p] for p in model.parameters_of(part)] for part in model.part_names]
            self._output_metas = _part_outputs(run, model, mesh, device) if sizes.num_stages > 1 else []

    def build(self, mesh: Mesh, device: torch.device) -> nn.Module:
        """A module that holds the part of this rank."""
        return in_prefix(build_model(self._run, mesh, device))

    def use_fp8(self, own: nn.Module, config: Fp8Config, mesh: Mesh, device: torch.device) -> TorchFp8Layers:
        """Lets the layers of the module `own` multiply in FP8."""
        models = {name: (model, model.part_names) for name, model in pipelined_modules(own).items()}
        return use_torch(models, config, tp=mesh.tp, replicas=mesh.axis("dp+cp"), pp=mesh.pp, device=device)

    def layers(self, own: nn.Module) -> Mapping[str, Sequence[str]]:
        """Nothing: the package's models are pipelined."""
        return {}

    @property
    def layer_kinds(self) -> Mapping[str, Hashable]:
        """Nothing: parts of the package's models are known."""
        return {}

    def names_by_rank(self, own: nn.Module) -> list[list[str]]:
        """Names of the parameters on each rank of pp, of which this one has the module `own`."""
        sizes = self._run.sizes
        by_rank: list[list[str]] = [[] for _ in range(sizes.pp)]
        for number, indices in enumerate(_stages(own)):
            by_rank[sizes.pp_rank_of(number)] += [name for index in indices for name in self._names[index]]
        return by_rank

    def output_metas(self, own: nn.Module) -> dict[int, TensorMeta]:
        """Shapes of the tensors that each stage but the last sends to the next."""
        return {number: self._output_metas[indices.stop - 1] for number, indices in enumerate(_stages(own)[:-1])}

    def batch(self, num_samples: int, device: torch.device) -> Batch:
        """A batch of so many samples in which every token has a loss; on the meta device it has no values."""
        return _make_batch(self._run, num_samples, device)

    def loss(self, own: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch [], from the call that a training step makes."""
        loss: Tensor = own.get_submodule(_PREFIX)(**batch)
        return loss


def _stages(own: nn.Module) -> tuple[range, ...]:
    return pipelined_modules(own)[_PREFIX].stages


def resized(meta: TensorMeta, num_tokens: int) -> TensorMeta:
    """Shapes of the tensors that a stage sends for so many tokens: hidden states are [T, H], the others scalars."""
    entries = [(name, (num_tokens, *shape[1:]) if shape else shape, dtype) for name, shape, dtype in meta.entries]
    return replace(meta, entries=tuple(entries))


@torch.no_grad()
def _part_outputs(run: Run, model: PipelineModule, mesh: Mesh, device: torch.device) -> list[TensorMeta]:
    """Shapes of the output of each part but the last; of equal layers only one runs."""
    metas: list[TensorMeta] = []
    known: dict[tuple[str, type[nn.Module], TensorMeta], tuple[TensorMeta, Payload]] = {}
    if run.balanced is not None:
        microbatch = _packed(run.balanced, run.balanced.plan.groups_of(0)[0], mesh, device)
    else:
        microbatch = Microbatch(batch=_make_batch(run, run.micro_batch_size, device), num_copies=mesh.cp.size)
    _set_group(model, microbatch)
    with call_context(run, device):
        with torch.enable_grad():
            # Layers that predict further tokens do so in training alone.
            hidden, context = model.prepare(**microbatch.batch)
        for name in model.part_names[:-1]:
            kind = (name.rpartition(".")[0], type(model.get_submodule(name)), TensorMeta.of(hidden))
            if kind not in known:
                hidden = model.run_part(name, hidden, context)
                known[kind] = TensorMeta.of(hidden), hidden
            meta, hidden = known[kind]
            metas.append(meta)
    return metas
