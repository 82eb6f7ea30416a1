"""The benchmark of one GPU runs at its smallest shape, its rows agree, and its table holds what it says."""

import argparse
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from benchmarks import gpu
from benchmarks.device_runs import BYTES_OF_STATE
from benchmarks.gpu import (
    COMPILED,
    EAGER,
    MEGATRON,
    OF_OWN_LOSS,
    OURS,
    PACKED,
    SAVING,
    TOLERANCE,
    add_row,
    chosen_rows,
    fault_of,
    is_broken,
    report,
    rows,
    run_row,
    saves_line,
)
from benchmarks.plain_llama import build_plain, our_weights
from benchmarks.shapes import SHAPES, USABLE
from lightning_megatron.models import GPTModel
from lightning_megatron.transformer import cost
from tests.harness.ranks import run_on_ranks

GIB = 2**30
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
# Rows of libraries that run on GPUs alone.
OF_GPUS = (
    "Hugging Face, Liger",
    "ours, bf16, cuDNN attention",
    "ours, bf16, FlashAttention-3",
    "ours, bf16, Transformer Engine",
    "ours, Transformer Engine, fp8",
)
H100 = "NVIDIA H100 80GB HBM3"


def asked_for(device: str, size: str) -> argparse.Namespace:
    return argparse.Namespace(
        device=device, size=[size], sequence=[32], layers=2, microbatches=2, warmup=1, steps=3, rows=[]
    )


@cache
def found_on(device: str, row: str, size: str) -> dict[str, Any]:
    [found] = run_on_ranks(1, run_row, row, asked_for(device, size), init=False, timeout=200)
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", ["smoke", "smoke experts"])
@pytest.mark.parametrize("row", [row for row in rows() if "compiled" not in row and row != EAGER])
def test_a_row_trains_as_plain_torch_does(row: str, size: str, device: str) -> None:
    if row.startswith("Hugging Face"):
        pytest.importorskip("transformers")
    if row.startswith("megatron-core"):
        pytest.importorskip("megatron.core")
    found, yardstick = found_on(device, row, size), found_on(device, EAGER, size)
    if row in OF_GPUS and device == "cpu":
        assert fault_of(row, found, yardstick).startswith("left out: ")
        return
    assert fault_of(row, found, yardstick) == ""
    assert len(found["seconds"]) == 3
    assert min(found["seconds"]) > 0
    assert found["peak_bytes"] > 0


@pytest.mark.parametrize("row", OF_OWN_LOSS)
def test_packed_documents_and_dropout_change_what_is_trained(row: str) -> None:
    others, ours = (found_on("cpu", name, "smoke")["losses"] for name in (row, OURS))
    assert all(abs(loss - other) > 1e-4 for loss, other in zip(others, ours, strict=True)), (others, ours)
    assert others == pytest.approx(ours, rel=0.05)


def test_a_row_that_saves_says_how_long_training_waits() -> None:
    found = found_on("cpu", SAVING, "smoke")
    parameters = cost.model_parameters(SHAPES["smoke"].config(2, 32))
    assert found["saves"]["bytes"] > BYTES_OF_STATE * parameters
    assert all(seconds > 0 for seconds in found["saves"]["seconds"])
    part = made_part(**{SAVING: found | {"saves": {"seconds": [4.0, 0.5], "bytes": 20e9}}})
    assert "training waits 0.500 s for a save of 20 GB (40 GB/s), and 4.000 s for the first" in saves_line(part)
    assert saves_line(made_part(**{SAVING: {"not_here": ""}})) == ""


def test_a_row_that_has_no_room_to_save_is_left_out() -> None:
    usage = mock.Mock(free=1000)
    with mock.patch("shutil.disk_usage", return_value=usage):
        found = run_row(SAVING, asked_for("cpu", "smoke"))
    assert "are free on the disk" in found["not_here"] and fault_of(SAVING, found, None).startswith("left out")


@pytest.mark.skipif(HAS_MEGATRON, reason="megatron-core is here")
def test_megatron_core_that_is_not_installed_is_left_out_with_its_reason() -> None:
    found = run_row(MEGATRON, asked_for("cpu", "smoke"))
    assert found == {"not_here": "left out: megatron-core is not installed"}


