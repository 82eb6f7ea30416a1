"""The driver that makes a model call a collective of all stages: every stage gets the real output.

Used for evaluation, prediction and, on request, for training: the caller's code runs once per batch on every stage, as
on one device. Microbatches go forward through the stages one after another; the output is broadcast from the last
stage. In training the call is one autograd node, whose backward runs the stages backwards.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_megatron.comm import collectives
from lightning_megatron.comm.p2p import Mailbox, Payload, TensorMeta
from lightning_megatron.mesh import Axis
from lightning_megatron.pipeline import microbatches
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.pipeline.plans import backward_plan, forward_plan
from lightning_megatron.pipeline.runtime import Runtime
from lightning_megatron.pipeline.scheduled import gradients_of, named
from lightning_megatron.pipeline.step_hooks import StepHook


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _Forward:
    """`StageWork` of the forward; it holds what the backward needs."""

    def __init__(self, module: PipelineModule, leaves: list[Any], spec: TreeSpec, num_microbatches: int) -> None:
        self.module = module
        self.last_stage = module.mesh.sizes.num_stages - 1
        # Own leaves, so that gradients end here and can be handed to the caller's graph.
        self.inputs = [leaf.detach().requires_grad_() if _is_differentiable(leaf) else leaf for leaf in leaves]
        self.calls = microbatches.split(tree_unflatten(self.inputs, spec), num_microbatches)
        self.is_recorded = torch.is_grad_enabled()
        self.received: dict[tuple[int, int], Payload | None] = {}
        self.graphs: dict[tuple[int, int], Any] = {}
        # By stage and microbatch.
        self.outputs: dict[tuple[int, int], Any] = {}
        self.weights: list[Tensor] = []
        # Weights that the model set; the others are numbers of rows.
        self.loss_weights: list[Tensor] = []
        self.tallies: list[dict[str, Tensor]] = []
        self.first_sample = module.draws.first_sample

    def forward(self, stage: int, microbatch: int, received: Payload | None) -> Payload | None:
        args, kwargs = self.calls[microbatch]
        for tensor in named(received).values():
            tensor.requires_grad_(self.is_recorded and tensor.is_floating_point())
        rows = microbatches.num_rows((args, kwargs))
        self.module.draws.first_sample = self.first_sample + sum(
            microbatches.num_rows(call) for call in self.calls[:microbatch]
        )
        self.module.loss_weight = None
        with torch.set_grad_enabled(self.is_recorded):
            self.graphs[stage, microbatch] = self.module.before_stage(stage > 0)
            hidden, context = self.module.prepare(*args, **kwargs)
            output = self.module.run_stage(stage, hidden if stage == 0 else received, context)
        self.received[stage, microbatch] = received
        self.outputs[stage, microbatch] = output
        if stage == self.last_stage:
            weight = self.module.loss_weight
            if weight is not None:
                self.loss_weights.append(weight)
            self.weights.append(torch.tensor(float(rows)) if weight is None else weight)
            self.tallies.append(self.module.tallies)
            return None
        assert isinstance(output, (Tensor, dict)), f"a stage hands {type(output).__name__} to the next"
        return output

    def backward(self, stage: int, microbatch: int, grad: Payload | None) -> Payload | None:
        if stage < self.last_stage:
            outputs, grads = named(self.outputs[stage, microbatch]), named(grad)
            pairs = [(tensor, grads[name]) for name, tensor in outputs.items() if tensor.requires_grad]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
            self.module.after_backward(self.graphs[stage, microbatch])
        return gradients_of(self.received[stage, microbatch])

    def backward_input(self, stage: int, microbatch: int, grad: Payload | None) -> Payload | None:
        raise AssertionError("a collective call splits no backward")

    def backward_weight(self, stage: int, microbatch: int) -> None:
        raise AssertionError("a collective call splits no backward")

    def reduce_gradients(self, stage: int) -> None:
        """Nothing: the caller's backward goes on."""

    def gather_parameters(self, stage: int) -> None:
        """Nothing: every rank holds its parameters."""


