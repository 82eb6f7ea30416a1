"""The FP8 configuration tells its faults, and the door to Transformer Engine translates it or says what to install."""

from typing import Any

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
each_release = pytest.mark.parametrize("version", [engine_stub.OLDEST, engine_stub.NEWEST])


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


@pytest.mark.parametrize("options", [{"scaling": "delayed"}, {"scaling": "mxfp8"}, {"engine": "transformer_engine"}])
def test_weights_are_gathered_in_float8_by_current_scales_of_torch_alone(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is for scaling='current' of engine='torch'.*use param_gather='full'"):
        Fp8Config(param_gather="float8", **options)
    Fp8Config(param_gather="float8")


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
        Fp8Config(engine="transformer_engine", scaling="mxfp8", format="e4m3"),
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
        (engine_stub.NVFP4BlockScaling(), "NVFP4BlockScaling with format E4M3 is not offered"),
        (engine_stub.DelayedScaling(fp8_format=engine_stub.Format.E5M2), "format E5M2 is not offered"),
        (engine_stub.DelayedScaling(amax_compute_algo=max), "must be of type 'max' or 'most_recent'"),
    ],
)
def test_a_recipe_that_is_not_offered_is_refused(recipe: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp8.config_of_recipe(recipe)


@each_release
def test_each_release_is_called_by_its_own_names(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    log, ranks = engine_stub.install(monkeypatch, version=version), object()
    with fp8.autocast(Fp8Config(engine="transformer_engine"), ranks):  # type: ignore[arg-type]
        assert log.is_open
        with fp8.left_out():
            assert not log.is_open
    assert log.autocasts == [(engine_stub.Float8CurrentScaling(), ranks)] and not log.is_open


@each_release
def test_layers_of_the_engine_get_our_axis(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    log = engine_stub.install(monkeypatch, version=version)
    fp8.grouped_linear(8, 16, 32, bias=False, device="meta", params_dtype=torch.bfloat16)
    fp8.attention(4, 8, num_groups=2, is_causal=True, window=3, tp=TP, sp=SP, qkv_format="bshd")
    (kind, sizes, grouped), (other, heads, attention) = log.built
    assert (kind, sizes, other, heads) == ("GroupedLinear", (8, 16, 32), "DotProductAttention", (4, 8))
    # It knows a rank's own features, and no axis.
    assert grouped == {"bias": False, "device": "meta", "params_dtype": torch.bfloat16}
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


def test_a_release_without_what_a_scaling_needs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_stub.install(monkeypatch, version="2.1")
    [fault] = fp8.engine_faults(ENGINE)
    assert "2.2 or later, which has Float8CurrentScaling, and 2.1.0 is installed" in fault
    engine_stub.install(monkeypatch, version="2.2")
    assert fp8.engine_faults(ENGINE) == []
    # Its experts multiply by delayed scaling alone.
    for scaling in ("current", "mxfp8"):
        [fault] = fp8.expert_engine_faults(Fp8Config(engine="transformer_engine", scaling=scaling))
        assert f"2.3 or later, which has a GroupedLinear for experts under scaling='{scaling}'" in fault
    assert fp8.expert_engine_faults(Fp8Config(engine="transformer_engine", scaling="delayed")) == []
    # Releases are numbers and not words: 2.18 is later than 2.3.
    engine_stub.install(monkeypatch, version="2.18")
    assert fp8.engine_faults(ENGINE) == fp8.expert_engine_faults(ENGINE) == []


CAPABILITIES: dict[tuple[int, int], set[str]] = {
    (8, 0): set(),
    (8, 9): {"current", "delayed"},
    (9, 0): {"current", "delayed"},
    (10, 0): {"current", "delayed", "mxfp8"},
    (12, 0): {"current", "delayed", "mxfp8"},
}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("scaling", ["current", "delayed", "mxfp8"])
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


def test_what_the_engine_lacks_on_a_gpu_is_refused_and_what_is_no_float8_runs_on_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda", 0)
    engine = Fp8Config(engine="transformer_engine", scaling="mxfp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert fp8.device_faults(engine, device) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    [fault] = fp8.device_faults(engine, device)
    assert "10.0 up to 12.0" in fault and "use engine='torch'" in fault
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert fp8.device_faults(Fp8Config(engine="transformer_engine", scaling="none"), device) == []


def test_a_configuration_without_float8_is_the_engines_alone() -> None:
    with pytest.raises(ValueError, match="is for engine='transformer_engine'"):
        Fp8Config(scaling="none")
    with pytest.raises(ValueError, match="scaling='none' has none"):
        Fp8Config(scaling="none", engine="transformer_engine", format="e4m3")