def test_a_row_of_its_own_loss_is_neither_measured_by_others_nor_their_measure() -> None:
    assert fault_of(PACKED, made_row(0.1, (5.0, 4.0)), made_row(0.1)) == ""
    assert fault_of(PACKED, made_row(0.1, (5.0, float("nan"))), made_row(0.1)).startswith("wrong")
    part = made_part(**{PACKED: made_row(0.5), OURS: made_row(0.5)})
    packed, whole = ([float(cell) for cell in line.split("|")[6:7]] for line in report(part, H100))
    # Attention of eight documents has an eighth of the FLOPs.
    assert packed < whole
    asked = asked_for("cpu", "smoke")
    with mock.patch.object(gpu, "ask", return_value={"losses": [3.0, 2.0], "seconds": [0.5]}):
        assert add_row(OURS, made_part(**{PACKED: made_row(0.5)}), asked)
        assert not add_row(OURS, made_part(**{EAGER: made_row(0.5)}), asked)


@pytest.mark.slow
def test_the_command_writes_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--device", "cpu", "--size", "smoke", "--rows", OURS, "--warmup", "1", "--steps", "2"]
    # What it measures is in processes of their own, which run benchmarks/gpu.py as a script.
    monkeypatch.setattr("sys.argv", ["gpu.py", *command, "--json", str(tmp_path / "found.json")])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    assert f"torch {torch.__version__}" in printed.out
    [line] = [line for line in printed.out.splitlines() if line.startswith("| smoke")]
    assert line.startswith(f"| smoke | 2 | 32 | {OURS} | ")
    [part] = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert [row["fault"] for row in part["rows"].values()] == [""]
    assert part["matmul"]["bf16"]["flops_per_second"] > 0


def test_our_model_has_the_weights_of_the_plain_llama() -> None:
    config = SHAPES["smoke"].config(2, 32)
    plain = build_plain(config, torch.device("cpu")).double()
    ours = GPTModel(config).double()
    ours.load_state_dict(our_weights(plain, config))
    tokens = torch.randint(config.vocab_size, (2, 32))
    labels = tokens.roll(1, dims=1)
    # Its mean of losses is in float32.
    loss = plain(tokens, labels)
    torch.testing.assert_close(ours(tokens, labels=labels).float(), loss, rtol=1e-6, atol=0)
    query = plain.model.layers[0].self_attn.q_proj
    query.weight.data = 30 * query.weight.data.roll(8, dims=0)
    assert abs(plain(tokens, labels) - loss) > 1e-5


def test_our_experts_have_the_weights_of_the_plain_mixtral() -> None:
    # In float32, which is as wide as the plain one's grouped products go.
    config = SHAPES["smoke experts"].config(2, 32)
    plain, ours = build_plain(config, torch.device("cpu")), GPTModel(config)
    for layer in plain.model.layers:
        # So that experts do more than the rounding of a loss shows.
        layer.mlp.gate.weight.data *= 50
        layer.mlp.experts.down_proj.data *= 50
    ours.load_state_dict(our_weights(plain, config))
    tokens = torch.randint(config.vocab_size, (2, 32))
    labels = tokens.roll(1, dims=1)
    loss = plain(tokens, labels)
    torch.testing.assert_close(ours(tokens, labels=labels), loss, rtol=1e-5, atol=0)
    for weight in (plain.model.layers[1].mlp.gate.weight, plain.model.layers[1].mlp.experts.down_proj):
        kept = weight.data
        weight.data = kept.roll(1, dims=0)
        assert abs(plain(tokens, labels) - loss) > 1e-3
        weight.data = kept


