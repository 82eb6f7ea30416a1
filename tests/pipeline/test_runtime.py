"""The runtime does what its plan says, in order, and hands every message to the compute it is for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.comm.p2p import Mailbox
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.pipeline.lower import add_messages
from lightning_megatron.pipeline.runtime import Runtime
from lightning_megatron.pipeline.schedule import Action, Kind, forward_only, one_f_one_b
from tests.harness.ranks import run_on_ranks
from tests.pipeline.meshes import make_mesh

CPU = torch.device("cpu")


class Diary:
    """Stages that write down what they were given; a message's value tells where it came from."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage, self.num_stages = stage, num_stages
        self.lines: list[tuple[str, int, Any]] = []

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        self.lines.append(("F", microbatch, None if received is None else received.tolist()))
        if self.stage == self.num_stages - 1:
            return None
        # Longer with every microbatch: shapes travel with the message.
        return torch.full((microbatch + 1,), 100.0 * self.stage + microbatch)

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        self.lines.append(("B", microbatch, None if grad is None else grad.tolist()))
        return None if self.stage == 0 else torch.full((microbatch + 1,), -100.0 * self.stage - microbatch)


def diaries(pp: int, num: int) -> list[tuple[str, int, Any]]:
    mesh = make_mesh(Sizes(world=pp, pp=pp))
    diary = Diary(mesh.pp.rank, pp)
    runtime = Runtime(mesh.pp, Mailbox(mesh.pp, CPU))
    runtime.run(add_messages(one_f_one_b(pp=pp, microbatches=num))[mesh.pp.rank], diary)
    runtime.run(add_messages(forward_only(pp=pp, microbatches=num))[mesh.pp.rank], diary)
    return diary.lines


@pytest.mark.parametrize(("pp", "num"), [(2, 3), (4, 2), (4, 5)])
def test_computes_run_in_order_and_get_the_message_that_is_theirs(pp: int, num: int) -> None:
    for rank, lines in enumerate(run_on_ranks(pp, diaries, pp, num)):
        stage = pp - 1 - rank
        plan = [*one_f_one_b(pp=pp, microbatches=num)[stage], *forward_only(pp=pp, microbatches=num)[stage]]
        assert [(kind, m) for kind, m, _ in lines] == [(action.kind.value, action.microbatch) for action in plan]
        for kind, m, got in lines:
            if kind == "F":
                assert got == (None if stage == 0 else [100.0 * (stage - 1) + m] * (m + 1))
            else:
                assert got == (None if stage == pp - 1 else [-100.0 * (stage + 1) - m] * (m + 1))


def test_an_action_without_a_handler_is_told_with_its_place() -> None:
    pp = Mesh.single().pp
    with pytest.raises(NotImplementedError, match="no handler for 0W2") as error:
        Runtime(pp, Mailbox(pp, CPU)).run((Action(Kind.BACKWARD_WEIGHT, 0, 2),), Diary(0, 1))
    assert error.value.__notes__ == ["in action 0W2: stage 0 of 1, microbatch 2"]
