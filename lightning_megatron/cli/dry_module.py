"""A LightningModule on the ranks of a dry run: built and cut on the meta device, as the strategy does."""

import logging
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import fields, replace
from functools import cache, cached_property, partial
from math import gcd
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_megatron.any_module.cut_error import CutError
from lightning_megatron.any_module.cut_experts import expert_modules, token_dispatchers
from lightning_megatron.any_module.cut_model import CutModel, renumbered
from lightning_megatron.any_module.pipelined_modules import pipelined_modules
from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.comm.p2p import Payload, TensorMeta
from lightning_megatron.hf.later_weights import forget_left
from lightning_megatron.mesh import Mesh, Sizes, ambient
from lightning_megatron.models.kernels import set_kernels
from lightning_megatron.pipeline.layout import assign_alike
from lightning_megatron.pipeline.scheduled import ScheduledCall
from lightning_megatron.planner.dry_rank import TRUE_DTYPES, Batch, call_context, lower_weights
from lightning_megatron.planner.dry_run import global_rank, layers_or_links
from lightning_megatron.planner.fake_process_group import fake_mesh
from lightning_megatron.planner.memory_tracker import MemoryTracker
from lightning_megatron.planner.model_size import ModelSize
from lightning_megatron.planner.run import RunSettings, UnmeasuredError
from lightning_megatron.planner.shallow_stage import LayersDifferError, ShallowLayers, kinds_of_layers
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.tensor.weight_gradients import WeightGradients
from lightning_megatron.testing.telling import told
from lightning_megatron.trainer import ConfigurationError
from lightning_megatron.trainer.setup.early_model_checks import model_faults
from lightning_megatron.trainer.setup.fp8_layers import linears_of_networks
from lightning_megatron.trainer.setup.model_checks import loss_chunk_faults, share_recomputation
from lightning_megatron.trainer.setup.pipelined_models import cut_plain_networks, layers_of_networks, plan_of
from lightning_megatron.trainer.step.user_step import loss_of
from lightning_megatron.transformer.fp8_layers import TorchFp8Layers, tile_faults, use_torch
from lightning_megatron.transformer.recompute import RecomputeRunner, part_faults, recomputable_parts

META = torch.device("meta")
_NO_TRAINER = "You are trying to `self.log"


@contextmanager
def telling_model(does: str) -> Iterator[None]:
    """Raises UsageError, in a line that says what the model `does`, for whatever its code raises inside the block."""
    try:
        yield
    except (UsageError, CutError, NotImplementedError, UnmeasuredError):
        raise
    except ConfigurationError as error:
        raise UsageError(error.faults) from error
    except Exception as error:
        raise UsageError([f"the model {does}: {' '.join(told(error).split())}"]) from error