def test_the_plain_experts_are_those_that_a_token_chooses() -> None:
    config = SHAPES["smoke experts"].config(1, 32)
    mixture = build_plain(config, torch.device("cpu")).model.layers[0].mlp
    x = torch.randn(1, 5, config.hidden_size)
    up, down = mixture.experts.gate_up_proj, mixture.experts.down_proj
    for token, mixed in zip(x[0], mixture(x)[0], strict=True):
        best, chosen = mixture.gate(token).topk(2)
        expected = torch.zeros_like(token)
        for weight, expert in zip(best.softmax(0), chosen, strict=True):
            gate, value = (up[expert] @ token).chunk(2)
            expected += weight * (down[expert] @ (F.silu(gate) * value))
        torch.testing.assert_close(mixed, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        assert mixed.abs().max() > 0


@pytest.mark.parametrize("size", ["1.3b", "8b"])
def test_the_products_are_all_flops_of_the_linears(size: str) -> None:
    shape = SHAPES[size]
    config = shape.config(shape.layers, 4096)
    *layer, head = (2 * m * n * k for m, n, k in shape.products(8192))
    layer, head = layer[:-2], 3 * head
    linears = cost.layer_linear_flops(config, num_tokens=8192)
    assert sum(layer) == 3 * linears
    assert head == 3 * cost.head_flops(config, num_tokens=8192)


def test_as_many_layers_as_fit() -> None:
    for size, sequence in (("1.3b", 4096), ("8b", 8192)):
        shape = SHAPES[size]
        for free_bytes in (40 * GIB, 79 * GIB, 139 * GIB):
            layers = shape.fitting_layers(sequence, free_bytes)
            assert shape.needed_bytes(layers, sequence) <= USABLE * free_bytes
            assert layers == shape.layers or shape.needed_bytes(layers + 1, sequence) > USABLE * free_bytes
    assert SHAPES["1.3b"].fitting_layers(8192, 79 * GIB) == 24
    assert 5 <= SHAPES["8b"].fitting_layers(8192, 79 * GIB) <= 12
    assert SHAPES["8b"].fitting_layers(8192, 16 * GIB) == 0
    assert [SHAPES["8x7b"].fitting_layers(4096, free * GIB) for free in (16, 79, 139)] == [0, 2, 4]


@pytest.mark.parametrize(("size", "billions"), [("1.3b", 1.35), ("8b", 8.03), ("8x7b", 46.7)])
def test_the_shapes_have_the_parameters_that_they_are_named_for(size: str, billions: float) -> None:
    shape = SHAPES[size]
    assert cost.model_parameters(shape.config(shape.layers, 4096)) / 1e9 == pytest.approx(billions, rel=0.01)


def made_row(seconds: float, losses: tuple[float, ...] = (4.0, 3.0)) -> dict[str, Any]:
    return {"seconds": [9.0, seconds, 0.0], "losses": list(losses), "peak_bytes": 2 * GIB, "fault": ""}


def made_part(**named_rows: dict[str, Any]) -> dict[str, Any]:
    matmul = {"bf16": {"flops_per_second": 700e12}, "fp8": {"flops_per_second": 1400e12}}
    return {"size": "1.3b", "sequence": 4096, "layers": 24, "step_rows": 8, "matmul": matmul, "rows": named_rows}


def test_the_table_shows_shares_of_peak_and_of_matmul_at_each_precision() -> None:
    seconds = 0.5
    part = made_part(**{OURS: made_row(seconds), "ours, fp8": made_row(seconds / 2)})
    half, fp8 = ([cell.strip() for cell in line.split("|")[5:-1]] for line in report(part, H100))
    config = SHAPES["1.3b"].config(24, 4096)
    causal, whole = (
        cost.training_flops(config, batch=8, sequence=4096, is_causal=is_causal) for is_causal in (True, False)
    )
    assert half == [
        "65,536",
        f"{causal / seconds / 1e12:.4g}",
        f"{causal / seconds / 989.4e12:.1%}",
        f"{whole / seconds / 989.4e12:.1%}",
        f"{causal / seconds / 700e12:.1%}",
        "2.00",
        "1.000",
        "3.0000",
    ]
    # Twice as fast, against a peak and a product twice as high.
    assert fp8[2:5] == [f"{causal / seconds / 989.4e12 * 989.4 * 2 / 1978.9:.1%}", fp8[3], half[4]]
    assert fp8[6] == "2.000"
    assert [cell.strip() for cell in report(part, "some card")[0].split("|")[7:9]] == ["?", "?"]


def test_a_row_without_memory_is_reported_and_not_broken() -> None:
    found = {"out_of_memory": "out of memory: tried to allocate"}
    found["fault"] = fault_of(OURS, found, made_row(1.0))
    [line] = report(made_part(**{OURS: found}), H100)
    assert "| ours, bf16 | out of memory: tried to allocate |" in line
    assert not is_broken(found["fault"])
    assert is_broken(fault_of(OURS, {"failed": "failed: no luck"}, made_row(1.0)))


@pytest.mark.parametrize("loss", [3.0 * (1 + 2 * TOLERANCE), float("nan"), 0.0])
def test_a_row_whose_loss_strays_is_refused(loss: float) -> None:
    fault = fault_of(OURS, made_row(1.0, (4.0, loss)), made_row(1.0))
    assert fault.startswith("wrong: the loss of step 2")
    assert is_broken(fault)
    assert fault_of(OURS, made_row(1.0, (4.0, 3.0 * (1 + TOLERANCE / 2))), made_row(1.0)) == ""


def test_plain_torch_is_compiled_unless_switched_off() -> None:
    def chosen(**options: Any) -> list[str]:
        return chosen_rows(argparse.Namespace(**({"rows": [], "no_compile": False} | options)))

    assert COMPILED in chosen() and EAGER not in chosen()
    assert EAGER in chosen(no_compile=True) and COMPILED not in chosen(no_compile=True)
    assert chosen(rows=[OURS, EAGER]) == [EAGER, OURS]
