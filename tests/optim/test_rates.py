"""Learning-rate curves and weight-decay ramps, beside those of Megatron Core."""

import importlib.util
import itertools
import math
import warnings
from typing import Any, get_args

import pytest
import torch

from lightning_megatron.optim.param_scheduler import ParamScheduler
from lightning_megatron.optim.rates import DecayStyle, IncrStyle, RateCurve, WeightDecayRamp, WsdDecayStyle

# Rates of Megatron Core 0.15.0 (`OptimizerParamScheduler`) before these steps, from 0.2 over
# 4 steps up to 1, then down to 0.1 in step 20, of a WSD in its last 6 steps.
STEPS = (0, 1, 4, 5, 14, 15, 17, 20, 21)
MEGATRON: dict[tuple[Any, Any], tuple[float, ...]] = {
    ("constant", ""): (0.2, 0.4, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    ("linear", ""): (0.2, 0.4, 1.0, 0.94375, 0.4375, 0.38125, 0.26875, 0.1, 0.1),
    ("cosine", ""): (0.2, 0.4, 1.0, 0.991353, 0.377792, 0.299993, 0.175839, 0.1, 0.1),
    ("inverse-square-root", ""): (0.2, 0.4, 1.0, 0.894427, 0.534522, 0.516398, 0.485071, 0.447214, 0.1),
    ("WSD", "linear"): (0.2, 0.4, 1.0, 1.0, 1.0, 0.85, 0.55, 0.1, 0.1),
    ("WSD", "cosine"): (0.2, 0.4, 1.0, 1.0, 1.0, 0.939711, 0.55, 0.1, 0.1),
    ("WSD", "exponential"): (0.2, 0.4, 1.0, 1.0, 1.0, 0.803618, 0.472792, 0.1, 0.1),
    ("WSD", "minus_sqrt"): (0.2, 0.4, 1.0, 1.0, 1.0, 0.632577, 0.363604, 0.1, 0.1),
}


def of_wsd(style: Any, steps: int) -> dict[str, Any]:
    return {"wsd_decay_style": style, "wsd_decay_steps": steps} if style else {}


def optimizer_of(*weight_decays: float, lr: float = 1.0) -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "weight_decay": decay} for decay in weight_decays]
    return torch.optim.SGD(groups, lr=lr)


def test_every_style_has_its_values() -> None:
    assert {style for style, _ in MEGATRON} == set(get_args(DecayStyle))
    assert {style for _, style in MEGATRON} - {""} == set(get_args(WsdDecayStyle))


