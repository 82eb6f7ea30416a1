"""The tables of models say what each layout computed, or why it did not."""

import pytest

from tests.any_module.model_families import FAMILIES
from tests.any_module.models_table import is_number, page_of, row_of


def test_a_page_has_a_row_for_each_type_and_the_reasons_of_its_cells() -> None:
    whole, refused = {"pp2": "1e-15", "tp2": "2e-15"}, {"pp2": "3e-15", "tp2": "refused: rank 1: no linear (/a/b.py:7)"}
    tables = {"causal": {"llama": whole}, "networks": {"a U-Net": refused, "a lamp": {"pp2": "one device: no light"}}}
    page = page_of(tables)
    assert "1 types, of which 1 train on one device;\nequal to it: pp2 1, pp2vp2-zb_v 0, tp2 1," in page
    assert "2 types, of which 1 train on one device;\nequal to it: pp2 1, pp2vp2-zb_v 0, tp2 0," in page
    assert "| a U-Net | 3e-15 | [1] | [2] | [1] | [1] |" in page and "| a lamp | [3] | [1] | [1] | [1] | [1] |" in page
    assert "3 of 3 numbers are at most 1e-12." in page
    assert "[1] not run\n[2] refused: no linear\n[3] one device: no light\n" in page


@pytest.mark.parametrize("name", ["a stack of LSTMs", "a trunk with two heads"])
def test_a_network_of_another_kind_has_a_row(name: str) -> None:
    _, family = FAMILIES["networks"]
    row = row_of(family, name, ("pp2", "tp2"))
    assert is_number(row["pp2"]) and is_number(row["tp2"]) == (name == "a trunk with two heads")
    assert is_number(row["tp2"]) or row["tp2"].startswith("refused: tensor_model_parallel_size (2) cuts nothing")


def test_there_are_ten_networks_of_other_kinds() -> None:
    title, family = FAMILIES["networks"]
    assert title == "Networks of other kinds" and len(family.types) == 10
    assert all(len(family.batches(name)) == 3 for name in family.types)
