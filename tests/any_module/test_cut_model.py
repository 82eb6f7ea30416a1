"""Networks that know nothing of ranks compute one device's numbers on every layout, or are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_megatron.testing import certify
from tests.any_module import networks


def test_a_gpt_is_cut_at_its_blocks() -> None:
    certify(networks.Trains, networks.batches, layouts=("pp2", "pp2vp2", "dp2pp2-zero"), steps=3).assert_equal()


@pytest.mark.parametrize("module", [networks.TrainsTranslator, networks.TrainsDiffusion])
def test_what_all_layers_read_is_there_on_every_stage(module: Callable[[], Any]) -> None:
    certify(module, networks.batches, layouts=("pp2vp2",), steps=2).assert_equal()


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        (networks.TrainsSkipping, "blocks.3 reads argument 0, which layers of an earlier stage computed"),
        (networks.TrainsLooped, "calls blocks.0 a second time"),
        (networks.TrainsNoted, "blocks.1 returned a set, which cannot be sent to the next stage"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(module: Callable[[], Any], shown: str) -> None:
    [result] = certify(module, networks.batches, layouts=("pp2",), steps=2).results
    assert result.verdict == "refused" and shown in result.message
