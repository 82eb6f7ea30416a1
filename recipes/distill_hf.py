"""Distils a causal model of transformers from a frozen teacher of the same tokenizer, on conversations or text.

    python recipes/distill_hf.py fit --config recipes/configs/distill_toy.yaml --model.path tiny --model.teacher tuned \
        --data.path chats.jsonl --export.path distilled

Every option of DistillModule, ChatDataModule, the Trainer and the strategy can be given on the command line or in a
file; `fit --print_config` prints all of them.
"""

from lightning_megatron.cli.recipe import run_recipe
from lightning_megatron.lightning_modules import ChatDataModule, DistillModule
from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.trainer.callbacks import ThroughputMonitor

if __name__ == "__main__":
    run_recipe(
        DistillModule,
        ChatDataModule,
        links={"model.path": "data.tokenizer"},
        callbacks={"throughput": ThroughputMonitor, "print_text": PrintText, "export": ExportPretrained},
    )
