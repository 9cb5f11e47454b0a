#!/usr/bin/env bash
# Compares the speed of two ranks of one thread with that of one process of two threads: GPT-2 124M, 4,096 tokens a step in micro batches of
# 1,024. Both take turns in one job, 9 slices each or as many as fit, and each line ends with the median of their ratios.
#   scripts/bench_ranks.sh [SECONDS]      for each line (300); MANTISSA names another binary
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mantissa=${MANTISSA:-build/release/bin/mantissa}
seconds=${1:-300}

compare() {  # arguments: what, goal, settings
  local what=$1 goal=$2 sets=()
  shift 2
  for set in training.seq_len=1024 training.micro_batch_size=1 training.global_batch_size=4 training.grad_accum=null training.threads=1 "$@"; do
    sets+=(--set "$set")
  done
  echo "$what, goal $goal:"
  "$mantissa" launch --nproc-per-node 2 -- bench train configs/gpt2-124m.json --alone --time-budget "$seconds" "${sets[@]}" | sed -n 's/^\[rank0\]: *//p'
}

compare "data ranks, high in fp32" 0.90 precision.dtype=fp32
compare "data ranks, mxfp8 with gathered codes" 0.75 precision.dtype=bf16 precision.recipe=mxfp8 precision.fp8_param_gather=true
compare "tensor ranks, high in fp32" 0.80 precision.dtype=fp32 parallel.tensor=2
compare "tensor ranks with sequence parallelism, high in fp32" 0.80 precision.dtype=fp32 parallel.tensor=2 parallel.sequence_parallel=true
