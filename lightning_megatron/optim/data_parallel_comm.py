"""What goes between replicas in a step: gradients as they are made, weights as they are needed.

The one thing that whoever runs a step talks to. It hears from the schedule where a step stands and passes that on to
the sender of gradients and to the master weights.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.master_weights import MasterWeights


class DataParallelComm:
    """Gradients and master weights of one rank. `master_weights` is None where the optimizer steps the parameters.

    For the parameters `in_parts` somebody calls `gather_part` before they are used; for all others a step waits before
    it is entered.
    """

    def __init__(
        self,
        gradients: Gradients,
        master_weights: MasterWeights | None = None,
        in_parts: Iterable[nn.Parameter] = (),
    ) -> None:
        self.gradients = gradients
        self.master_weights = master_weights
        waited_for = set(in_parts)
        self._outside = [param.parameter for param in gradients.params if param.parameter not in waited_for]
        gradients.reducer.watch()

    def grad_view(self, parameter: Tensor) -> Tensor | None:
        """Where the first gradient of a parameter belongs."""
        return self.gradients.reducer.grad_view(parameter)

    # --- gradients --------------------------------------------------------------------------------------------------

    def begin_backwards(self) -> None:
        """The backwards of a step begin whose gradients may be sent as they are complete."""
        if self.gradients.config.overlap_grad_reduce:
            self.gradients.reducer.open()

    def expect(self, stage: int, parameters: Iterable[Tensor] | None = None) -> None:
        """The last backward of a stage is about to run; only the gradients of `parameters` miss, where given."""
        self.gradients.reducer.expect(stage, parameters)

    def grad_ready(self, parameter: Tensor) -> None:
        """The last gradient of a parameter that was put off is complete."""
        self.gradients.reducer.grad_ready(parameter)

    def complete(self, stage: int) -> None:
        """All backwards of a stage have run."""
        self.gradients.reducer.complete(stage)

    # --- weights ----------------------------------------------------------------------------------------------------

    def prepare_step(self) -> None:
        """The optimizer is about to step."""
        if self.master_weights is not None:
            self.master_weights.require_all()
        self.synchronize()

    def synchronize(self) -> None:
        """Parameters and master weights agree from here on: what flies has landed, what somebody changed is adopted."""
        if self.master_weights is not None:
            self.master_weights.wait()
            self.master_weights.take_changed_params()

    def update_params(self) -> None:
        """The optimizer has stepped: its weights go to the replicas."""
        if self.master_weights is not None:
            self.master_weights.update_params()
            if not self.gradients.config.overlap_param_gather:
                self.master_weights.wait()

    def gather(self, stage: int) -> None:
        """The first forward of a stage is about to run: a step is entered, and may use what no part has."""
        if self.master_weights is not None:
            self.master_weights.wait(self._outside)

    def gather_part(self, parameters: Iterable[nn.Parameter]) -> None:
        """The forward of a part that uses these parameters is about to run."""
        if self.master_weights is not None:
            self.master_weights.wait(parameters)

    def gather_all(self) -> None:
        """Somebody reads weights who may read any."""
        if self.master_weights is not None:
            self.master_weights.wait()

    @property
    def has_shards(self) -> bool:
        """Whether replicas must talk to make parameters whole."""
        return any(bucket.shards.size > 1 for bucket in self.gradients.buckets)

    def release(self) -> None:
        """Training is over: parameters are what they were before, with the values of now. Collective over the replicas.

        After a failure only where no replica has what another one needs: `has_shards` says whether one has.
        """
        self.synchronize()
        self.gradients.release()
        if self.master_weights is not None:
            self.master_weights.release()
