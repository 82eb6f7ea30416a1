"""The loss scale grows after a run of good steps and shrinks after bad ones, as its settings say."""

import torch

from lightning_megatron.optim.config import LossScaleConfig
from lightning_megatron.optim.loss_scale import LossScale


def factors(config: LossScaleConfig, steps: str) -> list[float]:
    """The factor after each step; `+` is a good one, `x` one with Inf."""
    scale = LossScale(config)
    found = []
    for step in steps:
        scale.update(found_nonfinite=step == "x")
        found.append(scale.factor)
    return found


def test_it_grows_after_a_window_of_good_steps_in_a_row() -> None:
    config = LossScaleConfig(initial=8.0, window=3, hysteresis=1)
    assert factors(config, "+++") == [8, 8, 16]
    assert factors(config, "++++++") == [8, 8, 16, 16, 16, 32]
    # A bad step begins the window anew.
    assert factors(config, "++x++") == [8, 8, 4, 4, 4]
    assert factors(config, "++x+++") == [8, 8, 4, 4, 4, 8]


def test_it_shrinks_once_the_bad_steps_are_used_up() -> None:
    config = LossScaleConfig(initial=64.0, window=3, hysteresis=2)
    assert factors(config, "xx") == [64, 32]
    # Good steps short of a window give none back, and neither does shrinking.
    assert factors(config, "x+x") == [64, 64, 32]
    assert factors(config, "xxx") == [64, 32, 16]
    # Growing gives all of them back.
    assert factors(config, "xx+++x") == [64, 32, 32, 32, 64, 64]


def test_it_never_falls_below_its_minimum() -> None:
    config = LossScaleConfig(initial=4.0, minimum=1.5, hysteresis=1)
    assert factors(config, "xxx") == [2, 1.5, 1.5]


def test_other_factors_are_taken() -> None:
    config = LossScaleConfig(initial=100.0, growth_factor=1.5, backoff_factor=0.1, window=1, hysteresis=1)
    assert factors(config, "+x") == [150, 15]


def test_one_that_was_saved_goes_on_as_if_it_had_not_been() -> None:
    config = LossScaleConfig(initial=64.0, window=4, hysteresis=2)
    steps = "+x++x+++++++xx+"
    wanted = factors(config, steps)
    for cut in range(len(steps)):
        first, second = LossScale(config), LossScale(config)
        for step in steps[:cut]:
            first.update(found_nonfinite=step == "x")
        second.load_state_dict(first.state_dict())
        assert second.factor == first.factor
        for index, step in enumerate(steps[cut:], cut):
            second.update(found_nonfinite=step == "x")
            assert second.factor == wanted[index]


def test_sums_are_scaled_by_what_the_first_mean_divided_by_also_after_a_resume() -> None:
    first, second = LossScale(LossScaleConfig(initial=64.0)), LossScale(LossScaleConfig(initial=64.0))
    assert first.of_sums == 64
    first.learn_weight(torch.tensor(5.0))
    first.learn_weight(torch.tensor(8.0))
    assert first.of_sums == 64 / 5
    second.load_state_dict(first.state_dict())
    second.learn_weight(torch.tensor(8.0))
    assert second.of_sums == 64 / 5
    # A first step without anything valid, or of which the weights are small, is no reason to scale up.
    second.load_state_dict(LossScale(LossScaleConfig(initial=64.0)).state_dict())
    second.learn_weight(torch.tensor(0.0))
    assert second.of_sums == 64


def test_an_expected_weight_serves_until_the_first_step_tells_it() -> None:
    scale = LossScale(LossScaleConfig(initial=64.0))
    scale.expect_weight(16.0)
    assert scale.of_sums == 4 and scale.state_dict()["usual_weight"] is None
    scale.learn_weight(torch.tensor(5.0))
    scale.learn_weight(torch.tensor(8.0))
    assert scale.of_sums == 64 / 5


def test_a_shorter_window_at_a_resume_still_ends() -> None:
    long, short = LossScaleConfig(initial=8.0, window=100), LossScaleConfig(initial=8.0, window=3)
    first, second = LossScale(long), LossScale(short)
    for _ in range(10):
        first.update(found_nonfinite=False)
    second.load_state_dict(first.state_dict())
    second.update(found_nonfinite=False)
    assert second.factor == 16
