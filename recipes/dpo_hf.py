"""Tunes any causal model of transformers on preferences (DPO): all weights or LoRA adapters.

    python recipes/dpo_hf.py fit --config recipes/configs/dpo_toy.yaml --model.path tuned --data.path pairs.jsonl \
        --export.path preferred

The reference is a second, frozen model, which every pipeline stage holds whole. Where that is too much, a pass before
writes its log-probabilities beside the pairs, and training reads them:

    python recipes/dpo_hf.py predict --config recipes/configs/dpo_toy.yaml --model.path tuned --data.path pairs.jsonl \
        --model.reference data --references.path scored.jsonl
    python recipes/dpo_hf.py fit --config recipes/configs/dpo_toy.yaml --model.path tuned --data.path scored.jsonl \
        --model.reference data

Every option of DpoModule, PreferenceDataModule, the Trainer and the strategy can be given on the command line or in a
file; `fit --print_config` prints all of them.
"""

from lightning_megatron.cli.recipe import run_recipe
from lightning_megatron.lightning_modules import DpoModule, PreferenceDataModule
from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.lightning_modules.preference_data import WriteReferences
from lightning_megatron.trainer.callbacks import ThroughputMonitor

if __name__ == "__main__":
    run_recipe(
        DpoModule,
        PreferenceDataModule,
        links={"model.path": "data.tokenizer"},
        callbacks={"throughput": ThroughputMonitor, "references": WriteReferences, "export": ExportPretrained},
    )
