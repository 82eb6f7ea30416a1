"""certify finds nothing in a right module, and names what is wrong with a wrong one, with the cause."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from lightning_megatron.testing import Certificate, CertifyError, certify
from tests.testing import modules


def certificate_of(module: Callable[[], Any], *layouts: str, **settings: Any) -> Certificate:
    return certify(module, settings.pop("data", modules.rows), layouts=layouts, **({"steps": 2} | settings))


def causes_of(certificate: Certificate, layout: str) -> list[tuple[str, str]]:
    """Quantity and cause of what differs first on a layout."""
    result = next(result for result in certificate.results if result.layout.name == layout)
    return [(one.deviation.quantity, one.cause) for one in result.differences]


def verdicts(certificate: Certificate) -> dict[str, str]:
    return {result.layout.name: result.verdict for result in certificate.results}


def test_a_right_module_is_equal_on_every_layout_that_it_has() -> None:
    found = certificate_of(modules.Right, "m2", "dp2", "dp2-zero", "pp2", "pp2-collective", "dp2pp2")
    found.assert_equal()
    assert found and set(verdicts(found).values()) == {"equal"}
    assert all(value < 1e-12 for result in found.results for value in result.largest.values())
    # Everything was looked at, and the weights moved.
    assert all(len(result.largest) == 9 for result in found.results)
    certificate_of(modules.TensorParallel, "tp2", "dp2tp2-zero", trainer={"gradient_clip_val": 0.1}).assert_equal()


@pytest.mark.parametrize("module", [modules.TwoOptimizers, modules.LogsMetric])
def test_several_optimizer_steps_a_batch_and_metrics_are_no_difference(module: Callable[[], Any]) -> None:
    certificate_of(module, "dp2").assert_equal()


def test_a_validation_is_compared_too() -> None:
    right = certificate_of(modules.Validates, "dp2", "pp2")
    right.assert_equal()
    assert all(result.largest["validation"] < 1e-12 for result in right.results)
    found = certificate_of(modules.ValidatesSome, "dp2", "m2")
    assert verdicts(found) == {"dp2": "differs", "m2": "equal"}
    [(first, cause)] = causes_of(found, "dp2")
    assert first == "validation" and "a mean over a mask" in cause
    assert "what validation_step logs as val_loss seems to be no mean over rows" in found.text


def test_a_certificate_of_which_no_layout_ran_is_none() -> None:
    found = certificate_of(modules.Right, "tp2")
    assert not found and set(verdicts(found).values()) == {"refused"}


def test_a_module_that_says_what_its_loss_is_a_mean_over_is_equal() -> None:
    certificate_of(modules.SaysItsWeight, "m2", "dp2pp2").assert_equal()


@pytest.mark.parametrize(
    ("module", "layout", "quantity", "cause"),
    [
        (
            modules.Summed,
            "m2",
            "loss",
            "a sum over rows, .* the mean over 2 microbatches: a factor of 1/2",
        ),
        (modules.Summed, "dp2", "loss", "the mean over 2 data-parallel ranks: a factor of 1/2"),
        (modules.ClassWeights, "dp2", "loss", "a mean of means"),
        (modules.Negatives, "m2", "loss", "rows of the batch are coupled"),
        (modules.Norms, "pp2", "loss", r"batch norm \(net.1\) takes its statistics from each of 2 microbatches"),
        (modules.LogsNorm, "pp2", "logged", "'norm' is read off gradients or weights, of which a rank has only a part"),
        (modules.LogsCount, "m2", "logged", "'rows' is a sum or a count"),
        (modules.Counts, "m2", "buffers", "calls: a buffer .* moves once for each of 2 microbatches"),
        (modules.DrawsNumbers, "dp2", "loss", "the step draws random numbers"),
    ],
)
def test_a_wrong_module_is_told_its_cause(module: Callable[[], Any], layout: str, quantity: str, cause: str) -> None:
    found = certificate_of(module, layout)
    assert not found
    [(first, said)] = causes_of(found, layout)
    assert first == quantity
    assert re.search(cause, said), said
    with pytest.raises(AssertionError, match="cause"):
        found.assert_equal()


def test_what_hooks_see_is_no_other_for_being_looked_at() -> None:
    # What records gradients must not be what puts them where a hook finds them.
    assert certificate_of(modules.LogsLate, "dp2-zero")
    [found] = certificate_of(modules.LogsHidden, "dp2-zero").results
    assert set(found.first) == {"logged", "callbacks"}


@pytest.mark.parametrize(
    ("module", "layout", "shown"),
    [
        (modules.Penalty, "pp2", "went over all parameters of Penalty"),
        (modules.ClipsByItself, "pp2", "changed the gradients of step"),
        (modules.Drifts, "dp2", "weights that several ranks hold differ after step"),
        (modules.Right, "tp2", "tensor_model_parallel_size (2) cuts nothing of Right"),
    ],
)
def test_what_the_strategy_finds_by_itself_is_told_in_its_words(
    module: Callable[[], Any], layout: str, shown: str
) -> None:
    [result] = certificate_of(module, layout).results
    if module is modules.ClipsByItself:
        # The step before it was refused has gone wrong already.
        assert result.verdict == "differs"
    else:
        assert result.verdict in ("failed", "refused")
    assert shown in " ".join((result.message, *result.warnings)) and "Recorder" not in result.message


@pytest.mark.parametrize(
    ("module", "layout"), [(modules.Adversarial, "dp2-zero"), (modules.Adversarial, "dp2"), (modules.Unfreezes, "dp2")]
)
def test_gradients_of_what_is_not_stepped_are_no_difference(module: Callable[[], Any], layout: str) -> None:
    certificate_of(module, layout).assert_equal()


def test_what_a_run_warns_of_in_a_step_is_among_the_notes() -> None:
    [result] = certificate_of(modules.Counts, "m2").results
    assert [text.partition(",")[0] for text in result.warnings] == ["training_step moves calls"]


def test_parts_that_ranks_draw_for_themselves_are_told_and_the_rest_is_compared_from_one_devices_weights() -> None:
    found = certificate_of(modules.DrawsPartsLate, "pp2")
    [result] = found.results
    assert [quantity for quantity, _ in causes_of(found, "pp2")] == ["initial weights"]
    assert result.largest["initial weights"] > 0.1
    assert max(value for name, value in result.largest.items() if name != "initial weights") < 1e-12


def test_what_a_layout_refuses_is_no_difference_and_what_fails_is_one() -> None:
    found = certificate_of(modules.CallsTwice, "pp2", "pp2-collective", "pp2cp2ep2sp")
    assert verdicts(found) == {"pp2": "refused", "pp2-collective": "equal", "pp2cp2ep2sp": "refused"}
    assert "calls a pipelined model more than once" in found.results[0].message
    assert found
    found = certificate_of(modules.SkipsABatch, "m2", "dp2")
    assert verdicts(found) == {"m2": "refused", "dp2": "refused"}
    assert all("training_step returned no loss for a" in result.message for result in found.results)
    found = certificate_of(modules.FailsOnARank, "dp2", "m2")
    assert verdicts(found) == {"dp2": "failed", "m2": "equal"}
    assert "ZeroDivisionError: on purpose" in found.results[0].message
    assert not found
    assert verdicts(certificate_of(modules.FailsInTorch, "dp2")) == {"dp2": "failed"}


def test_dropout_modules_are_turned_off_and_float32_is_told() -> None:
    found = certificate_of(modules.DropsInModule, "m2")
    found.assert_equal()
    assert "dropout was turned off in net.1" in found.text
    found = certificate_of(modules.NeedsFloat32, "dp2")
    found.assert_equal()
    assert found.facts.precision == "32-true"
    assert "run in float32, because float64 fails" in found.text
    assert 0 < max(found.results[0].largest.values()) < 1e-5


def test_the_small_twin_of_a_large_model_is_trained() -> None:
    found = certificate_of(modules.Language, "tp2", "dp2-zero", data=modules.texts, tiny=True)
    found.assert_equal()
    assert found.facts.num_parameters < 200_000
    assert "a small twin was trained: 4 layers of 32 features at most, 1031 tokens" in found.text
    with pytest.raises(CertifyError, match="--tiny shrinks a configuration among the attributes of Right"):
        certificate_of(modules.Right, "m2", tiny=True)


def test_a_data_module_keeps_its_hooks_and_its_attributes() -> None:
    found = certificate_of(modules.UsesDataModule, "dp2", data=modules.Data)
    found.assert_equal()
    assert found.record["equal"] and found.record["layouts"][0]["verdict"] == "equal"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: certificate_of(modules.Fails, "m2"), r"does not train on one device: RuntimeError: mat1.*modules\.py"),
        (lambda: certificate_of(modules.Right, "m2", data=modules.few_rows, steps=3), "ends after 2 global batches"),
        (lambda: certificate_of(modules.Right, "tp2x", "dp16", rows=6), "layout 'tp2x' must be made of(.|\n)*16 ranks"),
        (lambda: certificate_of(modules.Right, "dp2pp2", rows=6), r"rows \(6\) must be a multiple of .*; use 4 or 8"),
        (lambda: certificate_of(modules.Right, "m3", "m2", rows=0), r"rows \(0\) must .* \(\[2, 3\]\); use 6"),
        (lambda: certificate_of(modules.Right), "layouts are empty and must name at least one"),
        (lambda: certificate_of(modules.Right, "dp2", "dp2-"), "layouts 'dp2' and 'dp2-' are the same"),
        (lambda: certify(modules.Right, layouts="dp2,m2"), r"must be a list of names, or 'all'; use \['dp2', 'm2'\]"),
        (lambda: certificate_of(modules.Right(), "m2"), "make_module must be a class or a function .*, and is a Right"),
        (lambda: certificate_of(modules.NeedsArguments, "m2"), r"function .* returns NeedsArguments\(width=...\)"),
        (lambda: certificate_of(modules.Right, "m2", data=modules.rows()), "make_batches must .*, and is a DataLoader"),
        (lambda: certificate_of(modules.NoLoss, "m2"), "training_step of NoLoss returns no loss in any step"),
        (lambda: certificate_of(lambda: modules.Right(), "m2"), "no lambda"),
        (lambda: certify(modules.Right, layouts=["m2"]), "Right has no train_dataloader"),
        (lambda: certificate_of(modules.rows, "m2"), "a LightningModule is needed, and what was made is a DataLoader"),
    ],
)
def test_a_mistake_is_told_in_words(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(CertifyError, match=message):
        make()
