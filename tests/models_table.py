"""Trains a tiny twin of each causal model of the installed transformers, unchanged, on layouts, beside one device.

python -m tests.models_table [--types llama qwen3 ...] [--layouts pp2 tp2 ...] [--write docs/models_table.md]
"""

import argparse
import functools
import sys
import time
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_megatron.testing import CertifyError, certify
from lightning_megatron.testing.tiny import twin_of

LAYOUTS = ("pp2", "pp2vp2", "tp2", "dp2pp2tp2-zero")
VOCABULARY, TOKENS, ROWS = 64, 12, 8


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

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        loss = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def config_of(model_type: str) -> Any:
    """The configuration of a type, small, without dropout."""
    config = twin_of(CONFIG_MAPPING[model_type]())
    for one in (config, config.get_text_config()):
        for name in vars(one):
            if "dropout" in name or name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
                setattr(one, name, 0.0)
        for name, token in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
            setattr(one, name, token)
        one.vocab_size = VOCABULARY
        one.use_cache = False
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


def row_of(model_type: str, layouts: tuple[str, ...]) -> dict[str, str]:
    """What each layout gave: the largest deviation, or a reason."""
    try:
        found = certify(functools.partial(Causal, model_type), batches, layouts=layouts, steps=3)
    except CertifyError as error:
        return dict.fromkeys(layouts, f"one device: {_short(str(error))}")
    row = {}
    for result in found.results:
        largest = max(result.largest.values(), default=float("nan"))
        is_number = result.verdict in ("equal", "differs")
        row[result.layout.name] = (
            f"{result.verdict} {largest:.0e}" if is_number else f"{result.verdict}: {_short(result.message)}"
        )
    return row


def _short(message: str) -> str:
    return " ".join(message.split())[:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for model_type in options.types:
        started = time.monotonic()
        row = row_of(model_type, tuple(options.layouts))
        for layout, cell in row.items():
            print(f"{model_type:24} {layout:16} {cell}", flush=True)
        print(f"{model_type:24} {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
