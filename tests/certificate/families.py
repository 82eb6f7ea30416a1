"""Families of transformers in this package's own layers: each on layouts, beside itself on one device.

That one device has the logits and gradients of transformers is shown elsewhere (`tests/hf`).
"""

import functools
from collections.abc import Callable, Sequence

from lightning_megatron.testing import certify
from lightning_megatron.testing.certificate import LayoutResult
from tests.hf.test_gradients import Trains, batches
from tests.models.test_next_tokens import TrainsFurther

NUM_LAYERS = 4
FAMILIES: dict[str, Callable[[], Trains]] = {
    "deepseek_v3": functools.partial(Trains, "deepseek_v3", NUM_LAYERS),
    "deepseek_v3, MTP": TrainsFurther,
    **{
        name: functools.partial(Trains, name, NUM_LAYERS)
        for name in ("gemma2", "gemma3", "glm4", "gpt_oss", "olmo2", "phi3", "qwen2_moe")
    },
}
# Of experts that ranks share out.
WITH_EXPERTS = ("deepseek_v3", "deepseek_v3, MTP", "gpt_oss", "qwen2_moe")
FAMILY_LAYOUTS = (
    *("tp2-sp", "cp2", "pp2m4", "pp2vp2m4", "pp2m4-zb_h1", "pp2vp2m4-zb_v", "pp2-collective", "dp2-zero"),
    *("tp2pp2m2", "tp2cp2-sp", "dp2tp2-sp-zero2", "dp2pp2m2-zero3", "ep2"),
)
NUM_STEPS = 2
# In float64, relative to the largest value.
TOLERANCE = 1e-10


def layouts_of(family: str) -> list[str]:
    """The layouts of a family: those of experts are for models that have some."""
    return [layout for layout in FAMILY_LAYOUTS if family in WITH_EXPERTS or "ep" not in layout]


def results_of(family: str, layouts: Sequence[str]) -> Sequence[LayoutResult]:
    """What came of a family on layouts."""
    return certify(FAMILIES[family], batches, layouts=layouts, steps=NUM_STEPS).results


def fault_of(result: LayoutResult) -> str:
    """What is wrong with a result; empty where nothing is."""
    if result.verdict != "equal":
        return f"{result.layout.name}: {result.verdict}: {result.message or result.largest}"
    wrong = {quantity: value for quantity, value in result.largest.items() if not value < TOLERANCE}
    return f"{result.layout.name}: {wrong}" if wrong or not result.largest else ""
