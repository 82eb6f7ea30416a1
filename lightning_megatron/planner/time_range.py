"""How sure a predicted step time is: what published runs like it took, and the constants that it hangs on.

`benchmarks/fit_planner.py` writes the ratios of stated over predicted step times into `constants.json`, of rows on
which no constant was fitted. Those of a GPU's family, a precision and a kind of model serve where there are enough.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from lightning_megatron.planner.constants import GIVEN, Constants, fitted_file

ALL_FAMILIES = "all GPUs"
"""Name of the ratios of every family and precision together."""
# Fewer published runs do not say where four of five such runs lie.
_LEAST_ROWS = 10
# A constant is raised by this share of itself.
_RAISED = 0.1
_NUM_EFFECTS = 3


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """Stated over predicted step times of published runs."""

    family: str
    """Architecture of their GPUs, or `ALL_FAMILIES`."""
    precision: str
    """Precision of their products: "16 bits" or "FP8", or "any"."""
    has_experts: bool
    num_rows: int
    low: float
    """10th percentile."""
    high: float
    """90th percentile."""

    @property
    def of(self) -> str:
        """The runs, in words."""
        gpus = self.family if self.family == ALL_FAMILIES else f"{self.family.capitalize()} in {self.precision}"
        return f"{self.num_rows} published runs of models {'with' if self.has_experts else 'without'} experts on {gpus}"


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a step's time becomes where a constant is a tenth higher."""

    constant: str
    """Field of `Constants`."""
    ratio: float
    """Step time with it over the predicted one."""


def ratios_like(family: str, precision: str, *, has_experts: bool) -> Ratios:
    """Ratios of published runs of such models on such GPUs, and of those on all GPUs where there are too few."""
    kind = [one for one in _published() if one.has_experts == has_experts]
    own = [one for one in kind if (one.family, one.precision) == (family, precision) and one.num_rows >= _LEAST_ROWS]
    return own[0] if own else next(one for one in kind if one.family == ALL_FAMILIES)


def largest_effects(seconds_of: Callable[[Constants], float], constants: Constants) -> list[Effect]:
    """The constants that change a step time the most where they are a tenth higher, the largest first."""
    seconds = seconds_of(constants)
    names = [field.name for field in fields(Constants) if field.name not in GIVEN]
    raised = {name: replace(constants, **{name: getattr(constants, name) * (1 + _RAISED)}) for name in names}
    effects = [Effect(constant=name, ratio=seconds_of(other) / seconds) for name, other in raised.items()]
    return sorted(effects, key=lambda effect: -abs(effect.ratio - 1))[:_NUM_EFFECTS]


@lru_cache(maxsize=1)
def _published() -> list[Ratios]:
    return [Ratios(**one) for one in fitted_file()["published_over_predicted"]]
