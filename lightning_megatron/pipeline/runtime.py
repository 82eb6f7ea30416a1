"""Executes one rank's steps of a plan: computes by the handlers it is given, messages by a mailbox.

One interpreter serves every schedule. It knows nothing of models, losses or Lightning.
"""

from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.comm.p2p import Mailbox, Receive, Send
from lightning_megatron.mesh import Axis
from lightning_megatron.pipeline.lower import Exchange, Step
from lightning_megatron.pipeline.schedule import Action, Kind


class StageWork(Protocol):
    """What a stage does for a microbatch."""

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """The output for the next stage (None on the last), from what the previous one sent (None on the first)."""
        ...

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """The gradient of what was received, from that of the output; None where there is no such neighbour."""
        ...


class Runtime:
    """Runs the steps of one rank; `pp` is the axis of stages."""

    def __init__(self, pp: Axis, mailbox: Mailbox) -> None:
        self._pp = pp
        self._mailbox = mailbox
        self._arrived: dict[Action, Tensor] = {}
        self._outgoing: dict[Action, Tensor] = {}
        self._likes: dict[int, tuple[torch.Size, torch.dtype]] = {}
        # shape and dtype of each microbatch's output, which its gradient will have

    def run(
        self,
        steps: tuple[Step, ...],
        work: StageWork,
        likes: dict[int, tuple[torch.Size, torch.dtype]] | None = None,
    ) -> None:
        """Takes the steps in order; `likes` tells of outputs that an earlier plan made, where this one runs backwards.

        An error in a compute carries a note that names stage, microbatch and action.
        """
        self._arrived.clear()
        self._outgoing.clear()
        self._likes = dict(likes or {})
        for step in steps:
            if isinstance(step, Exchange):
                self._exchange(step)
            else:
                self._compute(step, work)
        self._mailbox.finish()

    def _compute(self, action: Action, work: StageWork) -> None:
        stage, microbatch = action.stage, action.microbatch
        try:
            if action.kind is Kind.FORWARD:
                output = work.forward(microbatch, self._arrived.pop(Action(Kind.RECV_FORWARD, stage, microbatch), None))
                if output is not None:
                    self._outgoing[Action(Kind.SEND_FORWARD, stage, microbatch)] = output
                    self._likes[microbatch] = (output.shape, output.dtype)
            elif action.kind is Kind.BACKWARD:
                grad = work.backward(microbatch, self._arrived.pop(Action(Kind.RECV_BACKWARD, stage, microbatch), None))
                if grad is not None:
                    self._outgoing[Action(Kind.SEND_BACKWARD, stage, microbatch)] = grad
            else:
                raise NotImplementedError(f"this runtime has no handler for {action}")
        except Exception as error:
            error.add_note(f"in action {action}: stage {stage} of {self._pp.size}, microbatch {microbatch}")
            raise

    def _exchange(self, exchange: Exchange) -> None:
        sends, receives, expected = [], [], []
        for message in exchange.messages:
            to_next = message.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
            peer = self._pp.rank + (1 if to_next else -1)
            if message.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                is_forward = message.kind is Kind.SEND_FORWARD
                sends.append(Send(peer, self._outgoing.pop(message), has_header=is_forward))
            else:
                is_forward = message.kind is Kind.RECV_FORWARD
                receives.append(Receive(peer, None if is_forward else self._likes.pop(message.microbatch)))
                expected.append(message)
        for message, tensor in zip(expected, self._mailbox.exchange(sends, receives), strict=True):
            self._arrived[message] = tensor