@pytest.mark.parametrize("styles", MEGATRON)
def test_a_scheduler_gives_the_rates_of_megatron(styles: tuple[Any, Any]) -> None:
    curve = RateCurve(total_steps=20, warmup_steps=4, initial=0.2, decay_style=styles[0], **of_wsd(styles[1], 6))
    optimizer = optimizer_of(0.0, lr=3e-4)
    scheduler = ParamScheduler(optimizer, curve)
    rates = []
    for _ in range(STEPS[-1] + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [rates[step] for step in STEPS] == pytest.approx([3e-4 * one for one in MEGATRON[styles]], rel=2e-6)


def test_a_curve_without_warm_up_begins_at_the_peak() -> None:
    for style in ("constant", "linear", "cosine", "inverse-square-root"):
        assert RateCurve(total_steps=9, decay_style=style)(0) == 1.0


def test_weight_decay_rises_where_there_is_any() -> None:
    optimizer = optimizer_of(0.1, 0.0)
    ramp = WeightDecayRamp(start=0.02, end=0.1, total_steps=4)
    scheduler = ParamScheduler(optimizer, RateCurve(total_steps=4), ramp)
    found = []
    for _ in range(7):
        found.append([group["weight_decay"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert [one for one, _ in found] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.1])
    assert {other for _, other in found} == {0.0}
    cosine = WeightDecayRamp(start=0.0, end=0.1, total_steps=4, style="cosine")
    assert [cosine(step) for step in range(5)] == pytest.approx(
        [0.1 * (1 - math.cos(math.pi * k / 4)) / 2 for k in range(5)]
    )


def test_a_run_that_resumes_goes_on_with_the_curves_that_it_is_given() -> None:
    def made(total_steps: int) -> tuple[torch.optim.Optimizer, ParamScheduler]:
        optimizer = optimizer_of(0.1)
        curve = RateCurve(total_steps=total_steps, minimum=0.0, decay_style="linear")
        return optimizer, ParamScheduler(optimizer, curve, WeightDecayRamp(start=0.0, end=0.1, total_steps=10))

    optimizer, scheduler = made(10)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    state = scheduler.state_dict()
    assert all(isinstance(one, int | float | list) for one in state.values())
    other_optimizer, other = made(20)
    other.load_state_dict(state)
    other_optimizer.step()
    other.step()
    assert other_optimizer.param_groups[0]["lr"] == pytest.approx(1 - 6 / 20)
    assert other_optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"warmup_steps": -1}, "warmup_steps (-1) must be at least 0"),
        ({"total_steps": 3, "warmup_steps": 3}, "warm up for at most 2 steps"),
        ({"initial": 1.5, "minimum": -0.1}, "initial (1.5) must be from 0 to 1"),
        ({"initial": 1.5, "minimum": -0.1}, "minimum (-0.1) must be from 0 to 1"),
        ({"decay_style": "WSD"}, "wsd_decay_steps (0) must be from 1 to the 20 steps after the warm-up"),
        ({"wsd_decay_steps": 3}, "wsd_decay_steps (3) is of decay_style WSD"),
        ({"decay_style": "exponential"}, "must be one of constant, linear, cosine, inverse-square-root, WSD"),
        ({"decay_style": "WSD", "wsd_decay_steps": 2, "wsd_decay_style": "log"}, "wsd_decay_style ('log') must be one"),
    ],
)
def test_a_curve_that_does_not_fit_is_an_error(fields: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r"must be|is of") as error:
        RateCurve(**{"total_steps": 20, **fields})
    assert words in str(error.value)


def test_a_ramp_that_does_not_fit_is_one_error() -> None:
    with pytest.raises(ValueError, match="start") as error:
        WeightDecayRamp(start=0.2, end=0.1, total_steps=0, style="constant")
    assert all(words in str(error.value) for words in ("start (0.2)", "cannot start at 0.2", "total_steps (0)"))


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)
@pytest.mark.parametrize("incr_style", get_args(IncrStyle))
def test_every_step_is_that_of_the_installed_megatron_core(incr_style: Any) -> None:
    # It warns of each of its own extras that is not installed.
    with warnings.catch_warnings(action="ignore"):
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    spans = [(0, 20, 5), (4, 20, 5), (1, 7, 6), (10, 40, 30)]
    for (style, wsd), (warmup, total, last), initial in itertools.product(MEGATRON, spans, (0.0, 0.25)):
        start = 0.1 if incr_style == "constant" else 0.02
        theirs, ours = optimizer_of(0.1, 0.0, lr=3e-4), optimizer_of(0.1, 0.0, lr=3e-4)
        for group, times in zip(theirs.param_groups, (1.0, 0.0), strict=True):
            group["wd_mult"] = times
        other = OptimizerParamScheduler(
            theirs,
            init_lr=initial * 3e-4,
            max_lr=3e-4,
            min_lr=3e-5,
            lr_warmup_steps=warmup,
            lr_decay_steps=total,
            lr_decay_style=style,
            start_wd=start,
            end_wd=0.1,
            wd_incr_steps=total,
            wd_incr_style=incr_style,
            use_checkpoint_opt_param_scheduler=False,
            wsd_decay_steps=last,
            lr_wsd_decay_style=wsd or "linear",
        )
        own = ParamScheduler(
            ours,
            RateCurve(total_steps=total, warmup_steps=warmup, initial=initial, decay_style=style, **of_wsd(wsd, last)),
            WeightDecayRamp(start=start, end=0.1, total_steps=total, style=incr_style),
        )
        for _ in range(total + 5):
            for group, expected in zip(ours.param_groups, theirs.param_groups, strict=True):
                assert group["lr"] == pytest.approx(expected["lr"], rel=1e-12)
                assert group["weight_decay"] == pytest.approx(expected["weight_decay"], rel=1e-12)
            for optimizer in (ours, theirs):
                optimizer.step()
            other.step(1)
            own.step()
