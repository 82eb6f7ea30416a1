"""The driver of a training schedule: a call of the model runs one of this rank's stages for one microbatch.

The caller's step runs up to the model call on every stage, and past it on the last stage only: on the others the call
hands its output to the schedule and leaves the step by `StageExit`. That is how an ordinary step, written for one
device, runs under any schedule. A rank with several stages enters the step once for each of them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_megatron.comm.p2p import Payload
from lightning_megatron.mesh import Mesh
from lightning_megatron.pipeline.module import PipelineModule

_OTHER_MODE = 'use MegatronStrategy(pipeline=PipelineConfig(mode="collective"))'
_ON_LAST_STAGE = (
    "behind the call of the model the step runs on the last pipeline stage, where layers of other stages are not "
    "called and their weights have no values (device meta): it may use what the call returns"
)


class StageExit(BaseException):
    """Leaves the caller's step on a stage that is not the last; a BaseException, so `except Exception` lets it pass."""


Task = tuple[Tensor, Callable[[], None]]
"""A weight, and what adds its gradient from one microbatch."""


class OpenGradients(Protocol):
    """Inside the block linears add the gradients of their weights, or defer that as tasks in `queue`."""

    def __call__(self, queue: list[Task] | None = None) -> AbstractContextManager[None]: ...


class DataParallelHooks(Protocol):
    """Sums gradients over data-parallel ranks while backwards run, and gathers stepped weights before forwards."""

    @property
    def expects_each(self) -> bool:
        """Whether every backward is expected, and not the last one of a stage alone."""
        ...

    def end_backward(self) -> None:
        """A backward that was expected has run."""
        ...

    def begin_graph(self, *, reaches: bool = False) -> Any:
        """The forward of a microbatch through a stage is about to run, and its input takes gradients or not; the result
        is handed to `end_graph`."""
        ...

    def end_graph(self, graph: Any) -> None:
        """The backward of a microbatch has run through a stage; deferred gradients of weights may be missing."""
        ...

    def expect(self, stage: int, parameters: Iterable[Tensor] | None = None) -> None:
        """The last backward of a stage is about to run; only the gradients of `parameters` miss, where given."""
        ...

    def grad_ready(self, parameter: Tensor) -> None:
        """The last deferred gradient of a parameter is complete."""
        ...

    def complete(self, stage: int) -> None:
        """All backwards of a stage have run."""
        ...

    def gather(self, stage: int) -> None:
        """The first forward of a stage is about to run."""
        ...


class NoDataParallelHooks:
    """Hooks of a model without data parallelism: there is nothing to sum or to gather."""

    expects_each = False

    def end_backward(self) -> None:
        """Nothing to do."""

    def begin_graph(self, *, reaches: bool = False) -> Any:
        """Nothing to do."""

    def end_graph(self, graph: Any) -> None:
        """Nothing to do."""

    def expect(self, stage: int, parameters: Iterable[Tensor] | None = None) -> None:
        """Nothing to do."""

    def grad_ready(self, parameter: Tensor) -> None:
        """Nothing to do."""

    def complete(self, stage: int) -> None:
        """Nothing to do."""

    def gather(self, stage: int) -> None:
        """Nothing to do."""


_NO_HOOKS = NoDataParallelHooks()


class _SavedStage:
    """State saved for the backward of one microbatch through one stage: leaves it ends at, and where it starts."""

    def __init__(
        self, received: Payload | None, output: Payload | None, loss: Tensor | None, graph: Any = None
    ) -> None:
        self.received = received
        self.loss = loss
        self.graph = graph
        # Edges and not tensors: once an output has been sent, only what autograd saved of it stays in memory.
        self.edges: dict[str, GradientEdge] = {
            name: get_gradient_edge(tensor) for name, tensor in named(output).items() if tensor.requires_grad
        }


