"""In a training step a forward and a backward really take turns where tokens are on their way to experts."""

import threading
from itertools import pairwise
from typing import Any

import pytest

from lightning_megatron.comm import collectives
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import QUIET, Layout
from tests.trainer.small_experts import fit

pytestmark = pytest.mark.filterwarnings(QUIET)


def exchanges(layout: Layout) -> tuple[list[str], list[float]]:
    """The thread of each exchange of rows in the order in which they began, and the losses."""
    began: list[str] = []
    real: Any = collectives.all_to_all_v

    def noting(*args: Any, **options: Any) -> Any:
        began.append("main" if threading.current_thread() is threading.main_thread() else "other")
        return real(*args, **options)

    collectives.all_to_all_v = noting
    try:
        return began, fit(layout, limit_train_batches=1, limit_val_batches=0).losses
    finally:
        collectives.all_to_all_v = real


@pytest.mark.parametrize(
    ("world", "pp", "ep", "etp"), [(2, 1, 1, 2), (4, 2, 2, 1)], ids=["one stage, etp2", "pp2, ep2"]
)
def test_exchanges_of_a_forward_and_of_a_backward_alternate(world: int, pp: int, ep: int, etp: int) -> None:
    plain, joint = (
        run_on_ranks(
            world,
            exchanges,
            Layout(world=world, pp=pp, ep=ep, etp=etp, microbatches=2, joint=is_overlapped),
            init=False,
        )
        for is_overlapped in (False, True)
    )
    for (began, losses), (wanted_began, wanted) in zip(joint, plain, strict=True):
        assert losses == pytest.approx(wanted, abs=1e-12)
        assert "other" not in wanted_began
        assert len(began) == len(wanted_began)
    # The last stage has layers of experts, and a forward overlaps a backward; it is on the first ranks.
    began, _ = joint[0]
    turns = sum(one != other for one, other in pairwise(began))
    assert "other" in began and turns >= 6, began
    assert [began for began, _ in joint[: world // pp]] == [began] * (world // pp)
