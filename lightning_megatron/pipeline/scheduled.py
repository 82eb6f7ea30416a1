"""The driver of a training schedule: a call of the model runs this rank's stage for one microbatch.

The caller's step runs up to the model call on every stage, and past it on the last stage only: on the others the call
hands its output to the schedule and leaves the step by `StageExit`. That is how an ordinary step, written for one
device, runs under 1F1B.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.mesh import Axis
from lightning_megatron.pipeline.module import PipelineModule

_OTHER_MODE = 'use MegatronStrategy(pipeline=PipelineConfig(mode="collective"))'


class StageExit(BaseException):
    """Leaves the caller's step on a stage that is not the last; a BaseException, so `except Exception` lets it pass."""


class ScheduledCall:
    """Runs model calls as microbatches of a schedule; serves as `PipelineModule.driver` and as `StageWork`.

    `enter_step(microbatch)` enters the caller's step and returns the loss, scaled as it shall be differentiated;
    `differentiate(loss)` runs its backward; `first_samples` are the places of the microbatches' first rows within the
    global batch; inside `opened()` the linears add the gradients of their weights by themselves. With one stage a step
    may call its models as often as it likes, or not at all; with several it calls one model once.
    """

    def __init__(
        self,
        modules: Sequence[PipelineModule],
        pp: Axis,
        enter_step: Callable[[int], Tensor],
        differentiate: Callable[[Tensor], None],
        first_samples: Sequence[int],
        opened: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._modules = modules
        self._pp = pp
        self._enter_step = enter_step
        self._differentiate = differentiate
        self._first_samples = first_samples
        self._opened = opened
        self._received: Tensor | None = None
        self._output: Tensor | None = None
        self._num_calls = 0
        self._alive: dict[int, tuple[Tensor | None, Tensor]] = {}

    @torch.compiler.disable
    def __call__(self, module: PipelineModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._num_calls += 1
        if self._pp.size > 1 and self._num_calls > 1:
            raise RuntimeError(
                "the step calls a pipelined model more than once; a schedule runs one call per microbatch; "
                + _OTHER_MODE
            )
        hidden, context = module.prepare(*args, **kwargs)
        output = module.run_stage(hidden if self._pp.is_first else self._received, context)
        module.draws.call += 1
        if self._pp.is_last:
            return output
        if not isinstance(output, Tensor):
            raise RuntimeError(f"a stage hands {type(output).__name__} to the next; it must hand one tensor")
        self._output = output
        raise StageExit

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Enters the caller's step for a microbatch."""
        self._received = received.requires_grad_(received.is_floating_point()) if received is not None else None
        self._output, self._num_calls = None, 0
        for module in self._modules:
            module.draws.first_sample, module.draws.call = self._first_samples[microbatch], 0
        try:
            result = self._enter_step(microbatch)
        except StageExit:
            assert self._output is not None
            result = self._output
            self._alive[microbatch] = (self._received, result)
            return result
        finally:
            self._output = None
        if self._num_calls == 0 and self._pp.size > 1:
            raise RuntimeError(
                f"training_step ended on stage {self._pp.rank} of {self._pp.size} without calling the pipelined model; "
                "every step must call it once"
            )
        if not self._pp.is_last:
            raise RuntimeError(
                f"training_step went on after the model call on stage {self._pp.rank} of {self._pp.size}: a bare "
                "`except:` swallowed the exit of the stage; write `except Exception:`"
            )
        self._alive[microbatch] = (self._received, result)
        return None

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """Runs the backward of a microbatch through this stage."""
        received, output = self._alive.pop(microbatch)
        with self._opened():
            if self._pp.is_last:
                self._differentiate(output)
            elif output.requires_grad:
                torch.autograd.backward(output, grad)
        if received is None:
            return None
        return received.grad if received.grad is not None else torch.zeros_like(received)


class LocalCall:
    """The driver of a model in one piece whose step loop somebody owns: runs all parts here and now."""

    def __call__(self, module: PipelineModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, context = module.prepare(*args, **kwargs)
        output = module.run_stage(hidden, context)
        module.draws.call += 1
        return output
