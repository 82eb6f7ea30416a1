"""Trains a tiny twin of each causal model of the installed transformers, unchanged, on layouts, beside one device.

    python -m tests.any_module.models_table [--types llama qwen3 ...] [--layouts pp2 tp2 ...] [--results FILE]
        [--write PAGE]

A cell is the largest deviation from one device, relative to the largest value of each tensor, of losses, every
gradient, the gradient norm and the weights over three steps of AdamW in float64; or why there is none. What the models
compute in float32 is computed in float64 on both sides. With a file of results, what is in it is not run again.
"""

import argparse
import functools
import json
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_megatron.testing import CertifyError, certify
from lightning_megatron.testing.tiny import twin_of

LAYOUTS = ("pp2", "pp2vp2-zb_v", "tp2", "tp2-sp", "dp2pp2tp2-zero", "cp2", "ep2")
VOCABULARY, TOKENS, ROWS = 64, 12, 8

_WHAT = """\
`python -m tests.any_module.models_table` trains a tiny twin of each causal model of the installed transformers, as it
is, on layouts and on one device. A cell is the largest deviation, relative to the largest value of each tensor, of
losses, every gradient, the gradient norm and the weights over three steps of AdamW in float64; or a number in brackets,
for the reason below. What the models compute in float32 is computed in float64 on both sides."""

SETTINGS: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "marian": {"decoder_vocab_size": VOCABULARY},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
"""Values that the defaults of a type leave out, and without which it cannot be built or called."""

DRAWING = ("phimoe",)
"""Types that draw experts at random while they train, and not while they are evaluated: they train so here."""

Row = dict[str, str]
"""Cells of a type, by layout."""


class Causal(L.LightningModule):
    """A model of transformers as it is, trained on its own loss."""

    def __init__(self, model_type: str) -> None:
        super().__init__()
        self.model_type = model_type
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(1)
            self.model = AutoModelForCausalLM.from_config(config_of(self.model_type))
            if self.model_type in DRAWING:
                self.model.eval()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def config_of(model_type: str) -> Any:
    """The configuration of a type, small, without dropout."""
    config = twin_of(CONFIG_MAPPING[model_type](**SETTINGS.get(model_type, {})))
    for one in (config, config.get_text_config()):
        for name in vars(one):
            if "dropout" in name or name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
                setattr(one, name, 0.0)
        for name, token in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
            setattr(one, name, token)
        one.vocab_size = VOCABULARY
        one.use_cache = False
        # The grouped products of experts know no float64.
        one._experts_implementation = "eager"
    return config


def batches() -> list[dict[str, Tensor]]:
    """Three batches of tokens [8, 12], labels ragged."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(3):
        tokens = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
        labels = tokens.clone()
        labels[::2, 7:] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def row_of(model_type: str, layouts: tuple[str, ...]) -> Row:
    """What each layout gave: the largest deviation, or a reason."""
    try:
        found = certify(functools.partial(Causal, model_type), batches, layouts=layouts, steps=3)
    except (CertifyError, ValueError) as error:
        return dict.fromkeys(layouts, f"one device: {_short(str(error))}")
    row = {}
    for result in found.results:
        largest = max(result.largest.values(), default=float("nan"))
        number = f"{largest:.0e}" + ("" if found.facts.precision == "64-true" else " in float32")
        told = {"equal": number, "differs": f"differs: {number}"}
        row[result.layout.name] = told.get(result.verdict, f"{result.verdict}: {_short(result.message)}")
    return row


def _short(message: str) -> str:
    words = " ".join(message.split()).removeprefix("this configuration cannot run: - ")
    return words.removeprefix("the module does not train on one device: ")[:110]


def _reason(cell: str) -> str:
    """Why there is no number, without the place in a file and the rank."""
    return re.sub(r"\brank \d+: ", "", re.sub(r" ?\(/[^ ]*$", "", cell))


def is_number(cell: str) -> bool:
    """Whether a cell says that its layout computes one device's numbers."""
    return cell[:1].isdigit()


def page_of(rows: dict[str, Row], layouts: tuple[str, ...]) -> str:
    """The table, and the reasons that its cells point to."""
    reasons: dict[str, int] = {}
    lines = []
    for model_type, row in sorted(rows.items()):
        cells = []
        for layout in layouts:
            cell = row.get(layout, "not run")
            cells.append(cell if is_number(cell) else f"[{reasons.setdefault(_reason(cell), len(reasons) + 1)}]")
        lines.append(f"| {model_type} | {' | '.join(cells)} |")
    counts = Counter(layout for row in rows.values() for layout, cell in row.items() if is_number(cell))
    trained = sum(not all(cell.startswith("one device") for cell in row.values()) for row in rows.values())
    head = [
        "# Causal models of transformers, unchanged",
        "",
        "<!-- Written by `make models-table`; do not edit by hand. -->",
        "",
        _WHAT,
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__}. {len(rows)} types, of which {trained} "
        "train as a tiny twin on",
        f"one device; equal to it: {', '.join(f'{layout} {counts[layout]}' for layout in layouts)}.",
        "",
        f"| type | {' | '.join(layouts)} |",
        f"|---|{'---:|' * len(layouts)}",
        *lines,
        "",
        "## Reasons",
        "",
        "```text",
        *(f"[{number}] {reason}" for reason, number in reasons.items()),
        "```",
        "",
    ]
    return "\n".join(head)


def main() -> int:
    """Runs what has no result yet, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    parser.add_argument("--results", type=Path, help="file of results, which grows")
    parser.add_argument("--write", type=Path, help="write the page here")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    kept = options.results
    rows: dict[str, Row] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    for model_type in options.types:
        missing = tuple(layout for layout in options.layouts if layout not in rows.get(model_type, {}))
        if missing:
            found = row_of(model_type, missing)
            rows.setdefault(model_type, {}).update(found)
            print(model_type, *(f"{layout}: {cell}" for layout, cell in found.items()), sep="\n    ", flush=True)
            if kept:
                kept.write_text(json.dumps(rows, indent=1))
    if options.write:
        options.write.write_text(page_of(rows, tuple(options.layouts)))
    return int(any(cell.startswith("differs") for row in rows.values() for cell in row.values()))


if __name__ == "__main__":
    sys.exit(main())
