"""Communication of data-parallel ranks in a step: gradients reduced as they are ready, parameters gathered as needed.

This is the one object that the schedule of a step talks to; it calls the gradient reducer and the master weights.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn

from lightning_megatron.mesh import Axis
from lightning_megatron.optim.bucket import PartName
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.hook_gradients import HookGradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.optim.owned_weights import OwnedWeights
from lightning_megatron.optim.part_gathers import Graph, ModelParts, PartGathers

HookTime = Literal["early", "late", "training", "evaluation"]
"""When a user's code may read weights past their modules: between the backward and the optimizer's step, or after it;
from a training step to its backward, or in an evaluation step."""


class DataParallelComm:
    """Gradients and master weights of one rank; `master_weights` is None where the optimizer steps the parameters,
    `hook_gradients` where no hook of a user's sees its gradients, or sees them all the same.

    The model calls `enter_part` before a part uses its parameters `in_parts`; for all others a step waits at its
    beginning.
    `parts` have the sharded parameters of each part, which `enter_part` gathers. Where hooks of a user's may read
    weights, those are gathered for them: before the optimizer's step (early), and from there to the next step (late).
    """

    def __init__(
        self,
        gradients: Gradients,
        master_weights: MasterWeights | None = None,
        in_parts: Mapping[PartName, Sequence[nn.Parameter]] | None = None,
        hook_gradients: HookGradients | None = None,
        parts: ModelParts | None = None,
        hooks_read: Collection[HookTime] = (),
        owned: OwnedWeights | None = None,
    ) -> None:
        self.gradients = gradients
        self.owned = OwnedWeights(()) if owned is None else owned
        """Weights that an optimizer gets whole for its step, where ranks hold parts of them."""
        self.master_weights = master_weights
        self._hook_gradients = hook_gradients
        self._in_parts = in_parts or {}
        waited_for = {parameter for own in self._in_parts.values() for parameter in own}
        self._outside = [param.parameter for param in gradients.params if param.parameter not in waited_for]
        self.remove_hooks: Callable[[], None] = _nothing
        """Removes the hooks by which parts call this."""
        gradients.reducer.watch()
        self._hooks_read = frozenset(hooks_read)
        self._parts: PartGathers | None = None
        if parts is not None:
            keeps = not gradients.config.reshard_after_forward
            reducer = gradients.reducer
            self._parts = PartGathers(
                parts, keeps=keeps, reach_parts=reducer.reach_parts, leave_parts=reducer.leave_parts
            )
            self._show_weights("late")

    def grad_view(self, parameter: Tensor) -> Tensor | None:
        """The view of a bucket to which the first gradient of a parameter goes."""
        return self.gradients.reducer.grad_view(parameter)

    # --- gradients --------------------------------------------------------------------------------------------------

    def begin_backwards(self) -> None:
        """The backwards of a step begin; from here on buckets may be reduced as they are complete."""
        if self.gradients.config.overlap_grad_reduce or self.gradients.reducer.adds_shards:
            self.gradients.reducer.open()

    def expect(self, stage: int, parameters: Iterable[Tensor] | None = None) -> None:
        """The last backward of a stage is about to run; only the gradients of `parameters`, if given, are missing."""
        self.gradients.reducer.expect(stage, parameters)

    def end_graph(self, graph: Graph | None) -> None:
        """A backward has run through the graph of a forward."""
        if self._parts is not None:
            self._parts.end_backward(graph)

    @property
    def expects_each(self) -> bool:
        """Whether gradients are reduced in every backward, and not in the last one of a stage alone."""
        return self.gradients.reducer.is_scattering

    def end_backward(self) -> None:
        """A backward that was expected has run."""
        self.gradients.reducer.end_backward()

    def grad_ready(self, parameter: Tensor) -> None:
        """The last gradient of a parameter whose weight gradient was deferred is complete."""
        self.gradients.reducer.grad_ready(parameter)

    def complete(self, stage: int) -> None:
        """All backwards of a stage have run."""
        self.gradients.reducer.complete(stage)

    def show_gradients(self) -> None:
        """Hooks of a user's are about to run, which may read and change the reduced gradients of all parameters."""
        if self._hook_gradients is not None:
            self._hook_gradients.show()

    def refresh_gradients(self) -> None:
        """Gradients of master weights were scaled; hooks that look again see them so."""
        if self._hook_gradients is not None:
            self._hook_gradients.refresh()

    def take_gradients(self) -> None:
        """What hooks did to gradients is about to count."""
        if self._hook_gradients is not None:
            self._hook_gradients.take()

    def free_gradients(self, *, dropped: bool) -> None:
        """New gradients are about to be made; what hooks did to the old ones is taken over, unless those are "
        "dropped."""
        if self._hook_gradients is not None:
            self._hook_gradients.end(dropped=dropped)
        self.gradients.free(dropped=dropped)

    # --- weights ----------------------------------------------------------------------------------------------------

    def require_same_parts(self) -> None:
        """Raises RuntimeError on all ranks where they ran other parts than others, or wrote to absent weights."""
        if self._parts is not None:
            self._parts.require_same()

    @property
    def gathers_over(self) -> Sequence[Axis]:
        """Axes whose ranks run the same parts, equally often, because they gather their weights as they run."""
        return () if self._parts is None else self._parts.axes

    def prepare_step(self) -> None:
        """The optimizer is about to step."""
        if self.master_weights is not None:
            self.master_weights.require_all()
        self.take_gradients()
        self.synchronize()

    def synchronize(self) -> None:
        """Makes parameters and master weights agree: gathers are waited for, parameters that changed are taken over."""
        if self.master_weights is not None:
            self.master_weights.wait()
            self.master_weights.take_changed_params()

    def update_params(self) -> None:
        """The optimizer has stepped: copies its weights to the parameters of all data-parallel ranks."""
        if self.master_weights is not None:
            self.master_weights.update_params()
            if not self.gradients.config.overlap_param_gather:
                self.master_weights.wait()
        if self._parts is not None:
            self._parts.forget()
            self._show_weights("late")

    def gather(self, stage: int, *, is_training: bool = True) -> None:
        """The first forward of a stage is about to run, which may use parameters of no part."""
        if self.master_weights is not None:
            self.master_weights.wait(self._outside)
        if self._parts is not None:
            self._parts.begin(is_training=is_training, needs_all="training" in self._hooks_read)

    def begin_training(self) -> None:
        """A schedule of training steps is about to run, whose own code may read weights."""
        if self._parts is not None and "training" in self._hooks_read:
            self._parts.begin(is_training=True, needs_all=True)

    def end_passes(self) -> None:
        """All forwards and backwards of a batch have run."""
        if self._parts is not None:
            self._parts.end()
            self._show_weights("early")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside the block forwards run that no backward follows."""
        if self.master_weights is not None:
            self.master_weights.wait()
        if self._parts is None:
            yield
            return
        self._parts.begin(is_training=False, needs_all="evaluation" in self._hooks_read)
        try:
            yield
        finally:
            self._parts.end()
        self._parts.require_same()

    def end_without_step(self) -> None:
        """A batch has ended that no optimizer's step follows: hooks after it may read weights."""
        self._show_weights("late")

    def _show_weights(self, when: HookTime) -> None:
        if self._parts is not None and when in self._hooks_read:
            self._parts.show_all()

    def begin_graph(self, *, reaches: bool = False) -> Graph | None:
        """A forward is about to run that one backward will go through; `reaches` says that its input takes
        gradients."""
        return None if self._parts is None else self._parts.begin_graph(reaches=reaches)

    def begin_stage(self, reaches: bool) -> Graph | None:
        """A stage is about to run for a microbatch, in a call of all stages."""
        return self.begin_graph(reaches=reaches)

    def enter_part(self, part: PartName) -> None:
        """The forward of a part is about to run."""
        if self.master_weights is not None:
            self.master_weights.wait(self._in_parts[part])
        if self._parts is not None:
            self._parts.enter(part)

    def leave_part(self, part: PartName, outputs: Iterable[Tensor]) -> None:
        """The forward of a part has run, and returned these tensors."""
        if self._parts is not None:
            self._parts.leave(part, outputs)

    def gather_all(self) -> None:
        """Waits for all parameters, for a reader that may read any."""
        if self.master_weights is not None:
            self.master_weights.wait()
        if self._parts is not None:
            self._parts.gather_all()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Inside the block, which lies between steps, all parameters are there, to be read and written in place."""
        were_there = self._parts is not None and self._parts.has_all
        self.gather_all()
        yield
        if self._parts is not None and not were_there:
            self._parts.let_all_go()

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are gathered as parts of the model run."""
        return self._parts is not None

    @property
    def has_shards(self) -> bool:
        """Whether parameters are sharded, so that ranks must all-gather them."""
        return any(flat.shards.size > 1 for flat in (*self.gradients.buckets, *self.gradients.frozen))

    def release(self) -> None:
        """Ends training: parameters get their former dtype and the values of now. Collective over data-parallel ranks.

        After a failure it may be called only where `has_shards` is False, because no rank needs another then.
        """
        self.synchronize()
        self.remove_hooks()
        self.gradients.release()
        if self.master_weights is not None:
            self.master_weights.release()


def _nothing() -> None:
    """There are no hooks."""
