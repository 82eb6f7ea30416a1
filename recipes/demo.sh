#!/usr/bin/env bash
# `make demo` runs this: it trains a small GPT with two processes on CPUs, saves, resumes on another layout,
# compares the losses, and generates text. It needs no network. Options are passed to every step, for example
#   recipes/demo.sh --data.path my_texts/        recipes/demo.sh --data.dataset wikitext:wikitext-2-raw-v1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=demo
seam=100     # optimizer steps until the checkpoint
overlap=10   # steps after it that both runs do, to be compared
end=200

export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export PYTHONWARNINGS="ignore::FutureWarning,ignore::UserWarning,ignore::DeprecationWarning"
export JSONARGPARSE_DEPRECATION_WARNINGS=off
rm -rf "$out"

gpt() {
  local command=$1 run=$2
  shift 2
  python recipes/pretrain_gpt.py "$command" --config recipes/configs/toy.yaml \
    --trainer.logger.init_args.save_dir "$out" --trainer.logger.init_args.version "$run" \
    --trainer.enable_model_summary false --data.cache_directory "$out/data" "$@"
}
layout() { echo "--trainer.strategy.init_args.$1=$2"; }

say() { printf '\n== %s\n' "$*"; }

say "1. Two processes share every layer (tensor and sequence parallel): $((seam + overlap)) steps, a checkpoint after $seam"
gpt fit tp --trainer.max_steps $((seam + overlap)) "$@"

say "2. Two processes hold half of the layers each (pipeline parallel): from that checkpoint to step $end"
gpt fit pp --trainer.max_steps "$end" \
  "$(layout tensor_model_parallel_size 1)" "$(layout sequence_parallel false)" \
  "$(layout pipeline_model_parallel_size 2)" "$(layout num_microbatches 4)" \
  --ckpt_path "$out/toy/tp/checkpoints/step=$seam.ckpt" "$@"

say "3. The loss goes on"
# Two layouts add up in different orders; in float32 the difference is about 1e-6 of a loss at first, and grows slowly.
lightning-megatron curves "$out/toy/tp" "$out/toy/pp" --within 1e-2 --falls --out "$out/loss.png"

say "4. One process lets the model write, from the checkpoint of the two"
gpt predict text --trainer.devices 1 \
  "$(layout tensor_model_parallel_size 1)" "$(layout sequence_parallel false)" \
  --ckpt_path "$out/toy/pp/checkpoints/step=$end.ckpt" \
  --model.generation.max_new_tokens 80 --model.generation.temperature 0.7 \
  --data.prompts '["def __init__(self, ", "import "]' "$@"

say "Logs, checkpoints, tokenizer and a picture of the loss (loss.png) are in $out/"
