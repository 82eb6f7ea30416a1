"""Parameters of which each data-parallel rank holds a shard, and all of them only while they are used.

The flat tensor of all stays one tensor whose storage is freed and filled again, as FSDP does it: what autograd saved
of a parameter sees the values again once they are gathered. What is written to a parameter while it is gathered goes to
the shards before it is freed. A parameter that is not gathered is NaN, in one element of memory: whoever reads one,
reads what this rank does not have, and a write fails at once or at the end of the step.
Source: Rajbhandari et al., arXiv 1910.02054, section 5.3 (ZeRO, stage 3); Zhao et al., arXiv 2304.11277, section 4.2.
"""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_megatron.comm import collectives
from lightning_megatron.optim.bucket import FlatParams
from lightning_megatron.optim.float8_gather import Float8Gather, agree_on_scales
from lightning_megatron.optim.reductions import fingerprint
from lightning_megatron.precision.scaling import WeightCast
from lightning_megatron.sharding import is_deferred, settle, write_elements


class ShardedParams:
    """The parameters of a flat group, in `dtype` while they are gathered; this rank's shard keeps theirs of before,
    unless somebody has `main` weights of it. Of parameters without values this shard alone is drawn, or read.

    They are gathered as long as anybody holds them; with `casts`, of all members, as these make them, but for those who
    want them exact.
    """

    @torch.no_grad()
    def __init__(
        self, flat: FlatParams, dtype: torch.dtype, *, main: Tensor | None = None, casts: Sequence[WeightCast] = ()
    ) -> None:
        self.flat = flat
        parameters = [param.parameter for param in flat.members]
        num_elements, own_dtype = flat.layout.num_elements, parameters[0].dtype if main is None else dtype
        # Zeros, because gaps between parameters are gathered too.
        self.shard = torch.zeros(num_elements // flat.shards.size, dtype=own_dtype, device=flat.device)
        """This rank's shard [N/d], which the optimizer steps, or the copy of what it steps."""
        if main is not None:
            self.shard.copy_(main)
        for index, parameter in enumerate(parameters):
            own = flat.own_range(index)
            if main is None:
                write_elements(parameter, own.start, own.end, flat.part_of(self.shard, index))
            settle(parameter)
        self.gathered = torch.empty(num_elements, dtype=dtype, device=flat.device)
        """All parameters [N], with memory only while they are gathered."""
        self._views: dict[nn.Parameter, Tensor] = {}
        self._absent: dict[nn.Parameter, Tensor] = {}
        self.stand_ins = torch.full((len(parameters),), torch.nan, dtype=dtype, device=flat.device)
        """What each parameter reads while it is not gathered, [parameters]: NaN, unless somebody wrote to it."""
        for index, (parameter, start) in enumerate(zip(parameters, flat.layout.starts, strict=True)):
            self._views[parameter] = self.gathered[start : start + parameter.numel()].view(parameter.shape)
            self._absent[parameter] = self.stand_ins[index].expand(parameter.shape)
        self._holders: set[Hashable] = set()
        self._pending: collectives.Pending | None = None
        # Mark of the shard that hooks saw gathered.
        self._mark: Tensor | None = None
        self.float8 = Float8Gather(flat, casts, dtype) if casts else None
        """Gathers in float8, where they are gathered so."""
        self._is_rounded = False
        self.is_written = torch.zeros((), dtype=torch.bool, device=flat.device)
        """Whether somebody wrote to parameters while they were gathered in float8, which counts for nothing, []."""
        self._is_gathered = True
        self._free()

    def note(self) -> None:
        """Code of a user's comes next, which may write to the gathered parameters, and not to the shard."""
        self._mark = fingerprint(self.shard)

    def note_load(self) -> None:
        """A checkpoint was loaded into the shard."""
        self._forget_scales()
        if self._mark is not None:
            self.note()

    def hold(self, holder: Hashable, *, is_exact: bool = False) -> bool:
        """Starts to gather the parameters, unless they are there or on their way; returns whether it does. Collective
        over the shards."""
        self._holders.add(holder)
        if self._is_gathered and self._is_rounded and is_exact:
            self.take_changed()
            self._free()
        if self._is_gathered:
            return False
        if self.float8 is None or is_exact:
            self._gather()
        else:
            set_scales([self])
            self._gather_rounded(self.float8)
        self._is_gathered = True
        return True

    @torch.no_grad()
    def _gather(self) -> None:
        _resize(self.gathered, self.gathered.numel() * self.gathered.element_size())
        collectives.shard_slice(self.gathered, self.flat.shards).copy_(self.shard)
        self._pending = collectives.all_gather_(self.gathered, self.flat.shards, wait=False)
        self._is_rounded = False

    @torch.no_grad()
    def _gather_rounded(self, gather: Float8Gather) -> None:
        def finish(values: Tensor) -> Tensor:
            _resize(self.gathered, self.gathered.numel() * self.gathered.element_size())
            with torch.no_grad():
                gather.decast(values, self.gathered)
            return self.gathered

        self._pending = gather.start(self.shard)
        self._pending.finish = finish
        self._is_rounded = True

    def wait(self) -> None:
        """Waits for the values of the parameters, which somebody holds."""
        assert self._is_gathered, f"{self.flat.members[0].name} is used without being gathered"
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            for param in self.flat.members:
                parameter = param.parameter
                if _is_elsewhere(parameter, self._absent[parameter]):
                    raise written_while_absent([param.name])
                parameter.data = self._views[parameter]

    def let_go(self, holder: Hashable) -> None:
        """Frees the parameters where nobody else holds them, and takes over what was written to them."""
        if holder in self._holders:
            self._holders.remove(holder)
            if not self._holders:
                self.take_changed()
                self._free()

    def let_all_go(self) -> None:
        """Frees the parameters, whoever holds them: the shards have changed."""
        self._holders.clear()
        self._free()
        self._forget_scales()

    def _free(self) -> None:
        if not self._is_gathered:
            return
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._mark = None
        for parameter, absent in self._absent.items():
            parameter.data = absent
        _resize(self.gathered, 0)
        self._is_gathered = False
        if not self._is_rounded:
            # Whoever wanted them exact may have changed them.
            self._forget_scales()

    def _forget_scales(self) -> None:
        if self.float8 is not None:
            self.float8.scales = None

    @torch.no_grad()
    def take_changed(self) -> None:
        """Takes over parameters that were changed while they were gathered, as by a callback that clips."""
        if not self._is_gathered or self._pending is not None:
            return
        is_noted = self._mark is not None
        if self._mark is not None and not torch.equal(fingerprint(self.shard), self._mark):
            raise written_beside([param.name for param in self.flat.members])
        for parameter, view in self._views.items():
            if _is_elsewhere(parameter, view):
                # As by `parameter.data = ...`.
                view.copy_(parameter.detach())
                parameter.data = view
        now = collectives.shard_slice(self.gathered, self.flat.shards)
        if self.float8 is not None and self._is_rounded:
            self.is_written |= self.float8.differs(now, self.shard)
            return
        take_over(self.shard, now)
        if is_noted:
            self.note()

    def written_names(self) -> list[str]:
        """Names of parameters that were written to while they were absent."""
        are_absent = self.stand_ins.isnan().tolist()
        return [param.name for param, is_absent in zip(self.flat.members, are_absent, strict=True) if not is_absent]

    @torch.no_grad()
    def release(self, main: Tensor | None = None) -> None:
        """Gives the parameters the values and the dtype of their shards, or of the main weights, whole and in host
        memory: all of them may be more than the device can hold. Collective over the shards."""
        self.let_all_go()
        shard = self.shard if main is None else main
        values = torch.empty(self.gathered.numel(), dtype=shard.dtype, device=self.flat.device)
        collectives.shard_slice(values, self.flat.shards).copy_(shard)
        on_host = collectives.all_gather_(values, self.flat.shards).cpu()
        for param, start in zip(self.flat.members, self.flat.layout.starts, strict=True):
            parameter = param.parameter
            parameter.grad = None
            parameter.grad_dtype = values.dtype
            parameter.data = on_host[start : start + parameter.numel()].view(parameter.shape)


def take_over(main: Tensor, now: Tensor) -> None:
    """Takes over the elements of `now` that are no longer the cast of their main weights."""
    if now.dtype == main.dtype:
        main.copy_(now)
        return
    # NaN is not equal to itself and counts as unchanged.
    is_same = (now == main.to(now.dtype)) | now.isnan()
    main.copy_(torch.where(is_same, main, now.to(main.dtype)))


def set_scales(params: Iterable[ShardedParams]) -> None:
    """Agrees on the scales of those that are gathered in float8, and have none since their shards changed. Collective
    over the shards, and over the axes that cut the weights."""
    gathers = [(one.float8, one.shard) for one in params if one.float8 is not None and one.float8.scales is None]
    if gathers:
        agree_on_scales({gather: gather.amaxes(shard) for gather, shard in gathers})


def absent_names(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the parameters of which this process has no values, because they are not gathered; nor are they where
    `module.cpu()` or `module.double()` has given them memory since."""
    dense = [(k, one) for k, one in named if one.layout == torch.strided and not one.is_meta and not is_deferred(one)]
    return [name for name, one in dense if one.numel() > 1 and one.itemsize > 1 and _is_nan(one.detach())]


def _is_nan(x: Tensor) -> bool:
    """Whether a tensor is NaN throughout."""
    # One number tells it of nearly all that are not, and of those of one number in memory.
    first = x[(0,) * x.dim()]
    return bool(first != first) and (not any(x.stride()) or bool(x.isnan().all()))


def written_while_absent(names: Iterable[str]) -> RuntimeError:
    """The error for parameters that were written to while this rank had none of their values."""
    return RuntimeError(
        f"{', '.join(names)} was written to where it is not gathered: with OptimizerConfig("
        'kind="distributed_parameters") a rank has a weight while its part of the model runs; write to it in a hook '
        'between steps, or use kind "distributed_gradients"'
    )


def written_in_float8(names: Iterable[str]) -> RuntimeError:
    """The error for parameters that were written to while they had the numbers of a cast."""
    return RuntimeError(
        f"{', '.join(names)}, or a weight of the same layer, was written to while that ran, where weights have the "
        "numbers of their cast to float8; write to it in a hook between steps, or use Fp8Config(param_gather='full')"
    )


def written_beside(names: Sequence[str]) -> RuntimeError:
    """The error for master weights of these parameters that somebody wrote to, which the parameters would undo."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return RuntimeError(
        f"weights in the param_groups of an optimizer were changed between its steps, that of {names[0]}{more}: they "
        "are master weights, or the part of a rank, and what counts between steps are the module's own parameters. "
        'Change those (self.parameters()), or use OptimizerConfig(kind="replicated") with precision 32-true'
    )


def _is_elsewhere(parameter: Tensor, expected: Tensor) -> bool:
    """Whether a parameter's data lie in other memory than expected; also of tensors without memory."""
    storages = [one.untyped_storage()._cdata for one in (parameter, expected)]
    return storages[0] != storages[1] or parameter.storage_offset() != expected.storage_offset()


def _resize(tensor: Tensor, num_bytes: int) -> None:
    """Gives a tensor's storage so many bytes: an operation, which what counts memory sees."""
    torch.ops.inductor.resize_storage_bytes_(tensor, num_bytes)
