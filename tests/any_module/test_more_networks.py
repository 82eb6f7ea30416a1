"""Networks of many kinds train on stages, and where they say how over tensor-parallel ranks, as on one device."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_megatron.testing import certify
from tests.any_module import more_networks as networks


@pytest.mark.parametrize(
    ("module", "make_batches", "layouts"),
    [
        (networks.FitsResNet, networks.images, ("pp2",)),
        (networks.FitsRecommender, networks.ids, ("tp2", "pp2tp2")),
        (networks.FitsRecurrent, networks.ids, ("pp2vp2",)),
        (networks.FitsMixture, networks.ids, ("dp2pp2-zero",)),
        (networks.FitsStackedMixture, networks.ids, ("ep2", "tp2", "ep2pp2")),
        (networks.FitsForked, networks.ids, ("pp2",)),
        (networks.FitsSkips, networks.images, ("pp2", "pp2vp2-zb_v")),
        (networks.FitsChangingSkips, networks.images, ("pp2",)),
    ],
)
def test_a_network_trains_as_on_one_device(
    module: Callable[[], Any], make_batches: Any, layouts: tuple[str, ...]
) -> None:
    found = certify(module, make_batches, layouts=layouts, steps=2)
    found.assert_equal()
    assert {result.verdict for result in found.results} == {"equal"}


@pytest.mark.parametrize(
    ("module", "make_batches", "shown"),
    [
        (networks.FitsUNet, networks.images, "it cannot be cut in front of blocks.2"),
        (networks.FitsOutside, networks.ids, "groups.1.0 reads argument 0, which layers of an earlier stage computed"),
    ],
)
def test_what_is_read_past_layers_is_refused_by_name(module: Callable[[], Any], make_batches: Any, shown: str) -> None:
    [result] = certify(module, make_batches, layouts=("pp2",), steps=1).results
    assert result.verdict == "refused" and shown in result.message
