"""Master weights: float32 weights that the user's optimizer steps, and their copy back to the model's parameters.

Under mixed precision parameters are in 16 bits; with the distributed optimizer each data-parallel rank
has only those of its shard. The optimizer object stays the user's own: its parameters are replaced in place, so that
schedulers and callbacks that hold it go on. After a step the new weights are cast, and shards are all-gathered.

    bytes a parameter, of d ranks       weights   gradients   master weights   two moments
    32-true, replicated                 4         4           -              8
    32-true, distributed                4         4           -              8/d
    bf16-mixed, replicated              2         4           4              8
    bf16-mixed, distributed             2         4           4/d            8/d
    bf16-mixed, distributed gradients   2         4/d         4/d            8/d
    bf16-mixed, distributed parameters  -         4/d         4/d            8/d

Where a parameter and its master weights have one dtype they share memory, unless those are in host memory
(`optim.host_weights`).
Sharded parameters are in the optimizer's shards alone (`optim.sharded_params`), and gathered from there.
Source: Rajbhandari et al., arXiv 1910.02054, sections 3.1 and 5.1.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.comm import collectives
from lightning_megatron.host_memory import wait_for_copies
from lightning_megatron.optim.bucket import Bucket, ModelParam
from lightning_megatron.optim.gradients import Gradients, ParamShard
from lightning_megatron.optim.host_weights import HostWeights, offloaded
from lightning_megatron.optim.reductions import fingerprint
from lightning_megatron.optim.sharded_params import ShardedParams, take_over, written_beside


class MasterWeights:
    """The master weights of one rank's buckets, which replace the parameters in `optimizers`.

    Parameters get the low dtype of their bucket. With shards their data moves into one flat tensor a bucket, which is
    all-gathered in place. With `is_watched` code of a user's runs between steps that may write to master weights of
    another dtype beside their parameters, which is refused.
    """

    @torch.no_grad()
    def __init__(self, gradients: Gradients, optimizers: Iterable[Optimizer], *, is_watched: bool = False) -> None:
        self._gradients = gradients
        self._is_watched = is_watched
        # Marks of master weights of another dtype than their parameters, as those were cast from them.
        self._marks: dict[ParamShard, Tensor] = {}
        self._flat: dict[Bucket, Tensor] = {}
        # The parameters' data: views of the flat tensors where shards are gathered.
        self._param_views: dict[nn.Parameter, Tensor] = {}
        # Dtypes of the master weights.
        self._dtypes: dict[Bucket, torch.dtype] = {}
        self._in_flight: dict[Bucket, collectives.Pending] = {}
        self._sharded: dict[Bucket, ShardedParams] = {}
        self._on_host: dict[Bucket, HostWeights] = {}
        config = gradients.config
        self._offloaded = set(offloaded(gradients.buckets, config.offload_fraction) if config.cpu_offload else ())
        self._optimizers = list(optimizers)
        param_shards = [shard for bucket in gradients.buckets for shard in self._convert(bucket)]
        gradients.param_shards = param_shards
        self._frozen = [
            ShardedParams(flat, flat.members[0].parameter.dtype, casts=gradients.casts_of(flat))
            for flat in gradients.frozen
        ]
        self.frozen_shards = [
            ParamShard(param, nn.Parameter(flat.part_of(one.shard, index), requires_grad=False), flat.own_range(index))
            for flat, one in zip(gradients.frozen, self._frozen, strict=True)
            for index, param in enumerate(flat.members)
            if not flat.own_range(index).is_empty
        ]
        """Shards of frozen parameters that are sharded, which no optimizer steps."""
        gradients.has_master_weights = True
        self._param_shards = {shard.param.parameter: shard for shard in param_shards}
        self._buckets = {param.parameter: bucket for bucket in gradients.buckets for param in bucket.members}
        for optimizer in self._optimizers:
            self._replace_params(optimizer)
        self.note()

    def note(self) -> None:
        """Master weights and parameters agree: what is written to either from now on is a hook's."""
        if self._is_watched:
            shards = [one for one in self._copied_shards() if self._own_part(one).dtype != one.tensor.dtype]
            self._marks = {shard: fingerprint(shard.tensor.detach()) for shard in shards}

    def _require_noted(self) -> None:
        """Raises RuntimeError for master weights that somebody wrote to, and not to their parameters."""
        now = {shard: fingerprint(shard.tensor.detach()) for shard in self._marks}
        if now and not torch.equal(torch.stack(list(now.values())), torch.stack(list(self._marks.values()))):
            wrong = [shard.param.name for shard, mark in self._marks.items() if not torch.equal(now[shard], mark)]
            raise written_beside(wrong)

    def _convert(self, bucket: Bucket) -> Iterator[ParamShard]:
        own_dtype = self._dtypes[bucket] = bucket.members[0].parameter.dtype
        dtype = own_dtype if bucket.low is None else bucket.low
        host = None
        if bucket in self._offloaded:
            host = self._on_host[bucket] = HostWeights(bucket)
        if bucket.shards_params:
            main, casts = None if host is None else host.main, self._gradients.casts_of(bucket)
            sharded = self._sharded[bucket] = ShardedParams(bucket, dtype, main=main, casts=casts)
            if host is not None:
                host.attach(sharded.shard)
            yield from _parts(bucket, sharded.shard if host is None else host.main)
            return
        if bucket.shards.size > 1 or host is not None:
            self._flat[bucket] = torch.zeros(bucket.layout.num_elements, dtype=dtype, device=bucket.device)
        for index, param in enumerate(bucket.members):
            parameter, own = param.parameter, bucket.own_range(index)
            before = parameter.detach()
            if bucket in self._flat:
                start = bucket.layout.starts[index]
                self._param_views[parameter] = self._flat[bucket][start : start + before.numel()].view(before.shape)
            else:
                self._param_views[parameter] = before if dtype == own_dtype else torch.empty_like(before, dtype=dtype)
            self._move_data(parameter)
            _set_grad_dtype(parameter, bucket.dtype)
            if host is not None or (own.is_empty and parameter.numel()):
                continue
            full = parameter.detach() if dtype == own_dtype else before
            is_full = own.end - own.start == parameter.numel()
            part = full if is_full else full.reshape(-1)[own.start : own.end]
            if dtype != own_dtype and part.untyped_storage().nbytes() > part.numel() * part.element_size():
                # A copy, so that the full float32 parameter can be freed, or the bucket of an earlier fit.
                part = part.clone()
            yield ParamShard(param, _stepped(param, part, is_full=is_full), own)
        if host is not None:
            host.attach(collectives.shard_slice(self._flat[bucket], bucket.shards))
            yield from _parts(bucket, host.main)

    @property
    def on_host(self) -> list[Tensor]:
        """Flat tensors in host memory, of which shards that optimizers step may be a part."""
        return [tensor for host in self._on_host.values() for tensor in host.held]

    def lowered_names(self) -> set[str]:
        """Names of this rank's parameters whose master weights, on whatever rank, have a wider dtype."""
        return {
            param.name
            for bucket in self._gradients.buckets
            for param in bucket.members
            if param.parameter.dtype != self._dtypes[bucket]
        }

    def sharded_names(self) -> set[str]:
        """Names of this rank's parameters whose values are in shards alone, on whatever rank."""
        return {param.name for one in self.sharded for param in one.flat.members}

    @property
    def sharded(self) -> list[ShardedParams]:
        """The parameters that are sharded, in the order in which a backward uses them, and frozen ones."""
        return [*self._sharded.values(), *self._frozen]

    # --- the optimizer ----------------------------------------------------------------------------------------------

    def _replace_params(self, optimizer: Optimizer) -> None:
        """Replaces parameters of the optimizer by master weights, with the state there is."""
        for group in optimizer.param_groups:
            indices = [
                index
                for index, parameter in enumerate(group["params"])
                if parameter not in self._buckets or parameter in self._param_shards
            ]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][index] for index in indices]
            states = {parameter: optimizer.state.pop(parameter, None) for parameter in group["params"]}
            params = [group["params"][index] for index in indices]
            group["params"] = [self._param_shards[p].tensor if p in self._param_shards else p for p in params]
            for parameter, stepped in zip(params, group["params"], strict=True):
                if (state := states[parameter]) is not None:
                    shard = self._param_shards.get(parameter)
                    parts = {key: _part_of(value, parameter, shard) for key, value in state.items()}
                    optimizer.state[stepped] = parts

    def require_all(self) -> None:
        """Raises RuntimeError where an optimizer got a parameter after training began: it would step 16 bits."""
        frozen = {param.parameter for one in self._frozen for param in one.flat.members}
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                if any(parameter in self._buckets or parameter in frozen for parameter in group["params"]):
                    raise RuntimeError(
                        f"param group {number} of {type(optimizer).__name__} got a parameter after training began, "
                        "which master weights cannot take in; give it to the optimizer in configure_optimizers, or use "
                        'OptimizerConfig(kind="replicated") with precision 32-true or bf16-true'
                    )

    # --- back to the parameters -------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_changed_params(self) -> None:
        """Takes over parameters that were changed since the last step, as by a callback that averages or clips."""
        self._require_noted()
        for parameter in self._param_views:
            self._move_data(parameter)
        for one in self.sharded:
            one.take_changed()
        for host in self._on_host.values():
            host.take_changed()
        for shard in self._copied_shards():
            now = self._own_part(shard)
            if now.dtype != shard.tensor.dtype:
                take_over(shard.tensor, now)
        self.note()

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Sets master weights from values of this rank's full parameters, by name, which were just loaded."""
        for shard in (*self._param_shards.values(), *self.frozen_shards):
            if (value := state.get(shard.param.name)) is not None:
                part = value.reshape(-1)[shard.range.start : shard.range.end]
                shard.tensor.copy_(part.view(shard.tensor.shape))
        wait_for_copies(self._gradients.device)
        for host in self._on_host.values():
            host.send()
        self.note()
        for one in self.sharded:
            one.note_load()

    @torch.no_grad()
    def update_params(self) -> None:
        """Casts the stepped master weights to the parameters, and starts to all-gather shards."""
        for shard in self._copied_shards():
            now = self._own_part(shard)
            if now.dtype != shard.tensor.dtype:
                now.copy_(shard.tensor)
        # The first parts of the model are in the last buckets, and the next forward needs them first.
        for bucket in reversed(self._gradients.buckets):
            if bucket in self._on_host:
                self._on_host[bucket].send()
            if bucket in self._flat and bucket.shards.size > 1:
                self._in_flight[bucket] = collectives.all_gather_(self._flat[bucket], bucket.shards, wait=False)
        self.note()

    def wait(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Waits for the gathered values of `parameters`, or of all."""
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
        """Gives the parameters the master weights' dtype and values, at the end of training.

        They move into the gradients' memory where it has the dtype, so that no new memory is needed. Collective over
        data-parallel ranks.
        """
        for bucket in self._gradients.buckets:
            if bucket in self._sharded:
                host = self._on_host.get(bucket)
                self._sharded[bucket].release(None if host is None else host.main)
            else:
                self._release(bucket)
        for one in self._frozen:
            one.release()
        self._sharded, self._frozen = {}, []

    def _release(self, bucket: Bucket) -> None:
        main_dtype = self._dtypes[bucket]
        if bucket.members[0].parameter.dtype == main_dtype:
            for param in bucket.members:
                _set_grad_dtype(param.parameter, main_dtype)
            return
        values = bucket.gradient if bucket.gradient.dtype == main_dtype else bucket.gradient.to(main_dtype)
        for index, param in enumerate(bucket.members):
            if (shard := self._param_shards.get(param.parameter)) is not None:
                start = bucket.layout.starts[index]
                values[start + shard.range.start : start + shard.range.end].copy_(shard.tensor.reshape(-1))
                # The gradient was a view of the memory that the weights take now.
                shard.tensor.grad = None
        collectives.all_gather_(values, bucket.shards)
        for index, param in enumerate(bucket.members):
            start, parameter = bucket.layout.starts[index], param.parameter
            parameter.grad = None
            parameter.grad_dtype = main_dtype
            parameter.data = values[start : start + parameter.numel()].view(parameter.shape)

    def _copied_shards(self) -> Iterator[ParamShard]:
        """Master weights beside which this rank has the parameter, on one device."""
        return (
            shard
            for parameter, shard in self._param_shards.items()
            if parameter in self._param_views and self._buckets[parameter] not in self._on_host
        )

    def _move_data(self, parameter: nn.Parameter) -> None:
        """Moves a parameter's data, with the values it has, to its view of the flat tensor."""
        view = self._param_views[parameter]
        if _address_of(parameter) != _address_of(view) or parameter.dtype != view.dtype:
            view.copy_(parameter.detach())
            parameter.data = view

    def _own_part(self, shard: ParamShard) -> Tensor:
        """The view of a parameter's data that this rank's master weights correspond to."""
        full = shard.param.parameter.detach()
        if full.shape == shard.tensor.shape:
            return full
        return full.view(-1)[shard.range.start : shard.range.end].view(shard.tensor.shape)


def _parts(bucket: Bucket, main: Tensor) -> Iterator[ParamShard]:
    """The master weights of each parameter of a bucket, as views of this rank's flat shard of them."""
    for index, param in enumerate(bucket.members):
        _set_grad_dtype(param.parameter, bucket.dtype)
        own, part = bucket.own_range(index), bucket.part_of(main, index)
        if own.is_empty and param.parameter.numel():
            continue
        is_full = own.end - own.start == param.parameter.numel()
        part = part.view(param.parameter.shape) if is_full else part
        yield ParamShard(param, _stepped(param, part, is_full=is_full), own)


def _stepped(param: ModelParam, part: Tensor, *, is_full: bool) -> nn.Parameter:
    """The master weights of a part of a parameter, or of all of it."""
    # Of this very type: torch has its fast kernels for no subclass.
    tensor = nn.Parameter(part)
    # A gradient comes here by the sum over ranks, and not by autograd.
    tensor.register_post_accumulate_grad_hook(_refuse_gradient)
    if is_full:
        # Optimizers that read whole matrices put them together by it.
        tensor.shard = param.shard  # type: ignore[attr-defined]
    return tensor


def _refuse_gradient(stepped: Tensor) -> None:
    raise RuntimeError(
        f"a backward made a gradient of a weight {tuple(stepped.shape)} in the param_groups of an optimizer: those are "
        "master weights, or the part of a rank, of which a loss has another value on each rank, and their gradients "
        "are summed over no ranks; compute the loss from the module's own parameters (self.parameters())"
    )


def _address_of(x: Tensor) -> tuple[int, int]:
    """The tensor's storage and its offset there; also tells meta tensors apart, which have no memory."""
    return x.untyped_storage()._cdata, int(x.storage_offset())


def _set_grad_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    if parameter.grad_dtype != dtype:
        parameter.grad = None
        parameter.grad_dtype = dtype


def _part_of(value: object, parameter: Tensor, shard: ParamShard | None) -> object:
    """The part of a state of parameter shape that belongs to the master weights; other states as they are."""
    if shard is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    part = value.reshape(-1)[shard.range.start : shard.range.end].view(shard.tensor.shape).clone()
    return part.to(shard.tensor) if part.is_floating_point() else part.to(shard.tensor.device)
