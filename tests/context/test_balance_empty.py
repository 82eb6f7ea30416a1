"""Empty microbatches leave a step by joining neighbours and by moving documents."""

from lightning_megatron.context.balance import Group
from lightning_megatron.context.balance.empty import without_empty_groups

SIZES = (8, 4, 2, 1)


def test_idle_groups_of_any_size_join_their_neighbours_and_no_others() -> None:
    slot = [Group(0, 4, ()), Group(4, 1, (0,)), Group(5, 1, ()), Group(6, 1, (1,)), Group(7, 1, (2,))]
    assert without_empty_groups([slot], SIZES, [9, 9, 9]) == ((Group(0, 8, (0, 1, 2)),),)
    slot = [Group(0, 4, (3,)), Group(4, 1, (0,)), Group(5, 1, ()), Group(6, 1, (1,)), Group(7, 1, (2,))]
    joined = ((Group(0, 4, (3,)), Group(4, 2, (0,)), Group(6, 1, (1,)), Group(7, 1, (2,))),)
    assert without_empty_groups([slot], SIZES, [9, 9, 9, 9]) == joined


def test_a_slot_without_documents_gets_the_shortest_of_the_fullest() -> None:
    slots = [[Group(0, 1, (0, 1)), Group(1, 1, (2,))], [Group(0, 1, ()), Group(1, 1, ())]]
    assert without_empty_groups(slots, (2, 1), [5, 3, 4]) == (
        (Group(0, 1, (0,)), Group(1, 1, (2,))),
        (Group(0, 2, (1,)),),
    )


def test_where_documents_do_not_go_round_the_widest_group_stays_empty() -> None:
    slots = [[Group(0, 1, (0,)), Group(1, 1, ())], [Group(0, 1, ()), Group(1, 1, ())]]
    assert without_empty_groups(slots, (2, 1), [5]) == ((Group(0, 2, (0,)),), (Group(0, 2, ()),))
