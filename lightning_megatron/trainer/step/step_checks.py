"""Checks of what a user's training_step does that one device allows and ranks with parts of a model do not."""

import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_megatron.comm import collectives
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.trainer.step.first_steps import NUM_CHECKED, all_close

# Steps between two looks at the loss, after the first ones.
_EVERY = 50


class LossCheck:
    """Check that the ranks of `replica`, which train one model, compute one loss in the first steps, and now and then
    after them: a term may be added to a loss late."""

    def __init__(self, replica: Axis) -> None:
        self._replica = replica
        self._num_steps = 0

    def check(self, loss: Tensor | None) -> None:
        """Raises RuntimeError, on all ranks of the replica, where they have different losses. Collective over those."""
        self._num_steps += 1
        if self._replica.size == 1 or (self._num_steps > NUM_CHECKED and self._num_steps % _EVERY):
            return
        # Manual optimization may return whatever it likes.
        own = float(loss.detach()) if loss is not None and loss.numel() == 1 else None
        losses = collectives.gather_objects(own, self._replica)
        known = [value for value in losses if value is not None]
        if not known or (len(known) == len(losses) and all_close(known)):
            return
        told = ", ".join(
            f"rank {rank}: {value}" for rank, value in sorted(zip(self._replica.ranks, losses, strict=True))
        )
        raise RuntimeError(
            f"the ranks that train one model together computed different losses ({told}). A term over "
            "self.parameters() is one over the weights that a rank holds, and a random number of a rank's own differs: "
            "penalise weights by weight_decay of the optimizer, and draw random numbers from torch's default generator"
        )


class StateWatch:
    """Warns, once, of what a step in several parts of a global batch moves itself: buffers, and weights that are not
    trained (a teacher's), of which the first step alone is looked at. Those `left_out`, by name, are not."""

    def __init__(self, module: nn.Module, mesh: Mesh, left_out: Collection[str] = ()) -> None:
        self._mesh = mesh
        # Those of the package's own layers count what a whole step has seen.
        self._buffers = {
            f"{name}.{key}" if name else key: (child, key)
            for name, child in module.named_modules()
            if not type(child).__module__.startswith(__name__.partition(".")[0])
            and not isinstance(child, nn.modules.batchnorm._BatchNorm)
            for key, _ in child.named_buffers(recurse=False)
        }
        frozen = {name: one for name, one in module.named_parameters() if not one.requires_grad}
        self._frozen = {name: one for name, one in frozen.items() if name not in left_out}

    @contextmanager
    def watching(self, num_parts: int) -> Iterator[None]:
        """Compares before and after the step that runs inside the block, in so many parts."""
        if num_parts == 1 or not (self._buffers or self._frozen):
            yield
            return
        before = self._states()
        yield
        moved = [name for name, state in self._states().items() if state != before[name]]
        self._frozen = {}
        if moved:
            self._buffers = {}
        # Each stage has buffers and weights of its own.
        if moved and self._mesh.axis("dp+cp").is_first and self._mesh.tp.is_first:
            warnings.warn(
                f"training_step moves {', '.join(moved)}, once for each of the {num_parts} parts of a global batch "
                "(microbatches of data-parallel ranks) and from what that part holds, where one device would move it "
                "once: a moving average then has another rate. Move it in on_train_batch_end, or in one microbatch",
                UserWarning,
                # `certify` takes what this package warns of.
                stacklevel=1,
            )

    def _states(self) -> dict[str, tuple[int, int]]:
        found = {name: child._buffers[key] for name, (child, key) in self._buffers.items()}
        versions = {name: (id(buffer), 0 if buffer is None else buffer._version) for name, buffer in found.items()}
        return versions | {name: _state(one) for name, one in self._frozen.items()}


class HookWatch(TorchFunctionMode):
    """Warns, once, of hooks that a step sets on the gradients of what it computed, where it runs under a schedule or on
    a part of a global batch. The first step is looked at; a module with compiled code, of which a mode would make
    another graph, is not."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        super().__init__()
        self._is_first_rank = mesh.axis("dp+cp").is_first and mesh.tp.is_first
        self._is_over = any(child._compiled_call_impl is not None for child in module.modules())
        self._has_seen = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Looks at the step that runs inside the block."""
        if self._is_over:
            yield
            return
        self._is_over = True
        with self:
            yield
        if self._has_seen and self._is_first_rank:
            warnings.warn(
                "training_step sets hooks on the gradients of what it computed: they run once for each microbatch of "
                "each data-parallel rank, on its rows, and under a schedule these gradients are of a sum, which is "
                "divided by what the loss is a mean over at the end of the step. Change gradients of weights in "
                "on_before_optimizer_step, or clip them by Trainer(gradient_clip_val=...)",
                UserWarning,
                stacklevel=1,
            )

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.register_hook:
            self._has_seen |= not args[0].is_leaf
        return func(*args, **(kwargs or {}))


def _state(weight: Tensor) -> tuple[int, int]:
    """The exclusive or of a weight's bytes, since a change by `.data` counts for no version; the version of a weight
    that has no plain bytes."""
    own = weight.to_local() if isinstance(weight, DTensor) else weight.detach()
    is_plain = type(own) is Tensor and own.layout is torch.strided and not (own.is_quantized or own.is_nested)
    if not is_plain or own.is_meta or not own.numel():
        return weight._version, 0
    # A copy, whose bytes begin where integers may; what is left of it is filled up with zeros.
    read = own.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    integers = functional.pad(read, (0, -len(read) % 8)).view(torch.int64)
    # Not int(): that refuses numbers of 64 bits without a sign.
    return 0, int(torch.hash_tensor(integers).view(torch.int64))


@contextmanager
def refusing_all_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Raises RuntimeError inside the block where user code goes over all parameters of a module to differentiate."""
    own = list(modules)
    for module in own:
        # An instance attribute hides the method; removing it brings the method back. `parameters` goes through it.
        module.__dict__["named_parameters"] = MethodType(_named_parameters, module)
    try:
        yield
    finally:
        for module in own:
            del module.__dict__["named_parameters"]


def _named_parameters(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
    yield from type(module).named_parameters(module, *args, **kwargs)
    # Who took only the first, for its device or dtype, does not come here.
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"training_step went over all parameters of {type(module).__name__}, of which a pipeline rank holds those "
            "of its stages only: a term over them in the loss would be one over the last stage's weights. Penalise "
            "weights by weight_decay of the optimizer, or add to their gradients in on_before_optimizer_step, where "
            "each rank has its own; where nothing is differentiated, use torch.no_grad()"
        )
