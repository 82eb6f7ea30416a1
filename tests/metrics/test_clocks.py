"""Offsets of clocks are found from meetings, within the bounds that the meetings give."""

import random

import pytest

from lightning_megatron.metrics.clocks import Meeting, offset_of


def met(ahead: float, seed: int, num_meetings: int) -> tuple[list[Meeting], list[Meeting]]:
    """What two ranks noted, the first by the true clock: each comes some time early and leaves some time late."""
    draw = random.Random(seed)
    own, first = [], []
    for number in range(num_meetings):
        early, late = [number + draw.uniform(-0.3, 0) for _ in range(2)], [draw.uniform(0, 0.2) for _ in range(2)]
        met_at = max(early)
        own.append((early[0] + ahead, met_at + late[0] + ahead))
        first.append((early[1], met_at + late[1]))
    return own, first


@pytest.mark.parametrize("ahead", [0.0, 1234.5, -0.7])
@pytest.mark.parametrize("seed", range(20))
def test_the_true_offset_lies_within_the_error_that_is_reported(ahead: float, seed: int) -> None:
    errors = []
    for num_meetings in (1, 3, 30):
        own, first = met(ahead, seed, num_meetings)
        found = offset_of(own, first)
        assert abs(found.seconds - ahead) <= found.error_seconds + 1e-9
        errors.append(found.error_seconds)
    assert errors[0] >= errors[1] >= errors[2]
    assert errors[2] < 0.1


def test_a_rank_is_not_ahead_of_itself() -> None:
    own, _ = met(5.0, 0, 4)
    assert offset_of(own, own).seconds == 0
