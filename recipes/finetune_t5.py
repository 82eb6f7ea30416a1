"""Fine-tunes a Hugging Face T5 from a local directory on prompts and completions, and generates answers.

    python recipes/finetune_t5.py fit --config recipes/configs/finetune_t5_toy.yaml --model.path t5-small \
        --data.path pairs.jsonl --export.path tuned
    python recipes/finetune_t5.py predict --config recipes/configs/finetune_t5_toy.yaml --model.path tuned \
        --data.prompts '["translate English to German: The house is small."]'

Every option of T5FinetuneModule, T5ChatDataModule, the Trainer and the strategy can be given on the command line or in
a file; `fit --print_config` prints all of them.
"""

from lightning_megatron.cli.recipe import run_recipe
from lightning_megatron.lightning_modules import T5ChatDataModule, T5FinetuneModule
from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.trainer.callbacks import ThroughputMonitor

if __name__ == "__main__":
    run_recipe(
        T5FinetuneModule,
        T5ChatDataModule,
        links={"model.path": "data.tokenizer"},
        callbacks={"throughput": ThroughputMonitor, "print_text": PrintText, "export": ExportPretrained},
    )
