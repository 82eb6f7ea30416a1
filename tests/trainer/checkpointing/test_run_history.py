"""A run goes on from a checkpoint if it was once where that was saved, and from no other."""

import pytest

from lightning_megatron.mesh import Mesh
from lightning_megatron.trainer.checkpointing.run_history import KEY, FitHistory, begun, fits_of, goes_on_from

A, B = [("a", 0)], [("a", 0), ("b", 3)]


@pytest.mark.parametrize(
    ("later", "earlier", "step", "goes_on"),
    [
        (A, A, 6, True),
        (B, A, 3, True),
        (B, A, 2, True),
        (B, A, 6, False),
        (A, B, 6, False),
        ([("c", 0)], A, 3, False),
        (A, [], 3, False),
        ([], A, 3, False),
    ],
)
def test_a_run_goes_on_from_what_it_went_through(
    later: FitHistory, earlier: FitHistory, step: int, goes_on: bool
) -> None:
    assert goes_on_from(later, earlier, step) == goes_on


def test_a_fit_that_begins_has_an_id_of_its_own() -> None:
    world = Mesh.single().world
    one, other = begun(A, 3, world), begun(A, 3, world)
    assert one[:1] == other[:1] == A and one != other and one[1][1] == 3
    assert fits_of({KEY: [list(fit) for fit in one]}) == one and fits_of({}) == []
