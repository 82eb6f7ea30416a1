"""What is said of installed packages: those that are needed, those of extras, and the bounds of both.

The bounds are those of `pyproject.toml`, which an installed package does not bring along.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_megatron.cli.doctor.finding import Finding, mind, ok, wrong
from lightning_megatron.version import VERSION

PYTHON = "3.11"
"""The oldest Python."""
REQUIRED = {"torch": "2.11", "lightning": "2.6.4", "torchmetrics": "1.4", "numpy": "1.26", "fsspec": "2023.5"}
"""The oldest version of each package that is needed."""
COMPROMISED = ("2.6.2", "2.6.3")
"""Releases of Lightning that somebody else has put code into."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """A package that a feature needs."""

    oldest: str
    """The oldest version; empty where any will do."""
    name: str
    """The extra of this package that installs it; empty where none does."""
    purpose: str


EXTRAS = {
    "transformers": Extra(oldest="5.17", name="hf", purpose="networks of Hugging Face need it"),
    "safetensors": Extra(oldest="0.5", name="hf", purpose="weights of Hugging Face need it"),
    "peft": Extra(oldest="0.19", name="peft", purpose="adapters of Hugging Face need it"),
    "datasets": Extra(oldest="3.0", name="data", purpose="data sets and files of text need it"),
    "tokenizers": Extra(oldest="0.20", name="data", purpose="turning text into tokens needs it"),
    "jsonargparse": Extra(oldest="4.49", name="data", purpose="recipes and their options need it"),
    "matplotlib": Extra(oldest="3.8", name="plot", purpose="pictures need it"),
    "transformer-engine": Extra(oldest="2.2", name="fp8", purpose='precision="transformer-engine" needs it'),
    "flash-attn": Extra(oldest="", name="", purpose="nothing here needs it, for torch has such kernels"),
}
"""The packages of extras, and one that others ask for."""


def software_findings(python: str, versions: Mapping[str, str]) -> list[Finding]:
    """What is to be said of Python and of packages, by their versions; what is absent from these is not installed."""
    findings = [ok("lightning-megatron", VERSION), _python(python)]
    findings += [_required(name, oldest, versions.get(name)) for name, oldest in REQUIRED.items()]
    for name, extra in EXTRAS.items():
        found = versions.get(name)
        if found is None:
            install = f"; pip install 'lightning-megatron[{extra.name}]'" if extra.name else ""
            findings.append(ok(name, f"not installed: {extra.purpose}{install}"))
        elif is_older(found, extra.oldest):
            findings.append(
                mind(name, f"{found} is older than {extra.oldest}", f"pip install '{name}>={extra.oldest}'")
            )
        else:
            findings.append(ok(name, found))
    return findings


def _python(found: str) -> Finding:
    if is_older(found, PYTHON):
        return wrong("python", f"{found} is older than {PYTHON}", f"use Python {PYTHON} or newer")
    return ok("python", found)


def _required(name: str, oldest: str, found: str | None) -> Finding:
    mend = f"pip install '{name}>={oldest}'"
    if found is None:
        return wrong(name, "it is not installed", mend)
    if name == "lightning" and found in COMPROMISED:
        return wrong(
            name,
            f"{found} is a compromised release",
            f"{mend}, and change the passwords and keys that were on this machine",
        )
    if is_older(found, oldest):
        return wrong(name, f"{found} is older than {oldest}", mend)
    return ok(name, found)


def is_older(version: str, oldest: str) -> bool:
    """Whether a version comes before another, by the numbers at its head: "2.13.0+cpu" is 2.13.0."""
    one, other = _numbers(version), _numbers(oldest)
    length = max(len(one), len(other))
    return one + [0] * (length - len(one)) < other + [0] * (length - len(other))


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in match[0].split(".")] if match else []
