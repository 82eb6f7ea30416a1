"""Pre-trains a T5 on text with masked spans (span corruption), validates it, and predicts masked spans.

    python recipes/pretrain_t5.py fit --config recipes/configs/t5_toy.yaml
    python recipes/pretrain_t5.py predict --config recipes/configs/t5_toy.yaml \
        --ckpt_path runs/t5_toy/version_0/checkpoints/step=400.ckpt \
        --data.prompts '["import<extra_id_0>\n\ndef main(<extra_id_1>:"]'

Every option of T5Module, T5DataModule, the Trainer and the strategy can be given on the command line or in a file;
`fit --print_config` prints all of them.
"""

from lightning_megatron.cli.recipe import run_recipe
from lightning_megatron.lightning_modules import T5DataModule, T5Module
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.trainer.callbacks import ThroughputMonitor

if __name__ == "__main__":
    run_recipe(
        T5Module,
        T5DataModule,
        links={"model.config.vocab_size": "data.vocab_size"},
        callbacks={"throughput": ThroughputMonitor, "print_text": PrintText},
    )
