"""The planted faults stay plantable: each has its place in the code, and its tests."""

import ast

import pytest

from tests.mutants.__main__ import ROOT, planted
from tests.mutants.faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file} {FAULTS.index(fault)}")
def test_a_fault_has_one_place_and_leaves_code_that_parses(fault: Fault) -> None:
    text = (ROOT / "lightning_megatron" / fault.file).read_text()
    mutant = planted(fault, text)
    assert ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(text))
    assert all((ROOT / "tests" / path).exists() for path in fault.tests)


def test_there_are_faults_in_every_engine_room() -> None:
    assert len(FAULTS) >= 40
    rooms = {fault.file.split("/")[0] for fault in FAULTS}
    assert rooms >= {"tensor", "comm", "context", "pipeline", "optim", "moe", "data", "transformer", "checkpoint", "hf"}
