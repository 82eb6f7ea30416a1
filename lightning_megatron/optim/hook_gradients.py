"""Gradients on the parameters for hooks of a user's to read and change, where the optimizer steps master weights.

There a reduced gradient belongs to a master weight, of whose shard alone this rank has it, and `.grad` of the model's
parameter is None, or a tensor that nobody steps by. Only where a hook may look, shards are all-gathered into the
bucket, which is the memory of all gradients anyway, and what hooks did is taken over before it counts.
"""

import torch
from torch import nn

from lightning_megatron.comm import collectives
from lightning_megatron.optim.bucket import Bucket
from lightning_megatron.optim.gradients import Gradients, ParamShard


class HookGradients:
    """The gradients of one rank's parameters, from the reduction of a step to its optimizer step."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._shards = {shard.param.parameter: shard for shard in gradients.param_shards}
        # Parameters that show their gradient, by bucket.
        self._shown: dict[Bucket, list[nn.Parameter]] = {}
        # This rank's part of what hooks were shown, where that has fewer digits than the master weight's gradient.
        self._seen: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def show(self) -> None:
        """Puts the full gradient of each parameter on it, after a reduction. Collective over data-parallel ranks."""
        handed_over = self._gradients.handed_over
        self._shown = {bucket: [param.parameter for param in params] for bucket, params in handed_over.items()}
        # With gradients of earlier batches, that nobody zeroed.
        self.refresh()
        for bucket, parameters in self._shown.items():
            for parameter in parameters:
                parameter.grad = bucket.grad_views[parameter]
                self._give(bucket, parameter)

    @torch.no_grad()
    def refresh(self) -> None:
        """Shows the gradients of the master weights as they are now. Collective over data-parallel ranks."""
        for bucket, parameters in self._shown.items():
            for parameter in parameters:
                shard = self._shards.get(parameter)
                if shard is not None and shard.tensor.grad is not None:
                    self._part(bucket, shard).copy_(shard.tensor.grad)
                    self._see(parameter, self._part(bucket, shard), shard.tensor.grad)
            collectives.all_gather_(bucket.gradient, bucket.shards)

    @torch.no_grad()
    def take(self) -> None:
        """Gives the master weights what hooks have changed since `show`, or since the last call."""
        for bucket, parameters in self._shown.items():
            for parameter in parameters:
                view = bucket.grad_views[parameter]
                if parameter.grad is view:
                    self._merge(bucket, parameter)
                    continue
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                    parameter.grad = view
                self._give(bucket, parameter)

    def end(self, *, dropped: bool) -> None:
        """The buckets are about to be used for new gradients."""
        if not dropped:
            self.take()
        for bucket in self._shown:
            bucket.drop()
        self._shown, self._seen = {}, {}

    def _merge(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Gives a parameter's master weight the elements of its gradient that are not as they were shown.

        Elements are compared, because a write by `.data` leaves no other trace; the others keep the digits that the
        bucket's dtype does not have. What an optimizer has zeroed does not come back.
        """
        shard = self._shards.get(parameter)
        if shard is not None and (gradient := shard.tensor.grad) is not None:
            part, seen = self._part(bucket, shard), self._seen.get(parameter)
            is_same = None if seen is None else (part == seen).to(gradient.device)
            now = part.to(gradient)
            shard.tensor.grad = now if is_same is None else torch.where(is_same, gradient, now)
            self._see(parameter, part, gradient)

    def _see(self, parameter: nn.Parameter, part: torch.Tensor, gradient: torch.Tensor) -> None:
        if part.dtype != gradient.dtype:
            self._seen[parameter] = part.clone()

    def _give(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Gives a parameter's master weight its part of the gradient that the parameter has, or none."""
        shard = self._shards.get(parameter)
        # Lightning's `toggle_optimizer` freezes what other optimizers step.
        if shard is not None and shard.tensor.requires_grad:
            part = self._part(bucket, shard)
            shard.tensor.grad = None if parameter.grad is None else part.to(shard.tensor)
            self._see(parameter, part, shard.tensor)

    @staticmethod
    def _part(bucket: Bucket, shard: ParamShard) -> torch.Tensor:
        flat = bucket.grad_views[shard.param.parameter].view(-1)
        return flat[shard.range.start : shard.range.end].view(shard.tensor.shape)
