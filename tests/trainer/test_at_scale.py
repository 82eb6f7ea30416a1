"""Ranks by the thousand: few sockets, little through one store, and nothing on a rank that grows with the world."""

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_megatron.mesh import Sizes
from tests.harness.counting_store import gloo_cost
from tests.harness.sample import every_nth
from tests.trainer.at_scale import LAYOUTS, on_host, recorded, start_of, traffic_of
from tests.trainer.recorded_calls import Call

MOST_SOCKETS, MOST_STORE_BYTES = 64, 1e9
# Whatever the world, but for the one that collects what all have written.
MOST_BYTES_OF_A_RANK = 100_000


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    return recorded(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("sizes", [Sizes(world=9), Sizes(world=10), *LAYOUTS], ids=lambda sizes: str(sizes.world))
def test_a_rank_has_few_sockets_and_little_goes_through_the_store(sizes: Sizes) -> None:
    start = start_of(sizes)
    assert start.most_sockets < MOST_SOCKETS
    assert start.store_bytes < MOST_STORE_BYTES


def test_one_group_over_many_ranks_would_need_as_many_sockets_and_the_cube_of_bytes() -> None:
    (few_bytes, _), (bytes_, sockets) = gloo_cost(8), gloo_cost(24)
    assert sockets >= 24 and bytes_ > 3**2.3 * few_bytes


@pytest.mark.parametrize("worlds", every_nth([(64, 1_024), (1_024, 16_384)], 2), ids=str)
def test_nothing_that_is_said_grows_with_pairs_of_ranks(calls: list[Call], worlds: tuple[int, int]) -> None:
    few, many = (on_host(calls, Sizes(world=world)) for world in worlds)
    growth = worlds[1] / worlds[0]
    for phase in few:
        assert many[phase].median_bytes <= max(1.2 * few[phase].median_bytes, few[phase].median_bytes + 100)
        assert many[phase].median_bytes < MOST_BYTES_OF_A_RANK
        assert many[phase].most_bytes <= 1.2 * growth * few[phase].most_bytes
        # What goes to the first rank passes by a rank on each level.
        assert many[phase].all_bytes <= 2 * growth * few[phase].all_bytes
        assert many[phase].rounds <= 2.5 * few[phase].rounds
    assert many["step"].rounds == 0


def test_a_call_that_gives_each_rank_what_all_have_is_found(calls: list[Call]) -> None:
    call = replace(calls[0], name="gather_objects", given_bytes=100)
    few, many = (traffic_of(call, num_ranks) for num_ranks in (64, 256))
    assert many.median_bytes > 3 * few.median_bytes and many.all_bytes > 12 * few.all_bytes


def test_no_phase_gathers_objects_of_all_ranks_on_each(calls: list[Call]) -> None:
    assert len(calls) > 50 and not [one for one in calls if one.name == "gather_objects"]


def test_the_page_shows_what_the_simulation_gives() -> None:
    """The numbers of connecting; what is said depends on what pickle writes."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "at_scale.md").read_text()
    for sizes in LAYOUTS[:2]:
        start = start_of(sizes)
        row = next(line for line in page.splitlines() if line.startswith(f"| {sizes.world:,} | tp {sizes.tp}"))
        assert [cell.strip() for cell in row.split("|")[3:5]] == [str(start.median_sockets), str(start.most_sockets)]
