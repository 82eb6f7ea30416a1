"""Master weights: what the user's optimizer steps in place of the parameters, and the way back to those.

Under mixed precision they are in float32 beside parameters in 16 bits; with the distributed optimizer each replica has
those of its shards alone. The optimizer object is the user's own: its parameters are exchanged in place, so schedulers
and callbacks that hold it go on. After a step the new weights are cast, and the replicas gather each other's shards.

    bytes a parameter, of d replicas    weights   gradients   master weights   two moments
    32-true, replicated                 4         4           -              8
    32-true, distributed                4         4           -              8/d
    bf16-mixed, replicated              2         4           4              8
    bf16-mixed, distributed             2         4           4/d            8/d

Where a parameter and its master weights have one dtype they share memory.
Source: Rajbhandari et al., arXiv 1910.02054, sections 3.1 and 5.1.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.comm import collectives
from lightning_megatron.optim.bucket import Bucket
from lightning_megatron.optim.gradients import Gradients, ParamShard


class MasterWeights:
    """The master weights of one rank's buckets, put in the place of the parameters in `optimizers`.

    Parameters get the dtype that their bucket says. Their data moves into flat tensors, one a bucket, where shards are
    gathered.
    """

    @torch.no_grad()
    def __init__(self, gradients: Gradients, optimizers: Iterable[Optimizer]) -> None:
        self._gradients = gradients
        self._flat: dict[Bucket, Tensor] = {}
        # Of the parameters' data: in flat tensors, where shards are gathered.
        self._param_views: dict[nn.Parameter, Tensor] = {}
        # Of the master weights.
        self._dtypes: dict[Bucket, torch.dtype] = {}
        self._in_flight: dict[Bucket, collectives.Pending] = {}
        self._optimizers = list(optimizers)
        param_shards = [shard for bucket in gradients.buckets for shard in self._convert(bucket)]
        gradients.param_shards = param_shards
        gradients.has_master_weights = True
        self._param_shards = {shard.param.parameter: shard for shard in param_shards}
        self._buckets = {param.parameter: bucket for bucket in gradients.buckets for param in bucket.members}
        for optimizer in self._optimizers:
            self._dp_comm(optimizer)

    def _convert(self, bucket: Bucket) -> Iterator[ParamShard]:
        own_dtype = self._dtypes[bucket] = bucket.members[0].parameter.dtype
        dtype = own_dtype if bucket.low is None else bucket.low
        if bucket.shards.size > 1:
            self._flat[bucket] = torch.zeros(bucket.layout.num_elements, dtype=dtype, device=bucket.gradient.device)
        for place, param in enumerate(bucket.members):
            parameter, own = param.parameter, bucket.own_range(place)
            before = parameter.detach()
            if bucket in self._flat:
                start = bucket.layout.starts[place]
                self._param_views[parameter] = self._flat[bucket][start : start + before.numel()].view(before.shape)
            else:
                self._param_views[parameter] = before if dtype == own_dtype else torch.empty_like(before, dtype=dtype)
            self._move_data(parameter)
            _take_gradients_of(parameter, bucket.gradient.dtype)
            if own.is_empty and parameter.numel():
                continue
            whole = parameter.detach() if dtype == own_dtype else before
            is_whole = own.end - own.start == parameter.numel()
            part = whole if is_whole else whole.reshape(-1)[own.start : own.end]
            if dtype != own_dtype and part.untyped_storage().nbytes() > part.numel() * part.element_size():
                # A copy, so that the whole float32 parameter can go, or the bucket that an earlier fit left it in.
                part = part.clone()
            yield ParamShard(param, nn.Parameter(part), own)

    def lowered_names(self) -> set[str]:
        """Names of this rank's parameters that are narrower than their master weights, wherever those are."""
        return {
            param.name
            for bucket in self._gradients.buckets
            for param in bucket.members
            if param.parameter.dtype != self._dtypes[bucket]
        }

    # --- the optimizer ----------------------------------------------------------------------------------------------

    def _dp_comm(self, optimizer: Optimizer) -> None:
        """Puts master weights in the place of parameters, with what state there is."""
        for group in optimizer.param_groups:
            places = [
                place
                for place, parameter in enumerate(group["params"])
                if parameter not in self._buckets or parameter in self._param_shards
            ]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][place] for place in places]
            states = {parameter: optimizer.state.pop(parameter, None) for parameter in group["params"]}
            kept = [group["params"][place] for place in places]
            group["params"] = [self._param_shards[p].tensor if p in self._param_shards else p for p in kept]
            for parameter, stepped in zip(kept, group["params"], strict=True):
                if (state := states[parameter]) is not None:
                    shard = self._param_shards.get(parameter)
                    parts = {key: _part_of(value, parameter, shard) for key, value in state.items()}
                    optimizer.state[stepped] = parts

    def require_all(self) -> None:
        """Raises RuntimeError where an optimizer was given a parameter later: it would step 16 bits, or a copy."""
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                if any(parameter in self._buckets for parameter in group["params"]):
                    raise RuntimeError(
                        f"param group {number} of {type(optimizer).__name__} got a parameter after training began, "
                        "which master weights cannot take in; give it to the optimizer in configure_optimizers, or use "
                        'OptimizerConfig(kind="replicated") with precision 32-true or bf16-true'
                    )

    # --- the way back -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_changed_params(self) -> None:
        """Takes over weights that somebody changed since the last step: a callback that averages or clips."""
        for parameter in self._param_views:
            self._move_data(parameter)
        for shard in self._param_shards.values():
            now = self._own_part(shard)
            if now.dtype != shard.tensor.dtype:
                is_kept = now == shard.tensor.to(now.dtype)
                # NaN is not equal to itself, and is kept all the same.
                shard.tensor.copy_(torch.where(is_kept | now.isnan(), shard.tensor, now.to(shard.tensor.dtype)))

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes the master weights' values from this rank's whole parameters, by name, where those were just loaded."""
        for shard in self._param_shards.values():
            if (value := state.get(shard.param.name)) is not None:
                part = value.reshape(-1)[shard.range.start : shard.range.end]
                shard.tensor.copy_(part.view(shard.tensor.shape))

    @torch.no_grad()
    def update_params(self) -> None:
        """Starts to bring the stepped weights to the parameters of all replicas."""
        for shard in self._param_shards.values():
            now = self._own_part(shard)
            if now.dtype != shard.tensor.dtype:
                now.copy_(shard.tensor)
        # The first parts of the model stand in the last buckets, and the next forward needs them first.
        for bucket in reversed(self._gradients.buckets):
            if bucket in self._flat:
                self._in_flight[bucket] = collectives.all_gather_(self._flat[bucket], bucket.shards, wait=False)

    def wait(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Returns when weights have landed: those of `parameters`, or all."""
        if not self._in_flight:
            return
        if parameters is None:
            wanted = list(self._in_flight)
        else:
            wanted = [bucket for bucket in map(self._buckets.get, parameters) if bucket is not None]
        for bucket in wanted:
            if (pending := self._in_flight.pop(bucket, None)) is not None:
                pending.wait()

    @torch.no_grad()
    def release(self) -> None:
        """Gives the parameters the master weights' dtype and values, where training is over.

        The gradients' memory takes them in, where it can, so that nothing new is needed. Collective over the replicas.
        """
        for bucket in self._gradients.buckets:
            self._release(bucket)

    def _release(self, bucket: Bucket) -> None:
        main_dtype = self._dtypes[bucket]
        if bucket.members[0].parameter.dtype == main_dtype:
            for param in bucket.members:
                _take_gradients_of(param.parameter, main_dtype)
            return
        values = bucket.gradient if bucket.gradient.dtype == main_dtype else bucket.gradient.to(main_dtype)
        for place, param in enumerate(bucket.members):
            if (shard := self._param_shards.get(param.parameter)) is not None:
                start = bucket.layout.starts[place]
                values[start + shard.range.start : start + shard.range.end].copy_(shard.tensor.reshape(-1))
                # It stood where the weights stand now.
                shard.tensor.grad = None
        collectives.all_gather_(values, bucket.shards)
        for place, param in enumerate(bucket.members):
            start, parameter = bucket.layout.starts[place], param.parameter
            parameter.grad = None
            parameter.grad_dtype = main_dtype
            parameter.data = values[start : start + parameter.numel()].view(parameter.shape)

    def _move_data(self, parameter: nn.Parameter) -> None:
        """Lets a parameter stand, with the values it has, where its master weights look for it."""
        view = self._param_views[parameter]
        if _place_of(parameter) != _place_of(view) or parameter.dtype != view.dtype:
            view.copy_(parameter.detach())
            parameter.data = view

    def _own_part(self, shard: ParamShard) -> Tensor:
        """The view of a parameter's data that its master weights of this rank stand for."""
        whole = shard.param.parameter.detach()
        if whole.shape == shard.tensor.shape:
            return whole
        return whole.view(-1)[shard.range.start : shard.range.end].view(shard.tensor.shape)


def _place_of(x: Tensor) -> tuple[int, int]:
    """Its memory, and where it begins there; meta tensors, which have none, differ too."""
    return x.untyped_storage()._cdata, int(x.storage_offset())


def _take_gradients_of(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    if parameter.grad_dtype != dtype:
        parameter.grad = None
        parameter.grad_dtype = dtype


def _part_of(value: object, parameter: Tensor, shard: ParamShard | None) -> object:
    """A state of the whole parameter as one of its master weights; others as they are."""
    if shard is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    part = value.reshape(-1)[shard.range.start : shard.range.end].view(shard.tensor.shape).clone()
    return part.to(shard.tensor.dtype) if part.is_floating_point() else part
