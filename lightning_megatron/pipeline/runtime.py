"""Executes one rank's steps of a plan: computes by the handlers it is given, messages by a mailbox.

One interpreter serves every schedule. It knows nothing of models, losses or Lightning.
"""

from functools import partial
from typing import Protocol

from torch import Tensor

from lightning_megatron.comm.p2p import Mailbox, Payload, TensorMeta
from lightning_megatron.mesh import Axis
from lightning_megatron.pipeline.forward_backward_overlap import ForwardBackwardOverlap
from lightning_megatron.pipeline.grid import plan_grid
from lightning_megatron.pipeline.lower import P2PBatch, ScheduledProgram, other_end, peer_stage
from lightning_megatron.pipeline.schedule import Action, Kind
from lightning_megatron.pipeline.step_hooks import StepHook, hooked

OutputMetas = dict[tuple[int, int], TensorMeta]
"""Tensor metadata of the output of each (stage, microbatch)."""


class StageWork(Protocol):
    """The work of a rank's stages; outputs and gradients are None where there is no stage to hand them to."""

    def forward(self, stage: int, microbatch: int, received: Payload | None) -> Payload | None:
        """The output for the next stage, from what the previous one sent."""
        ...

    def backward(self, stage: int, microbatch: int, grad: Payload | None) -> Payload | None:
        """The gradient of what was received, from that of the output."""
        ...

    def backward_input(self, stage: int, microbatch: int, grad: Payload | None) -> Payload | None:
        """The gradient of what was received, with weight gradients deferred as far as the modules can (dgrad)."""
        ...

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """Adds the weight gradients that were deferred (wgrad)."""
        ...

    def reduce_gradients(self, stage: int) -> None:
        """Called when the gradients of a stage's weights are complete on this rank."""
        ...

    def gather_parameters(self, stage: int) -> None:
        """Called before the first forward of a stage."""
        ...


class Runtime:
    """Runs the steps of one rank; `pp` is the axis of pipeline ranks.

    `overlap` runs the pairs of plans that have some. A `step_hook`, where there is one, is called around every compute,
    every message that the rank waits for, and the sends that it waits for in the end (`SENDS`).
    """

    SENDS = "sends"

    def __init__(self, pp: Axis, mailbox: Mailbox, overlap: ForwardBackwardOverlap | None = None) -> None:
        self._pp = pp
        self._mailbox = mailbox
        self._overlap = overlap
        self.step_hook: StepHook | None = None
        # Inputs of later computes, by the receive that brings them or would bring them from another rank.
        self._inputs: dict[Action, Payload] = {}
        # Outputs that wait for their send to be posted.
        self._outputs: dict[Action, Payload] = {}
        self._output_metas: OutputMetas = {}

    def run(self, program: ScheduledProgram, work: StageWork, output_metas: OutputMetas | None = None) -> None:
        """Takes the steps in order; `output_metas` describes outputs that an earlier plan made, where this one runs
        backwards.

        An error in a step carries a note that names stage, microbatch and action and shows the position in the plan.
        """
        self._inputs.clear()
        self._outputs.clear()
        self._output_metas = dict(output_metas or {})
        indices = iter(range(len(program.plan[self._pp.rank])))
        for index in indices:
            if program.plan[self._pp.rank][index] in program.overlapped:
                assert self._overlap is not None
                self._overlap.run(
                    partial(self._take, index, work, program), partial(self._take, next(indices), work, program)
                )
            else:
                self._take(index, work, program)
        with hooked(self.step_hook, self.SENDS):
            self._mailbox.finish()

    def _take(self, index: int, work: StageWork, program: ScheduledProgram) -> None:
        """Takes the step at an index of this rank's plan."""
        step = program.plan[self._pp.rank][index]
        try:
            if isinstance(step, P2PBatch):
                self._exchange(step, program)
            else:
                with hooked(self.step_hook, step):
                    self._compute(step, work, program)
        except Exception as error:
            grid = plan_grid(program.plan, {self._pp.rank: index})
            error.add_note(f"in {_step_text(step, len(program.ranks))}\n{grid}")
            raise

    def _compute(self, action: Action, work: StageWork, program: ScheduledProgram) -> None:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind is Kind.FORWARD:
            received = self._inputs.pop(Action(Kind.RECV_FORWARD, stage, microbatch), None)
            output = work.forward(stage, microbatch, received)
            if output is not None:
                self._output_metas[stage, microbatch] = TensorMeta.of(output)
                self._hand_on(Action(Kind.SEND_FORWARD, stage, microbatch), output, program)
        elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
            run = work.backward if kind is Kind.BACKWARD else work.backward_input
            grad = run(stage, microbatch, self._inputs.pop(Action(Kind.RECV_BACKWARD, stage, microbatch), None))
            if grad is not None:
                self._hand_on(Action(Kind.SEND_BACKWARD, stage, microbatch), grad, program)
        elif kind is Kind.BACKWARD_WEIGHT:
            work.backward_weight(stage, microbatch)
        elif kind is Kind.REDUCE_GRADS:
            work.reduce_gradients(stage)
        else:
            assert kind is Kind.GATHER_PARAMS, f"{action} stands outside of an P2PBatch"
            work.gather_parameters(stage)

    def _hand_on(self, send: Action, payload: Payload, program: ScheduledProgram) -> None:
        """Stores a result for its send, or gives it to the neighbouring stage on this rank."""
        if program.ranks[peer_stage(send)] != self._pp.rank:
            self._outputs[send] = payload
        else:
            # Own tensors, as if they had come by a message: the neighbour marks them as its leaves.
            self._inputs[other_end(send)] = _detached(payload)

    def _exchange(self, exchange: P2PBatch, program: ScheduledProgram) -> None:
        mailbox = self._mailbox
        for message in exchange.posted:
            peer = program.ranks[peer_stage(message)]
            if message.kind is Kind.SEND_FORWARD:
                mailbox.send_forward(message, peer, self._outputs.pop(message))
            elif message.kind is Kind.SEND_BACKWARD:
                mailbox.send_backward(message, peer, self._outputs.pop(message))
            elif message.kind is Kind.RECV_FORWARD:
                mailbox.receive_forward(message, peer)
            else:
                meta = self._output_metas.pop((message.stage, message.microbatch)).of_gradient()
                mailbox.receive_backward(message, peer, meta)
        for message in exchange.awaited:
            with hooked(self.step_hook, message):
                self._inputs[message] = mailbox.wait(message)
        for message in exchange.released:
            with hooked(self.step_hook, message):
                mailbox.release(message)


def _detached(payload: Payload) -> Payload:
    if isinstance(payload, Tensor):
        return payload.detach()
    return {name: tensor.detach() for name, tensor in payload.items()}


def _step_text(step: Action | P2PBatch, num_stages: int) -> str:
    if isinstance(step, P2PBatch):
        return f"exchange {step}"
    return f"action {step}: stage {step.stage} of {num_stages}, microbatch {step.microbatch}"
