"""Communication of data-parallel ranks in a step: gradients reduced as they are ready, parameters gathered as needed.

This is the one object that the schedule of a step talks to; it calls the gradient reducer and the master weights.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.hook_gradients import HookGradients
from lightning_megatron.optim.master_weights import MasterWeights


class DataParallelComm:
    """Gradients and master weights of one rank; `master_weights` is None where the optimizer steps the parameters,
    `hook_gradients` where no hook of a user's sees its gradients, or sees them all the same.

    The model calls `gather_part` before it uses parameters `in_parts`; for all others a step waits at its beginning.
    """

    def __init__(
        self,
        gradients: Gradients,
        master_weights: MasterWeights | None = None,
        in_parts: Iterable[nn.Parameter] = (),
        hook_gradients: HookGradients | None = None,
    ) -> None:
        self.gradients = gradients
        self.master_weights = master_weights
        self._hook_gradients = hook_gradients
        waited_for = set(in_parts)
        self._outside = [param.parameter for param in gradients.params if param.parameter not in waited_for]
        gradients.reducer.watch()

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

    def gather(self, stage: int) -> None:
        """The first forward of a stage is about to run, which may use parameters of no part."""
        if self.master_weights is not None:
            self.master_weights.wait(self._outside)

    def gather_part(self, parameters: Iterable[nn.Parameter]) -> None:
        """The forward of a part that uses these parameters is about to run."""
        if self.master_weights is not None:
            self.master_weights.wait(parameters)

    def gather_all(self) -> None:
        """Waits for all parameters, for a reader that may read any."""
        if self.master_weights is not None:
            self.master_weights.wait()

    @property
    def has_shards(self) -> bool:
        """Whether parameters are sharded, so that ranks must all-gather them."""
        return any(bucket.shards.size > 1 for bucket in self.gradients.buckets)

    def release(self) -> None:
        """Ends training: parameters get their former dtype and the values of now. Collective over data-parallel ranks.

        After a failure it may be called only where `has_shards` is False, because no rank needs another then.
        """
        self.synchronize()
        self.gradients.release()
        if self.master_weights is not None:
            self.master_weights.release()
