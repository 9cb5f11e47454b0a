#!/usr/bin/env bash
# numpy_moe.sh BINARY: the loss that eval tells of a trained checkpoint with experts is that of scripts/interop/numpy_moe.py, to 1e-5.
set -euo pipefail
python=.venv-interop/bin/python
[ -x "$python" ] || { echo "SKIPPED: no .venv-interop; scripts/interop/setup.sh makes it"; exit 77; }
mantissa=$1
export OPENBLAS_NUM_THREADS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compare() {  # settings
  local run=$work/run-$((++runs)) options=() ours theirs
  for set in "logging.dir=$run" data.path=LICENSE precision.dtype=fp32 training.steps=30 training.threads=1 optimizer.lr=1e-2 \
    schedule.warmup_steps=5 eval.interval=0 eval.iters=1 logging.console=off "$@"; do
    options+=(--set "$set")
  done
  "$mantissa" train configs/moe-tiny.json "${options[@]}"
  ours=$("$mantissa" eval "$run" --threads 1)
  theirs=$("$python" scripts/interop/numpy_moe.py "$run/checkpoints/step-00000030")
  echo "$ours"
  echo "$theirs"
  ours=${ours% | seq_len *}
  [ "${ours##*| }" = "${theirs##*| }" ]  # targets
  ours=${ours#*loss } theirs=${theirs#*loss }
  awk -v a="${ours%% *}" -v b="${theirs%% *}" 'BEGIN { exit !(a > 0 && (a - b < 0 ? b - a : a - b) <= 1e-5 * b) }'
}

runs=0
compare
compare model.moe.score=sigmoid model.moe.bias_update_rate=0.02 model.moe.aux_loss_coef=0
compare model.qk_norm=false model.tie_word_embeddings=true model.moe.num_experts_per_tok=3 model.moe.shared_intermediate_size=64 model.moe.norm_topk_prob=false
