"""What a recipe's YAML file says of a run beside its dataclasses: kind of model, what is trained, precision, devices.

Read for plans, without the packages that run recipes; faults are collected.
"""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning_megatron.cli.plain import made_of
from lightning_megatron.cli.plan_file import KINDS
from lightning_megatron.lightning_modules import BertDataModule, GPTDataModule, LlavaDataModule, T5DataModule
from lightning_megatron.planner.model_parts import Model
from lightning_megatron.planner.trainable import ALL, Trainable
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.rules.limits import MOST_OF_A_KIND, limit_faults
from lightning_megatron.transformer.lora import LoraConfig

_DATA = {"gpt": GPTDataModule, "bert": BertDataModule, "t5": T5DataModule, "llava": LlavaDataModule}
_MODULES = {"GPTModule": "gpt", "BertModule": "bert", "T5Module": "t5", "LlavaModule": "llava"}
# What Lightning takes in the place of a precision's name.
_SHORT_PRECISIONS = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
# Of a number that is text.
_MOST_DIGITS = 20
_ENGINE_PRECISION = "transformer-engine"


def at(data: Any, *names: str) -> Any:
    """What a file has under these names; None where it has nothing."""
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def module_of(data: Any) -> Mapping[str, Any]:
    """The options of the module, which stand under init_args where the file names its class."""
    section = at(data, "model")
    if isinstance(section, dict) and "class_path" in section:
        section = section.get("init_args") or {}
    return section if isinstance(section, dict) else {}


def kind_of(data: Any, request: str | None) -> tuple[str, str]:
    """The kind of model that a file with a model.config describes, and what says so; nothing does for a GPT alone."""
    if request is not None:
        return request, "--model-kind"
    name = str(at(data, "model", "class_path") or "").rpartition(".")[2]
    if name in _MODULES:
        return _MODULES[name], f"model.class_path ({name})"
    config, options = module_of(data).get("config"), at(data, "data")
    for kind in ("llava", "t5", "bert"):
        for where, table, of in (
            ("model.config", config, {known: _fields_of(KINDS[known]) for known in KINDS}),
            ("data", options, {known: set(inspect.signature(_DATA[known]).parameters) for known in KINDS}),
        ):
            others = set().union(*(names for known, names in of.items() if known != kind))
            if own := [name for name in table or () if name in of[kind] - others]:
                return kind, f"{where}.{own[0]}"
    return "gpt", ""


def trained_of(data: Any, faults: list[str]) -> Trainable:
    """What is trained: everything, unless the module freezes parts or trains low-rank paths."""
    section = module_of(data)
    parts, lora = section.get("frozen") or [], section.get("lora")
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        faults.append(f"model.frozen ({parts!r}) must be a list of names")
        return ALL
    config = None if lora is None else made_of(LoraConfig, lora, "model.lora", faults)
    return Trainable(frozen=tuple(parts), lora=config)


def is_packed(data: Any) -> bool:
    """Whether rows hold documents that do not see each other."""
    return at(data, "data", "packing") == "documents" or bool(at(data, "data", "separates_documents"))


def precision_of(trainer: Mapping[str, Any], fp8: Fp8Config | None, faults: list[str]) -> tuple[str, Fp8Config | None]:
    """The full name of the Trainer's precision, and how linears multiply in FP8, where they do."""
    value = trainer.get("precision")
    name = "32-true" if value is None else _SHORT_PRECISIONS.get(str(value), str(value))
    if name != _ENGINE_PRECISION:
        return name, fp8
    if fp8 is not None:
        faults.append(
            "FP8 is asked for twice, by precision 'transformer-engine' and by the strategy's fp8; leave one of them out"
        )
    return "bf16-true", Fp8Config(engine="transformer_engine", scaling="delayed")


def num_gpus_of(trainer: Mapping[str, Any], faults: list[str]) -> int:
    """GPUs of all nodes; 0 where it is left to the machine."""
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    if isinstance(devices, str) and "," in devices:
        devices = devices.strip(",").split(",")
    if isinstance(devices, list):
        devices = len(devices)
    elif isinstance(devices, str) and devices.isdecimal() and len(devices) < _MOST_DIGITS:
        devices = int(devices)
    if devices in ("auto", "-1", -1):
        devices = 0
    elif not is_count(devices):
        faults.append(f"trainer.devices ({devices!r}) must be a number of at least 1, a list of devices, or auto")
        devices = 0
    if not is_count(nodes):
        faults.append(f"trainer.num_nodes ({nodes!r}) must be a number of at least 1")
        nodes = 1
    faults += limit_faults({"trainer.devices": int(devices), "trainer.num_nodes": int(nodes)}, MOST_OF_A_KIND)
    return int(devices) * int(nodes)


def is_count(value: object) -> bool:
    """Whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _fields_of(kind: type[Model]) -> set[str]:
    return {field.name for field in fields(kind)}
