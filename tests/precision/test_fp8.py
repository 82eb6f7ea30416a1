"""The FP8 configuration tells its faults, and the door to Transformer Engine translates it or says what to install."""

from typing import Any, get_args

import pytest
import torch

from lightning_megatron import Fp8Config
from lightning_megatron.mesh import Axis
from lightning_megatron.precision import fp8
from tests.precision import engine_stub

TP = Axis("tp", 2, 1, (4, 5))
SP = Axis("sp", 2, 1, (4, 5))
ALONE = Axis.alone(5)
ENGINE = Fp8Config(engine="transformer_engine")


def test_all_faults_of_a_configuration_are_reported_at_once() -> None:
    with pytest.raises(ValueError) as error:
        Fp8Config(format="e3m4", margin=-1, amax_history_length=0, num_last_layers_bf16=-2)  # type: ignore[arg-type]
    text = str(error.value)
    assert "fp8 format ('e3m4') must be one of 'e4m3', 'hybrid'" in text
    assert "fp8 margin (-1) must be at least 0" in text and "fp8 num_last_layers_bf16 (-2)" in text
    assert "fp8 amax_history_length (0) must be at least 1" in text


@pytest.mark.parametrize("options", [{"amax_history_length": 16}, {"amax_from": "most_recent"}])
@pytest.mark.parametrize("scaling", ["current", "mxfp8"])
def test_what_only_delayed_scaling_reads_is_refused_elsewhere(scaling: fp8.RecipeName, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="belongs to scaling='delayed'"):
        Fp8Config(scaling=scaling, **options)
    Fp8Config(scaling="delayed", **options)


def test_an_engine_that_is_absent_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_stub.break_import(monkeypatch)
    [fault] = fp8.engine_faults(ENGINE)
    assert "pip install 'lightning-megatron[fp8]'" in fault and "engine='torch'" in fault
    assert "cudnn shared object not found" in fault
    with pytest.raises(ImportError, match=r"lightning-megatron\[fp8\]"):
        fp8.linear(16, 16, mode="row", tp=TP, sp=SP)
    assert fp8.engine_faults(Fp8Config()) == []


def test_an_engine_that_is_there_has_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_stub.install(monkeypatch)
    assert fp8.engine_faults(ENGINE) == []


@pytest.mark.parametrize(
    "config",
    [
        ENGINE,
        Fp8Config(engine="transformer_engine", format="e4m3"),
        Fp8Config(
            engine="transformer_engine",
            scaling="delayed",
            margin=2,
            amax_history_length=16,
            amax_from="most_recent",
        ),
    ],
)
def test_a_recipe_says_what_the_configuration_says_and_back(config: Fp8Config, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_stub.install(monkeypatch)
    assert fp8.config_of_recipe(fp8.recipe(config)) == config


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (engine_stub.MXFP8BlockScaling(), "MXFP8BlockScaling with format E4M3 is not offered"),
        (engine_stub.DelayedScaling(fp8_format=engine_stub.Format.E5M2), "format E5M2 is not offered"),
        (engine_stub.DelayedScaling(amax_compute_algo=max), "must be of type 'max' or 'most_recent'"),
    ],
)
def test_a_recipe_that_is_not_offered_is_refused(recipe: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp8.config_of_recipe(recipe)


@pytest.mark.parametrize("is_old", [False, True])
def test_each_release_is_called_by_its_own_names(monkeypatch: pytest.MonkeyPatch, is_old: bool) -> None:
    log, ranks = engine_stub.install(monkeypatch, is_old=is_old), object()
    with fp8.autocast(Fp8Config(engine="transformer_engine"), ranks):  # type: ignore[arg-type]
        assert log.is_open
        with fp8.left_out():
            assert not log.is_open
    assert log.autocasts == [(engine_stub.Float8CurrentScaling(), ranks)] and not log.is_open


def test_layers_of_the_engine_get_our_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    log = engine_stub.install(monkeypatch)
    fp8.grouped_linear(8, 16, 32, mode="column", tp=TP, bias=False, device="meta", params_dtype=torch.bfloat16)
    fp8.attention(4, 8, num_groups=2, is_causal=True, window=3, tp=TP, sp=SP, qkv_format="bshd")
    (kind, sizes, grouped), (other, heads, attention) = log.built
    assert (kind, sizes, other, heads) == ("GroupedLinear", (8, 16, 32), "DotProductAttention", (4, 8))
    assert grouped == {
        "parallel_mode": "column",
        "tp_group": None,
        "tp_size": 2,
        "sequence_parallel": False,
        "bias": False,
        "device": "meta",
        "params_dtype": torch.bfloat16,
    }
    assert attention == {
        "num_gqa_groups": 2,
        "attn_mask_type": "causal",
        "window_size": (2, 0),
        "tp_group": None,
        "tp_size": 2,
        "sequence_parallel": True,
        "qkv_format": "bshd",
    }


def test_a_cpu_has_no_fault() -> None:
    assert fp8.device_faults(Fp8Config(scaling="mxfp8"), torch.device("cpu")) == []


CAPABILITIES: dict[tuple[int, int], set[str]] = {
    (8, 0): set(),
    (8, 9): {"current", "delayed"},
    (9, 0): {"current", "delayed"},
    (10, 0): {"current", "delayed", "mxfp8"},
    (12, 0): {"current", "delayed", "mxfp8"},
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("scaling", get_args(fp8.RecipeName))
def test_a_gpu_multiplies_what_it_has_units_for_and_refuses_the_rest(
    scaling: fp8.RecipeName, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    faults = fp8.device_faults(Fp8Config(scaling=scaling), torch.device("cuda", 0))
    assert (faults == []) is (scaling in CAPABILITIES[capability])
    if capability == (8, 0):
        assert "8.9 or more" in faults[0] and "has 8.0" in faults[0] and "bf16-mixed" in faults[0]
    elif faults:
        assert "10.0 or more" in faults[0] and "use scaling='current' or 'delayed'" in faults[0]
