#!/usr/bin/env bash
# Measures the cost of experts in speed: 8 of 1024 channels, of which a token takes 2, by turns with a dense model of 2048, which has as
# many GEMMs, at 4,096 tokens. First forward and backward alone, then whole steps, whose update touches all experts; each line ends with the
# ratio's spread.
#   scripts/moe_speed.sh [SECONDS]      for each line (60); MANTISSA names another binary
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mantissa=${MANTISSA:-build/release/bin/mantissa}
seconds=${1:-60}

compare() {  # arguments: what, goal, options
  echo "$1, goal $2:"
  shift 2
  local sets=()
  for set in vocab_size=1024 hidden_size=768 num_layers=4 num_attention_heads=12 num_key_value_heads=12 intermediate_size=2048 \
    max_position_embeddings=1024 moe.num_experts=8 moe.num_experts_per_tok=2 moe.intermediate_size=1024 'moe.dense_layers=[]'; do
    sets+=(--set "model.$set")
  done
  for set in seq_len=1024 micro_batch_size=4 grad_accum=1; do sets+=(--set "training.$set"); done
  "$mantissa" bench train configs/moe-tiny.json "${sets[@]}" --against model.moe=null --time-budget "$seconds" "$@"
}

compare "forward and backward" 0.80 --without-update
compare "step" 0.60