class CollectiveCall:
    """Runs each call of a pipelined model over all stages; serves as `PipelineModule.driver`.

    `count(rows)` says into how many microbatches a batch of that many rows goes.
    """

    def __init__(self, pp: Axis, mailbox: Mailbox, device: torch.device, count: Callable[[int], int]) -> None:
        self._pp = pp
        self._device = device
        self._mailbox = mailbox
        self._count = count
        self.step_hook: StepHook | None = None
        """The hook that is called around the actions of a call's forward and backward."""

    @torch.compiler.disable
    def __call__(self, module: PipelineModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        work = _Forward(module, leaves, spec, self._num_microbatches(leaves))
        self._runtime().run(forward_plan(module.mesh.sizes, len(work.calls)), work)
        combined = None
        if self._pp.is_last:
            with torch.set_grad_enabled(work.is_recorded):
                outputs = [work.outputs[work.last_stage, m] for m in range(len(work.calls))]
                combined = microbatches.combine(outputs, work.weights)
        weight = torch.stack(work.loss_weights).sum() if work.loss_weights else None
        tallies = {name: torch.stack([of[name] for of in work.tallies]).sum() for name in module.tallies}
        output, module.loss_weight, module.tallies = self._share((combined, weight, tallies))
        module.draws.first_sample = work.first_sample
        module.draws.call += 1
        if not work.is_recorded:
            return output
        tensors, output_spec = tree_flatten(output)
        floating = [i for i, t in enumerate(tensors) if isinstance(t, Tensor) and t.is_floating_point()]
        roots = [tree_flatten(combined)[0][i] for i in floating] if self._pp.is_last else []
        # The node needs an input that requires a gradient even where no input of the call does.
        anchor = torch.zeros((), device=self._device, requires_grad=True)
        inputs = [leaf for leaf in leaves if _is_differentiable(leaf)]
        recorded = _Recorded.apply(self, work, roots, [tensors[i] for i in floating], anchor, *inputs)
        for i, tensor in zip(floating, recorded, strict=True):
            tensors[i] = tensor
        return tree_unflatten(tensors, output_spec)

    def _runtime(self) -> Runtime:
        runtime = Runtime(self._pp, self._mailbox)
        runtime.step_hook = self.step_hook
        return runtime

    def _num_microbatches(self, leaves: list[Any]) -> int:
        """The configured number of microbatches, where all tensors of the call share their rows; else 1."""
        sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0}
        return self._count(sizes.pop()) if len(sizes) == 1 else 1

    def _share(self, value: Any) -> Any:
        """A value of the last stage, broadcast to every stage."""
        last = self._pp.size - 1
        described, spec = None, None
        leaves: list[Any] = []
        if self._pp.is_last:
            leaves, spec = tree_flatten(value)
            described = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        described, spec = collectives.broadcast_object((described, spec), self._pp, last)
        shared = []
        for i, entry in enumerate(described):
            if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], torch.dtype)):
                shared.append(entry)
                continue
            if self._pp.is_last:
                tensor = leaves[i].detach().to(self._device).contiguous()
            else:
                tensor = torch.empty(entry[0], dtype=entry[1], device=self._device)
            shared.append(collectives.broadcast_(tensor, self._pp, last))
        return tree_unflatten(shared, spec)

    def run_backward(self, work: _Forward, roots: list[Tensor], grads: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Runs the stages backwards from the gradients of the output; returns those of the caller's inputs."""
        if self._pp.is_last:
            pairs = [(r, g) for r, g in zip(roots, grads, strict=True) if g is not None and r.requires_grad]
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
            for microbatch in reversed(range(len(work.calls))):
                work.module.after_backward(work.graphs[work.last_stage, microbatch])
        output_metas = {key: TensorMeta.of(o) for key, o in work.outputs.items() if key[0] < work.last_stage}
        self._runtime().run(backward_plan(work.module.mesh.sizes, len(work.calls)), work, output_metas)
        inputs = [leaf for leaf in work.inputs if _is_differentiable(leaf)]
        # An input may be read on several stages; its gradient is the sum of theirs.
        return [
            collectives.all_reduce(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf), self._pp)
            for leaf in inputs
        ]


class _Recorded(torch.autograd.Function):
    """The call as one node of the caller's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        call: CollectiveCall,
        work: _Forward,
        roots: list[Tensor],
        outputs: list[Tensor],
        anchor: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.work, ctx.roots = call, work, roots
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        what = "gradient of a gradient" if torch.is_grad_enabled() else "second backward" if ctx.work is None else ""
        if what:
            raise RuntimeError(
                f"training_step asked for a {what} through the stages of a pipelined model, whose one backward is "
                "neither recorded nor kept; use pipeline_model_parallel_size=1"
            )
        input_grads = ctx.call.run_backward(ctx.work, ctx.roots, grads)
        ctx.work = ctx.roots = None
        return (None, None, None, None, None, *input_grads)
