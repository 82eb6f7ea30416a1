"""What the doctor says of packages."""

import re
import tomllib
from pathlib import Path

import pytest

from lightning_megatron.cli.doctor.software import (
    COMPROMISED,
    EXTRAS,
    PYTHON,
    REQUIRED,
    is_older,
    software_findings,
)
from tests.cli.doctor.cases import about, kinds

PROJECT = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
NEW = {**dict.fromkeys(REQUIRED, "9999.1"), **dict.fromkeys(EXTRAS, "9999.1")}


def bounds(requirements: list[str]) -> dict[str, str]:
    """The oldest version of each package, by its name without extras."""
    found = [re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", one) for one in requirements]
    return {match[1]: match[2] for match in found if match}


def test_the_bounds_are_those_of_the_project() -> None:
    assert bounds(PROJECT["dependencies"]) == REQUIRED
    assert PROJECT["requires-python"] == f">={PYTHON}"
    optional = PROJECT["optional-dependencies"]
    for name, extra in EXTRAS.items():
        if extra.name:
            assert bounds(optional[extra.name])[name] == extra.oldest, name
    assert all(is_older(version, REQUIRED["lightning"]) for version in COMPROMISED)


def test_new_packages_are_ok() -> None:
    findings = software_findings("3.13.1", NEW)
    assert kinds(findings) == {"ok"}
    assert about(findings, "torch").found == "9999.1"


@pytest.mark.parametrize(
    ("name", "version", "found"),
    [
        ("torch", "2.10.1+cu128", "2.10.1+cu128 is older than 2.11"),
        ("lightning", "2.6.2", "2.6.2 is a compromised release"),
        ("lightning", "2.6.3", "2.6.3 is a compromised release"),
        ("lightning", "2.5.6", "2.5.6 is older than 2.6.4"),
        ("numpy", "1.25.2", "1.25.2 is older than 1.26"),
        ("torchmetrics", None, "it is not installed"),
    ],
)
def test_what_is_needed_and_too_old_or_absent_is_wrong(name: str, version: str | None, found: str) -> None:
    versions = {one: version if one == name else other for one, other in NEW.items()}
    finding = about(software_findings("3.11.0", {k: v for k, v in versions.items() if v is not None}), name)
    assert (finding.kind, finding.found) == ("wrong", found)
    assert f"pip install '{name}>={REQUIRED[name]}'" in finding.mend


def test_an_old_python_is_wrong() -> None:
    assert about(software_findings("3.10.14", NEW), "python").kind == "wrong"


def test_an_extra_that_is_too_old_is_to_mind_and_an_absent_one_is_not() -> None:
    absent = {name: version for name, version in NEW.items() if name not in ("peft", "flash-attn")}
    findings = software_findings("3.11.0", {**absent, "transformers": "4.57.0"})
    old = about(findings, "transformers")
    assert (old.kind, old.found, old.mend) == ("mind", "4.57.0 is older than 5.17", "pip install 'transformers>=5.17'")
    assert about(findings, "peft").kind == about(findings, "flash-attn").kind == "ok"
    assert about(findings, "peft").found.endswith("pip install 'lightning-megatron[peft]'")


@pytest.mark.parametrize(
    ("version", "oldest", "is_it"),
    [
        ("2.11.0", "2.11", False),
        ("2.11", "2.11.0", False),
        ("2.9.1", "2.11", True),
        ("2.13.0+cpu", "2.11", False),
        ("2.12.0.dev20260101", "2.11", False),
        ("0.8", "", False),
    ],
)
def test_versions_compare_by_number(version: str, oldest: str, is_it: bool) -> None:
    assert is_older(version, oldest) is is_it
