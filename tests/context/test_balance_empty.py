"""Empty microbatches leave a step by joining neighbours and by moving documents."""

from lightning_megatron.context.balance import RankGroup
from lightning_megatron.context.balance.empty import without_empty_groups

SIZES = (8, 4, 2, 1)


def test_idle_groups_of_any_size_join_their_neighbours_and_no_others() -> None:
    slot = [
        RankGroup(0, 4, ()),
        RankGroup(4, 1, (0,)),
        RankGroup(5, 1, ()),
        RankGroup(6, 1, (1,)),
        RankGroup(7, 1, (2,)),
    ]
    assert without_empty_groups([slot], SIZES, [9, 9, 9]) == ((RankGroup(0, 8, (0, 1, 2)),),)
    slot = [
        RankGroup(0, 4, (3,)),
        RankGroup(4, 1, (0,)),
        RankGroup(5, 1, ()),
        RankGroup(6, 1, (1,)),
        RankGroup(7, 1, (2,)),
    ]
    joined = ((RankGroup(0, 4, (3,)), RankGroup(4, 2, (0,)), RankGroup(6, 1, (1,)), RankGroup(7, 1, (2,))),)
    assert without_empty_groups([slot], SIZES, [9, 9, 9, 9]) == joined


def test_a_slot_without_documents_gets_the_shortest_of_the_fullest() -> None:
    slots = [[RankGroup(0, 1, (0, 1)), RankGroup(1, 1, (2,))], [RankGroup(0, 1, ()), RankGroup(1, 1, ())]]
    assert without_empty_groups(slots, (2, 1), [5, 3, 4]) == (
        (RankGroup(0, 1, (0,)), RankGroup(1, 1, (2,))),
        (RankGroup(0, 2, (1,)),),
    )


def test_where_documents_do_not_go_round_the_widest_group_stays_empty() -> None:
    slots = [[RankGroup(0, 1, (0,)), RankGroup(1, 1, ())], [RankGroup(0, 1, ()), RankGroup(1, 1, ())]]
    assert without_empty_groups(slots, (2, 1), [5]) == ((RankGroup(0, 2, (0,)),), (RankGroup(0, 2, ()),))