@contextmanager
def quiet() -> Iterator[None]:
    """A block without notes on how a module is made and cut, which every rank of every layout would write. What the
    module prints is no part of a report: it goes to where errors go."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(before)


class WholeModule:
    """A LightningModule before it is cut, on the meta device, and what is found of it once for all layouts."""

    def __init__(self, make: Callable[[], pl.LightningModule], plan: ModelPlan | None) -> None:
        self._make, self._given = make, plan
        self.names_by_rank: dict[Sizes, list[list[str]]] = {}
        """Names of the parameters on each rank of pp, as far as its ranks were built."""

    def on(self, device: torch.device) -> pl.LightningModule:
        """A new one on a device."""
        with telling_model("cannot be made on the meta device"), quiet():
            try:
                with device:
                    module = self._make()
                    module.configure_model()
            except ValueError as error:
                raise UsageError(str(error).splitlines()) from error
            if device == META:
                # A dry run has no values.
                forget_left(module)
            return module.to(device)

    @cached_property
    def module(self) -> pl.LightningModule:
        """The module, which nobody cuts."""
        return self.on(META)

    @cached_property
    def plan(self) -> ModelPlan:
        """How its networks are cut; which layers read what stands around them is found once."""
        plan = plan_of(self.module, self._given)
        return _FoundOnce(**{field.name: getattr(plan, field.name) for field in fields(ModelPlan)})

    @cached_property
    def layer_kinds(self) -> Mapping[str, Hashable]:
        """Kinds of its layers by name, where one network has layers that hand hidden states on to each other alone."""
        found = layers_of_networks(self.module, self.plan)
        if len(found) != 1 or self.plan.skip_connections or len(self.plan.layers) > 1:
            return {}
        [(network, layers)] = found.items()
        names = [f"{network}.{layer}" for layer in layers]
        return dict(zip(names, kinds_of_layers([self.module.get_submodule(name) for name in names]), strict=True))


class _FoundOnce(ModelPlan):
    """A plan that remembers the styles of networks, and which layers read what stands around them."""

    def styles_in(self, name: str, network: nn.Module) -> dict[str, str]:
        known = self.__dict__.setdefault("_styles", {})
        if name not in known:
            known[name] = super().styles_in(name, network)
        found: dict[str, str] = known[name]
        return found

    def readers_in(self, module: nn.Module, name: str, layers: Sequence[str]) -> dict[str, frozenset[int]]:
        known = self.__dict__.setdefault("_known", {})
        if name not in known:
            known[name] = super().readers_in(module, name, layers)
        found: dict[str, frozenset[int]] = known[name]
        return found


class DryModule:
    """What the training step of a LightningModule trains, on any rank of a run.

    `whole` makes the module, `make_batch` a batch of so many samples on a device.
    """

    def __init__(
        self,
        whole: WholeModule,
        make_batch: Callable[[int, torch.device], Batch],
        run: RunSettings,
    ) -> None:
        self.whole, self.batch, self._run = whole, make_batch, run

    def faults(self) -> list[str]:
        """Errors of the module on the run's ranks that show before it is cut."""
        sizes, module = self._run.sizes, self.whole.module
        faults = part_faults(self._run.recompute, recomputable_parts(module))
        if faults := faults + loss_chunk_faults(module, self._run.kernels):
            return faults
        uses_schedule = sizes.pp > 1 or self._run.num_microbatches > 1
        return model_faults(module, sizes, uses_schedule=uses_schedule, plan=self.whole.plan)

    def size(self) -> ModelSize:
        """Size of the largest network of the module, with the parameters of all."""
        module = self.whole.module
        numbers = [parameter.numel() for parameter in module.parameters()]
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        largest = max(
            module.children(), key=lambda child: sum(one.numel() for one in child.parameters()), default=module
        )
        return ModelSize(
            name=type(largest).__name__,
            parameters=sum(numbers),
            trained=trained,
            # Ranks share all modules of experts alike.
            num_experts=gcd(*(one.num_experts for _, one in expert_modules(module))) or 1,
            num_layers=max(len(layers_or_links(module)), 1),
        )

    def build(self, mesh: Mesh, device: torch.device) -> pl.LightningModule:
        """A module that holds the part of this rank."""
        try:
            with ambient(mesh):
                module = self.whole.on(device)
                cut_plain_networks(module, mesh, self.whole.plan)
            if (dtype := TRUE_DTYPES.get(self._run.precision)) is not None:
                module.to(dtype)
            share_recomputation(module, self._run.recompute, mesh)
            set_kernels(module, self._run.dry_kernels)
        except ValueError as error:
            raise UsageError(str(error).splitlines()) from error
        if device.type == "meta":
            for dispatcher in token_dispatchers(module):
                dispatcher.read = partial(_even_counts, dispatcher.num_experts)
            for model in pipelined_modules(module).values():
                if isinstance(model, CutModel):
                    model.compare = _nothing_differs
        return module.train()

    def use_fp8(self, own: nn.Module, config: Fp8Config, mesh: Mesh, device: torch.device) -> TorchFp8Layers:
        """Lets the linears of the layers multiply in FP8."""
        linears = linears_of_networks(own, plan_of(own, self.whole.plan), config)
        if faults := tile_faults((), config, linears):
            raise UsageError(faults)
        replicas = mesh.axis("dp+cp")
        return use_torch({}, config, tp=mesh.tp, replicas=replicas, pp=mesh.pp, device=device, others=linears)

    def layers(self, own: nn.Module) -> Mapping[str, Sequence[str]]:
        """Names of the layers of each network that is not pipelined, by the network's name."""
        return layers_of_networks(own, plan_of(own, self.whole.plan))

    @property
    def layer_kinds(self) -> Mapping[str, Hashable]:
        """Kinds of the layers that the network's own forward calls, by name and in order; empty where not known."""
        return self.whole.layer_kinds

    def names_by_rank(self, own: nn.Module) -> list[list[str]]:
        """Names of the parameters on each rank of pp, of which this one has the module `own`."""
        sizes, known = self._run.sizes, self.whole.names_by_rank
        if sizes.pp == 1:
            return [[name for name, _ in own.named_parameters()]]
        if sizes not in known:
            with self._apart() as built:
                known[sizes] = [[name for name, _ in built(rank)[1].named_parameters()] for rank in range(sizes.pp)]
        return known[sizes]

    def output_metas(self, own: nn.Module) -> dict[int, TensorMeta]:
        """Shapes of the tensors that each stage but the last sends to the next."""
        return self._metas

    @cached_property
    def _metas(self) -> dict[int, TensorMeta]:
        """What stages send, from a forward through one after the other; through the first alone where layers say so."""
        sizes = self._run.sizes
        if not self._lasts:
            return self._sent(range(sizes.num_stages - 1))
        try:
            first = self._sent(range(1), is_shallow=True)[0]
        except LayersDifferError:
            first = self._sent(range(1))[0]
        metas = {}
        for stage, last in enumerate(self._lasts):
            entries = tuple((renumbered(name, last), shape, dtype) for name, shape, dtype in first.entries)
            metas[stage] = replace(first, entries=entries)
        return metas

    def _sent(self, stages: range, *, is_shallow: bool = False) -> dict[int, TensorMeta]:
        """What these stages send, the first of all among them; of layers few run where it `is_shallow`."""
        run, sizes, metas = self._run, self._run.sizes, dict[int, TensorMeta]()
        with self._apart() as built:
            payload: Payload | None = None
            for stage in stages:
                mesh, module = built(sizes.pp_rank_of(stage))
                models = list(pipelined_modules(module).values())
                lower_weights(module, run)
                if is_shallow:
                    kinds = list(self.layer_kinds.items())[: self._lasts[0] + 1]
                    own = {module.get_submodule(name): kind for name, kind in kinds}
                    ShallowLayers(own, lambda block: None, lambda block: None)
                batch = self.batch(run.micro_batch_size, META)

                def enter(microbatch: int, module: nn.Module = module, batch: Batch = batch) -> Tensor:
                    with call_context(run, META):
                        return self.loss(module, batch)

                call = ScheduledCall(models, mesh, enter, Tensor.backward, [0], WeightGradients().opened)
                for model in models:
                    model.driver = call
                    if isinstance(model.runner, RecomputeRunner):
                        # Copies in host memory have no numbers either.
                        model.runner.to_host = torch.empty_like
                payload = call.forward(stage, 0, payload)
                assert payload is not None
                metas[stage] = TensorMeta.of(payload)
        return metas

    @contextmanager
    def _apart(self) -> Iterator[Callable[[int], tuple[Mesh, pl.LightningModule]]]:
        """A function that builds the module of a rank of pp once, with its mesh, where nothing counts what is held."""
        run = self._run
        # A graph that a look at a module keeps for a backward, which does not come here, is no memory of a rank.
        with ExitStack() as stack, _disable_current_modes(), MemoryTracker(META), torch.no_grad():

            @cache
            def built(rank: int) -> tuple[Mesh, pl.LightningModule]:
                mesh, _ = stack.enter_context(fake_mesh(run.sizes, global_rank(run, rank, 0)))
                return mesh, self.build(mesh, META)

            yield built

    @cached_property
    def _lasts(self) -> list[int]:
        """Indices of the last layers of the stages that send, where these layers are of one kind; empty where not."""
        kinds, sizes = list(self.layer_kinds.values()), self._run.sizes
        stages = assign_alike(len(kinds), sizes.num_stages, sizes.stage_layout) if kinds else ()
        lasts = [stage.stop - 1 for stage in stages[:-1]]
        return lasts if len({kinds[last] for last in lasts}) == 1 else []

    def loss(self, own: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch [], from the training step."""
        assert isinstance(own, pl.LightningModule)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _NO_TRAINER)
            loss = loss_of(own.training_step(batch, 0))
        assert loss is not None
        return loss


def _nothing_differs(*_: Any) -> None:
    """Tensors without numbers never differ."""


def _even_counts(num_experts: int, counts: Tensor, shape_TK: torch.Size) -> Tensor:
    """Tokens by expert [..., E], which a meta tensor does not know: each expert gets as many, the first the rest."""
    share, rest = divmod(shape_TK.numel(), num_experts)
    even = torch.full(counts.shape, share)
    even[..., :rest] += 1
    return even
