"""A model as an ordered list of named parts, of which each rank builds and runs only those of its stage.

Names are those of the unsplit model on every mesh, so state dicts, checkpoints and tied weights need no translation.
How a call runs (alone, as one microbatch of a schedule, or as a collective of all stages) is the `driver`'s business.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_megatron.comm.rng import Draws
from lightning_megatron.mesh import Axis, Mesh, Sizes, ambient_mesh
from lightning_megatron.pipeline.layout import assign


@dataclass(frozen=True, kw_only=True)
class Part:
    """One step of a model's forward, which is never split over stages."""

    name: str
    """Name of the part's module in the unsplit model, dots allowed."""
    build: Callable[[], nn.Module]
    """Makes the module; called only on the ranks whose stage has the part."""
    symbol: str = "t"
    # E: the embedding; t: a layer; L: the head; empty: goes with the part before it
    cost: float = 1.0
    """Relative work, for stages balanced by cost."""
    shares: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    """Modules of other parts that this one uses too (tied weights), by name; built here where no part of the stage
    did."""


class StagePart(NamedTuple):
    """A part as a call runs it: on what the part before it returned."""

    module: nn.Module
    is_layer: bool
    """And neither the way in nor the way out of the model."""
    run: Callable[[Any], Any]


class StageRunner(Protocol):
    """Decides how the parts of a stage run: in turn, and perhaps recomputed in the backward."""

    def __call__(self, parts: Sequence[StagePart], hidden: Any) -> Any: ...


def run_in_turn(parts: Sequence[StagePart], hidden: Any) -> Any:
    """The runner that saves all activations for backward."""
    for part in parts:
        hidden = part.run(hidden)
    return hidden