class ScheduledCall:
    """Runs model calls as microbatches of a schedule; serves as `PipelineModule.driver` and as `StageWork`.

    `enter_step(microbatch)` enters the caller's step and returns the loss, scaled as it shall be differentiated;
    `differentiate(loss)` runs its backward; `first_samples` are the indices of the microbatches' first samples in the
    global batch; within `opened` the linears handle the gradients of their weights; `data_parallel` is called when
    gradients are complete and weights are needed. With one stage a step may call its models as often as it likes, or
    not at all; with several it calls one model once.
    """

    def __init__(
        self,
        modules: Sequence[PipelineModule],
        mesh: Mesh,
        enter_step: Callable[[int], Tensor],
        differentiate: Callable[[Tensor], None],
        first_samples: Sequence[int],
        opened: OpenGradients,
        data_parallel: DataParallelHooks = _NO_HOOKS,
    ) -> None:
        self._modules = modules
        self._num_stages = mesh.sizes.num_stages
        self._enter_step = enter_step
        self._differentiate = differentiate
        self._first_samples = first_samples
        self._opened = opened
        self._data_parallel = data_parallel
        self._stage = 0
        self._received: Payload | None = None
        self._output: Payload | None = None
        self._num_calls = 0
        # Whether the step runs behind the call of a model that has several stages.
        self._is_behind_call = False
        # Whether the caller's step runs, whose own calls of autograd are none of the schedule's backwards.
        self.is_in_step = False
        # Where the output of the last stage begins in autograd's graph; None where it is no known tree of tensors.
        self._output_nodes: set[Any] | None = None
        self._weight_names: dict[Any, str] | None = None
        self._saved: dict[tuple[int, int], _SavedStage] = {}
        self._weight_tasks: dict[tuple[int, int], list[Task]] = {}

    @torch.compiler.disable
    def __call__(self, module: PipelineModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._num_calls += 1
        if self._num_stages > 1 and self._num_calls > 1:
            raise RuntimeError(
                "the step calls a pipelined model more than once; a schedule runs one call per microbatch; "
                + _OTHER_MODE
            )
        hidden, context = module.prepare(*args, **kwargs)
        output = module.run_stage(self._stage, hidden if self._stage == 0 else self._received, context)
        module.draws.call += 1
        if self._stage == self._num_stages - 1:
            if self._num_stages > 1:
                output = self._tied_to(output, (args, kwargs))
                leaves = tree_leaves(output)
                is_known = all(leaf is None or isinstance(leaf, Tensor | int | float | str) for leaf in leaves)
                self._output_nodes = {leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)} if is_known else None
                self._is_behind_call = True
            return output
        if not isinstance(output, (Tensor, dict)):
            raise RuntimeError(
                f"a stage hands {type(output).__name__} to the next; it must hand a tensor or a dict of tensors"
            )
        self._output = output
        raise StageExit

    def _tied_to(self, output: Any, inputs: Any) -> Any:
        """The output of the last stage, which asks for no gradient by the inputs that the first stage took."""
        leaves, spec = tree_flatten(output)
        wanted = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        floating = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not wanted or not floating:
            return output
        tied = _NoGradientByInput.apply(self, len(wanted), *wanted, *(leaves[i] for i in floating))
        for i, leaf in zip(floating, tied, strict=True):
            leaves[i] = leaf
        return tree_unflatten(leaves, spec)

    def forward(self, stage: int, microbatch: int, received: Payload | None) -> Payload | None:
        """Enters the caller's step for a microbatch, to run one stage of it."""
        for tensor in named(received).values():
            tensor.requires_grad_(tensor.is_floating_point())
        self._stage, self._received, self._output, self._num_calls = stage, received, None, 0
        for module in self._modules:
            module.draws.first_sample, module.draws.call = self._first_samples[microbatch], 0
        output: Payload | None = None
        loss: Tensor | None = None
        graph = self._data_parallel.begin_graph(reaches=stage > 0)
        self.is_in_step = True
        try:
            loss = self._enter_step(microbatch)
        except StageExit:
            output = self._output
        except Exception as error:
            if self._is_behind_call:
                error.add_note(_ON_LAST_STAGE)
            raise
        finally:
            self._received = self._output = None
            self.is_in_step = self._is_behind_call = False
        if output is None:
            self._require_end_of_step()
            if loss is not None and self._output_nodes is not None:
                self._require_no_weight_in(loss, self._output_nodes)
        # Nodes hold what was received, and its gradient, longer than the backward.
        self._output_nodes = None
        self._saved[stage, microbatch] = _SavedStage(received, output, loss, graph)
        return output

    def _require_end_of_step(self) -> None:
        """Raises unless a step that was not left by an exit may have come to its end."""
        if self._num_calls == 0 and self._num_stages > 1:
            raise RuntimeError(
                f"training_step ended on stage {self._stage} of {self._num_stages} without calling the pipelined "
                "model; every step must call it once"
            )
        if self._stage < self._num_stages - 1:
            raise RuntimeError(
                f"training_step went on after the model call on stage {self._stage} of {self._num_stages}: a bare "
                "`except:` swallowed the exit of the stage; write `except Exception:`"
            )

    def _require_no_weight_in(self, loss: Tensor, output_nodes: set[Any]) -> None:
        """Raises where the loss depends on a weight of the model by another way than the output of its call."""
        if self._weight_names is None:
            # Going over all parameters to differentiate is refused inside of a step.
            with torch.no_grad():
                self._weight_names = {p: name for module in self._modules for name, p in module.named_parameters()}
        seen, pending = set(output_nodes), [loss.grad_fn]
        while pending:
            if (node := pending.pop()) is None or node in seen:
                continue
            seen.add(node)
            if (name := self._weight_names.get(getattr(node, "variable", None))) is not None:
                raise RuntimeError(
                    f"the loss has a term over {name}, a weight of the pipelined model, beside the model's output: the "
                    "last stage, which computes the loss, holds its own weights alone. Penalise weights by "
                    "weight_decay of the optimizer, or add to their gradients in on_before_optimizer_step, where each "
                    "rank has its own"
                )
            pending += [inner for inner, _ in node.next_functions]

    def backward(self, stage: int, microbatch: int, grad: Payload | None) -> Payload | None:
        """Runs the backward of a microbatch through a stage."""
        if self._is_expected(microbatch):
            self._data_parallel.expect(stage)
        received = self._run_backward(stage, microbatch, grad, None)
        if self._data_parallel.expects_each:
            self._data_parallel.end_backward()
        return received

    def backward_input(self, stage: int, microbatch: int, grad: Payload | None) -> Payload | None:
        """Runs the backward without the weight gradients of linears that can defer theirs."""
        queue = self._weight_tasks[stage, microbatch] = []
        return self._run_backward(stage, microbatch, grad, queue)

    @torch.no_grad()
    def backward_weight(self, stage: int, microbatch: int) -> None:
        """Adds the weight gradients that were deferred."""
        tasks = self._weight_tasks.pop((stage, microbatch))
        is_expected = self._is_expected(microbatch)
        if is_expected:
            self._data_parallel.expect(stage, [weight for weight, _ in tasks])
        left = Counter(weight for weight, _ in tasks)
        for weight, task in tasks:
            task()
            left[weight] -= 1
            if is_expected and not left[weight]:
                self._data_parallel.grad_ready(weight)
        if self._data_parallel.expects_each:
            self._data_parallel.end_backward()

    def reduce_gradients(self, stage: int) -> None:
        """Signals that the gradients of a stage are complete."""
        self._data_parallel.complete(stage)

    def gather_parameters(self, stage: int) -> None:
        """Signals that the weights of a stage are needed."""
        self._data_parallel.gather(stage)

    def _is_expected(self, microbatch: int) -> bool:
        # Every schedule takes the backwards of a stage in the order of the microbatches.
        return self._data_parallel.expects_each or microbatch == len(self._first_samples) - 1

    def _run_backward(
        self, stage: int, microbatch: int, grad: Payload | None, queue: list[Task] | None
    ) -> Payload | None:
        saved = self._saved.pop((stage, microbatch))
        with self._opened(queue):
            if saved.loss is not None:
                self._differentiate(saved.loss)
            elif saved.edges:
                grads = named(grad)
                torch.autograd.backward(list(saved.edges.values()), [grads[name] for name in saved.edges])
        self._data_parallel.end_graph(saved.graph)
        return gradients_of(saved.received)


