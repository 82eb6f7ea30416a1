"""Documents go to the group that is free first, on clocks that start where the wider groups end."""

from lightning_megatron.context.balance.tree import grow, slowest_documents
from tests.context.plans import ONLY_LINEAR


def test_the_longest_document_left_goes_to_the_group_that_is_free_first() -> None:
    lengths = [80, 70, 60, 50, 40]
    alone = [[length / 2 for length in lengths], [float(length) for length in lengths]]
    tree = grow([[], [0, 1, 2, 3, 4]], alone, (2, 1), 2, lengths, ONLY_LINEAR)
    assert tree.documents == [[[]], [[0, 3, 4], [1, 2]]]
    assert tree.slowest_seconds == 170 and slowest_documents(tree) == [0, 3, 4]


def test_a_rank_of_a_wide_group_gets_less_afterwards() -> None:
    lengths = [100, 30, 20, 20, 10]
    alone = [[length / 2 for length in lengths], [float(length) for length in lengths]]
    tree = grow([[0], [1, 2, 3, 4]], alone, (2, 1), 4, lengths, ONLY_LINEAR)
    assert tree.documents == [[[0], []], [[], [], [1, 4], [2, 3]]]
    assert tree.slowest_seconds == 50