class Driver(Protocol):
    """Decides how a call of a pipelined model runs."""

    def __call__(self, module: "PipelineModule", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class PipelineModule(nn.Module):
    """Base of models that can be pipelined; also wraps any chain of modules.

    A subclass hands its parts to the constructor and, where they need more than the tensor that travels from part to
    part, overrides `prepare` (runs on every stage, from the caller's inputs) and `run_part`. Between parts may travel a
    tensor or a dict of tensors. Raises ValueError where the parts do not fit the stages that the mesh asks for.
    """

    cuts_sequences: bool = False
    """Whether ranks of cp each compute a part of a call; else each computes all of it."""
    spreads_documents: ClassVar[bool] = False
    """Whether any ranks may run any documents of a batch, as dynamic context parallelism has them."""

    def __init__(self, parts: Sequence[Part], *, mesh: Mesh | None = None, seed: int | None = None) -> None:
        super().__init__()
        # Note: the ambient mesh. The one look-up that the design allows: layers below get their axes as arguments.
        self.mesh = mesh if mesh is not None else ambient_mesh()
        self.draws = Draws(seed=torch.initial_seed() if seed is None else seed)
        # The ranks that share the next call's sequences, where these are not cp's; the owner of the step loop sets it.
        self.context_group: Axis | None = None
        self.part_names = tuple(part.name for part in parts)
        self.layer_names = frozenset(part.name for part in parts if part.symbol == "t")
        symbols, costs = [part.symbol for part in parts], [part.cost for part in parts]
        sizes = self.mesh.sizes
        self.stages = assign(symbols, costs, sizes.num_stages, sizes.stage_layout)
        self.driver: Driver = run_alone
        # Called with its name before a part runs, and with what it returned afterwards.
        self.before_part: Callable[[str], None] = at_once
        self.after_part: Callable[[str, Any], None] = at_once
        # Inside the block all weights of this rank are there, to be read outside of their parts.
        self.with_weights: Callable[[], AbstractContextManager[None]] = nullcontext
        # Axes whose ranks run the same parts, equally often, because they gather these weights as parts run.
        self.gathers_over: Sequence[Axis] = ()
        # Called before a stage of a microbatch runs in a collective call, and with the result after its backward.
        self.before_stage: Callable[[bool], Any] = no_graph
        self.after_backward: Callable[[Any], None] = no_graph
        # Names of other parts' modules that each part uses.
        self.shared_modules = {part.name: tuple(part.shares) for part in parts}
        self.runner: StageRunner = run_in_turn
        # Divisor of the last call's mean loss (number of valid tokens, []), where the model knows it.
        self.loss_weight: Tensor | None = None
        # Sums of the last call without gradients besides its loss, [] by name, where the model has some.
        self.tallies: dict[str, Tensor] = {}
        self._follows_optimizers = False
        own = [parts[i] for stage in self.mesh.own_stages for i in self.stages[stage]]
        for part in own:
            self._register(part.name, part.build())
        for part in own:
            for name, build in part.shares.items():
                if not self._has(name):
                    self._register(name, build())

    @classmethod
    def from_modules(cls, modules: Mapping[str, nn.Module], *, mesh: Mesh | None = None) -> "PipelineModule":
        """A chain of modules, each called with what the one before returned, under the names given.

        Raises ValueError where two stages would share a parameter: each would train a copy of its own.
        """
        parts = [Part(name=name, build=partial(_itself, module)) for name, module in modules.items()]
        chain = _Chain(parts, mesh=mesh)
        _require_unshared(list(modules.items()), chain.stages, chain.mesh.sizes)
        return chain

    def __getstate__(self) -> dict[str, Any]:
        # What drives the model in a step stays where it is: a copy is a model that runs alone.
        return vars(self) | {
            "driver": run_alone,
            "before_part": at_once,
            "after_part": at_once,
            "with_weights": nullcontext,
            "gathers_over": (),
            "before_stage": no_graph,
            "after_backward": no_graph,
        }

    def _has(self, name: str) -> bool:
        try:
            self.get_submodule(name)
        except AttributeError:
            return False
        return True

    def _register(self, name: str, module: nn.Module) -> None:
        """Registers `module` under a dotted name, making the containers on the way."""
        *path, last = name.split(".")
        parent: nn.Module = self
        for step in path:
            children = dict(parent.named_children())
            if step not in children:
                parent.add_module(step, nn.ModuleDict())
            parent = parent.get_submodule(step)
        parent.add_module(last, module)

    def parts_of(self, stage: int) -> tuple[str, ...]:
        """Names of the parts of a stage, in order; a stage may have none."""
        return tuple(self.part_names[i] for i in self.stages[stage])

    def parameters_of(self, part: str) -> list[nn.Parameter]:
        """The parameters that a part of this rank uses, those that it shares with others too."""
        names = (part, *self.shared_modules[part])
        return list(dict.fromkeys(p for name in names for p in self.get_submodule(name).parameters()))

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """From the caller's inputs: what the first part takes, and what every part on every stage may read."""
        if len(args) != 1 or kwargs:
            raise ValueError(
                f"a chain of modules takes one positional input, got {len(args)} and {sorted(kwargs)}; "
                "override PipelineModule.prepare to take more"
            )
        return args[0], None

    def run_part(self, name: str, hidden: Any, context: Any) -> Any:
        """The output of one part for the output of the part before."""
        return self.get_submodule(name)(hidden)

    @property
    def learns_from_steps(self) -> bool:
        """Whether `end_step` does anything."""
        return False

    def end_step(self, *, is_skipped: bool, replicas: Axis | None = None) -> None:
        """Hook for what a model learns from a step besides its gradients.

        The owner of the step loop calls it once after each optimizer step, on all ranks, and says whether the step was
        left out, and which axis, `replicas`, has the data-parallel ranks (that of the model's own mesh, unless it was
        built before the ranks were known). For a model without a driver (see `run_alone`) hooks of torch's optimizers
        call it after a step of its weights."""

    @torch.compiler.disable
    def _follow_optimizers(self) -> None:
        """Has `end_step` called, as long as the model runs alone, after each step of an optimizer of its weights."""
        if self._follows_optimizers:
            return
        self._follows_optimizers = True
        key = id(self)
        _FOLLOWING[key] = weakref.ref(self, lambda _: _FOLLOWING.pop(key, None))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # That is the model's of which this one is a copy.
        self._follows_optimizers = False

    def run_stage(self, stage: int, hidden: Any, context: Any) -> Any:
        """The output of the parts of one of this rank's stages in turn; of the last stage, what the caller gets."""
        return self.runner([self._ready(name, context) for name in self.parts_of(stage)], hidden)

    def _ready(self, name: str, context: Any) -> StagePart:
        run = self.between_hooks(name, lambda hidden: self.run_part(name, hidden, context))
        return StagePart(module=self.get_submodule(name), is_layer=name in self.layer_names, run=run)

    def between_hooks(self, name: str, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`run` of a part with `before_part` and `after_part` around it."""

        def hooked(hidden: Any) -> Any:
            self.before_part(name)
            output = run(hidden)
            self.after_part(name, output)
            return output

        return hooked

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The unsplit model's output, or, within a schedule, this stage's share of it: see `driver`."""
        self.tallies = {}
        return self.driver(self, args, kwargs)


class _Chain(PipelineModule):
    """A chain of modules, which may be indexed as the `nn.Sequential` that it was made of."""

    def __len__(self) -> int:
        return len(self.part_names)

    def __getitem__(self, index: int) -> nn.Module:
        name = self.part_names[index]
        if not self._has(name):
            stages = ", ".join(map(str, self.mesh.own_stages))
            raise IndexError(
                f"module {name} of the chain is on another pipeline stage than those of this rank ({stages}); go over "
                "named_parameters() or named_modules(), where each rank finds its own, or use "
                "pipeline_model_parallel_size=1"
            )
        return self.get_submodule(name)

    def __iter__(self) -> Iterator[nn.Module]:
        """The modules of this rank's stages, in order."""
        return (self.get_submodule(name) for name in self.part_names if self._has(name))


_FOLLOWING: dict[int, "weakref.ref[PipelineModule]"] = {}
"""The models that follow optimizers."""


def _end_steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Tells models that run alone that an optimizer has stepped weights of theirs."""
    # A copy: meanwhile models may be deleted, or created on another thread.
    alone = [model for known in list(_FOLLOWING.values()) if (model := known()) and model.driver is run_alone]
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} if alone else set()
    for model in alone:
        if any(id(parameter) in stepped for parameter in model.parameters()):
            model.end_step(is_skipped=False)


# Once, and not for each model: torch iterates over its hooks, and would raise where garbage collection removes one of a
# deleted model meanwhile.
register_optimizer_step_post_hook(_end_steps)


def _require_unshared(modules: Sequence[tuple[str, nn.Module]], stages: Sequence[range], sizes: Sizes) -> None:
    holders: dict[nn.Parameter, tuple[int, str]] = {}
    for stage, indices in enumerate(stages):
        for name, module in (modules[index] for index in indices):
            for parameter in module.parameters():
                first_stage, first_name = holders.setdefault(parameter, (stage, name))
                if sizes.pp_rank_of(first_stage) != sizes.pp_rank_of(stage):
                    raise ValueError(
                        f"modules {first_name!r} (stage {first_stage}) and {name!r} (stage {stage}) of a chain share a "
                        "parameter; ranks hold their own parameters. Tie it with Part.shares in a PipelineModule, or "
                        "use as many stages as put both on one"
                    )


def no_graph(value: Any) -> Any:
    """Nothing follows what a stage runs."""


def at_once(part: str, output: Any = None) -> None:
    """Nothing to wait for, and nothing to free."""


def _itself(module: nn.Module) -> nn.Module:
    return module


def run_alone(module: PipelineModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The driver of a model in one piece: runs all parts here and now."""
    if module.mesh.pp.size > 1:
        raise RuntimeError(
            f"this model holds stage {' and '.join(map(str, module.mesh.own_stages))} of "
            f"{module.mesh.sizes.num_stages} and was called outside of Trainer.fit, validate, test or predict; call it "
            "within a step, or build it with no pipeline"
        )
    is_step = module.training and torch.is_grad_enabled()
    if is_step and module.learns_from_steps:
        # No driver of the model reports the end of a step.
        module._follow_optimizers()
    hidden, context = module.prepare(*args, **kwargs)
    output = module.run_stage(0, hidden, context)
    if is_step:
        module.draws.step += 1
    return output