class _NoGradientByInput(torch.autograd.Function):
    """Identity on the outputs of the last stage, between them and the inputs, which belong to the first stage's graph.

    Without it autograd would say that the inputs were not used, or give None for their gradients.
    """

    @staticmethod
    def forward(ctx: Any, call: ScheduledCall, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.num_inputs = call, num_inputs
        return tuple(tensor.view_as(tensor) for tensor in tensors[num_inputs:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.call.is_in_step:
            raise RuntimeError(
                "training_step asked for a gradient through a pipelined model, by its input, which the last stage "
                "does not have; use pipeline_model_parallel_size=1"
            )
        return (None, None, *(None for _ in range(ctx.num_inputs)), *grads)


def named(payload: Payload | None) -> dict[str, Tensor]:
    """The tensors of a payload; a single one has no name."""
    if payload is None:
        return {}
    return payload if isinstance(payload, dict) else {"": payload}


def gradients_of(received: Payload | None) -> Payload | None:
    """Gradients of the floating tensors of a dict, or of a single tensor; zeros where nothing flowed back."""
    if received is None:
        return None
    if isinstance(received, dict):
        return {name: _gradient(tensor) for name, tensor in received.items() if tensor.is_floating_point()}
    return _gradient(received)


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


class LocalCall:
    """The driver of a model in one piece whose step loop somebody owns: runs all parts here and now."""

    def __call__(self, module: PipelineModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, context = module.prepare(*args, **kwargs)
        output = module.run_stage(0, hidden, context)
        module.draws.call += 1
        return output
