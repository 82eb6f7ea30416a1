"""Reports of the experts' load, in numbers and as a picture."""

from pathlib import Path

import pytest
import torch

from lightning_megatron.metrics.expert_load import (
    LoadHistory,
    numbers_of,
    picture_of,
    write_picture,
)
from lightning_megatron.moe.load import RoutingReport


def report(counts: list[int], kept: list[int] | None = None, loss: float = 1.0) -> RoutingReport:
    chosen_E = torch.tensor(counts)
    losses = {"sequence": torch.tensor(loss, dtype=torch.float64), "z": torch.tensor(0.5, dtype=torch.float64)}
    return RoutingReport(losses=losses, counts_E=chosen_E, accepted_E=chosen_E if kept is None else torch.tensor(kept))


def test_loads_are_shares_of_the_mean_and_the_extremes_those_of_all_layers() -> None:
    reports = {"layers.1": report([6, 2], loss=1.5), "layers.3": report([5, 11], kept=[5, 7], loss=1.25)}
    over_layers = numbers_of(reports, per_layer=False, per_expert=False)
    assert over_layers == {
        "balance_loss_sequence": 1.375,
        "z_loss": 0.5,
        "max_load": 1.5,
        "min_load": 0.5,
        # Of the layers the mean: 0 and 4 of 16.
        "dropped_share": 0.125,
    }
    by_layer = numbers_of(reports, per_layer=True, per_expert=True)
    assert by_layer.items() > over_layers.items()
    assert by_layer["layers.3/max_load"] == 1.375 and by_layer["layers.3/dropped_share"] == 0.25
    assert by_layer["layers.1/load_0"] == 1.5 and by_layer["layers.1/load_1"] == 0.5
    assert len(by_layer) == 5 + 2 * 5 + 2 * 2


def test_a_step_of_no_tokens_logs_nothing() -> None:
    assert numbers_of({"layers.0": report([0, 0])}, per_layer=True, per_expert=True) == {}
    assert numbers_of({}, per_layer=True, per_expert=True) == {}


def test_a_full_history_joins_neighbours_and_loses_no_token() -> None:
    history = LoadHistory(num_columns=4)
    for step in range(1, 12):
        history.add(step, {"layers.0": report([step, 1])})
        assert sum(int(counts[0, 0]) for counts in history.counts) == step * (step + 1) // 2
        assert len(history.counts) == len(history.last_steps) <= 4
    # Of four steps each, and what has come since.
    assert history.last_steps == [4, 8, 11] and [int(c[0, 1]) for c in history.counts] == [4, 4, 3]


def test_the_picture_has_a_row_for_each_expert_and_distinguishes_busy_from_idle(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = LoadHistory()
    for step in range(3):
        history.add(10 * step, {"layers.1": report([8, 0, 0, 0]), "layers.3": report([1, 1, 1, 1])})
    [axes, _] = picture_of(history).axes
    [image] = axes.images
    assert image.get_array().shape == (8, 3)
    assert image.get_array()[:, 0].tolist() == [2, -2, -2, -2, 0, 0, 0, 0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["layers.1", "layers.3"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "10", "20"]
    write_picture(history, tmp_path / "new" / "experts.png")
    assert (tmp_path / "new" / "experts.png").read_bytes().startswith(b"\x89PNG")
