"""Fine-tunes any causal model of Hugging Face on conversations: all weights or LoRA adapters.

    python recipes/finetune_hf.py fit --config recipes/configs/finetune_toy.yaml --model.path Llama-3.2-1B-Instruct \
        --data.path chats.jsonl --export.path tuned
    python recipes/finetune_hf.py predict --config recipes/configs/finetune_toy.yaml --model.path tuned \
        --data.prompts '["Who are you?"]'

Every option of finetune_module, ChatDataModule, the Trainer and the strategy can be given on the command line or in a
file; `fit --print_config` prints all of them.
"""

from lightning_megatron.cli.recipe import run_recipe
from lightning_megatron.lightning_modules import ChatDataModule
from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.lightning_modules.finetune import finetune_module
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.trainer.callbacks import ThroughputMonitor

if __name__ == "__main__":
    run_recipe(
        finetune_module,
        ChatDataModule,
        links={"model.path": "data.tokenizer"},
        callbacks={"throughput": ThroughputMonitor, "print_text": PrintText, "export": ExportPretrained},
    )
