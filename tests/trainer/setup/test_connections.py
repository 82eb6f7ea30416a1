"""All ranks of a layout make equally many process groups, in one order, with the same members at each turn."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import pytest

from lightning_megatron.mesh import Sizes
from tests.harness.sample import every_nth
from tests.trainer.setup.recorded_groups import Made, groups_of, without_messages

SMALL = [
    Sizes(),
    Sizes(world=5),
    Sizes(world=8, tp=2, pp=2, cp=2, ep=2, sequence_parallel=True),
    Sizes(world=16, tp=2, pp=4, vp=3, ep=4),
    Sizes(world=24, tp=2, pp=3, vp=2, cp=2, cp_ulysses=2, context_groups=(2, 4), placement="v"),
    Sizes(world=32, pp=2, cp=4, cp_ulysses=2, ep=4, etp=2),
    Sizes(world=96, tp=4, pp=3, ep=16),
    Sizes(world=256, tp=8, pp=8, vp=2, placement="v", ep=2),
    Sizes(world=512, tp=8, pp=4, cp=4, cp_ulysses=2, ep=8, vp=4),
    Sizes(world=1024, tp=8, pp=16, vp=2, ep=8, etp=1),
]
LARGE = [
    Sizes(world=3_072, tp=8, pp=12),
    Sizes(world=16_384, tp=8, pp=16, vp=2, cp=2, ep=8),
    Sizes(world=4_096, tp=8, pp=8, vp=4, cp=8, cp_ulysses=8, ep=64),
    Sizes(world=10_000, tp=4, pp=5, cp=5),
    Sizes(world=16_384, tp=8, pp=16, vp=2, ep=64, etp=1, context_groups=(2, 4, 8), placement="v"),
    Sizes(world=16_384, tp=8, pp=64, cp=16, cp_ulysses=4, ep=32, etp=2),
    Sizes(world=16_384, tp=8),
    Sizes(world=16_384),
]


def name_of(sizes: Sizes) -> str:
    counts = ("tp", "pp", "vp", "cp", "cp_ulysses", "ep", "etp")
    return "-".join([str(sizes.world), *(f"{name}{size}" for name in counts if (size := sizes.of(name)) > 1)])


def num_turns(world: int, groups_of_rank: Callable[[int], list[Made]]) -> int:
    """The number of groups that each rank makes. Raises AssertionError unless at each turn all ranks make a group of
    one kind, and those who make a group are its members.
    """
    turns: list[defaultdict[Made, list[int]]] = []
    for rank in range(world):
        made = groups_of_rank(rank)
        turns += [defaultdict(list) for _ in range(len(made) - len(turns))]
        for turn, one in enumerate(made):
            turns[turn][one].append(rank)
    for turn in turns:
        assert len({kind for kind, _ in turn}) == 1
        assert all(list(ranks) == makers for (_, ranks), makers in turn.items())
        assert sum(map(len, turn.values())) == world
    return len(turns)


@pytest.fixture(autouse=True)
def _without_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    without_messages(monkeypatch)


@pytest.mark.parametrize("sizes", SMALL + every_nth(LARGE, len(LARGE)), ids=name_of)
def test_ranks_make_equally_many_groups_and_members_theirs_at_one_turn(sizes: Sizes) -> None:
    assert num_turns(sizes.world, partial(groups_of, sizes)) > 0


@pytest.mark.parametrize("fault", ["fewer", "other order"])
def test_a_rank_that_makes_fewer_groups_or_others_first_is_found(fault: str) -> None:
    sizes = Sizes(world=16, tp=2, pp=2, cp=2)

    def faulty(rank: int) -> list[Made]:
        made = groups_of(sizes, rank)
        if rank == 5:
            made = made[:-1] if fault == "fewer" else [made[1], made[0], *made[2:]]
        return made

    with pytest.raises(AssertionError):
        num_turns(sizes.world, faulty)
