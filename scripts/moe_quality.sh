#!/usr/bin/env bash
# Measures the cost of quantized experts: configs/moe-tiny.json trained on a text with experts in bf16, mxfp8, mxfp4_qat and
# mxfp4_qat_mxfp8_act, 5 seeds each, and the gradients of one step from the same weights. Measures balance, too: with expert biases, or
# nothing, in place of the auxiliary loss, in bf16. scripts/moe_quality.py holds the results against the goals; exit 1 if one is missed.
#   scripts/moe_quality.sh TEXT [STEPS]   1,000 steps; hours of one core. Started again it goes on where it was.
# MANTISSA names another binary, OUT_DIR another folder than build/moe_quality, SEEDS other seeds than "1 2 3 4 5".
set -euo pipefail
case ${1:-} in
  '') echo "moe_quality: name a text, such as tinyshakespeare.txt" >&2; exit 2 ;;
  -h | --help) sed -n '2,6s/^# //p' "$0"; exit 0 ;;
esac
text=$(realpath -e "$1") steps=${2:-1000}
[ -z "${MANTISSA:-}" ] || MANTISSA=$(realpath -e "$MANTISSA")
[ -z "${OUT_DIR:-}" ] || OUT_DIR=$(realpath -m "$OUT_DIR")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mantissa=${MANTISSA:-build/release/bin/mantissa} out=${OUT_DIR:-build/moe_quality}
read -ra seeds <<<"${SEEDS:-1 2 3 4 5}"
recipes=(high mxfp8 mxfp4_qat mxfp4_qat_mxfp8_act)

train() {  # name, recipe, settings: does nothing where the run ended, and goes on where it was interrupted
  local name=$1 recipe=$2 sets=()
  shift 2
  for set in "data.path=$text" "logging.dir=$out/$name" training.threads=1 eval.interval=0 checkpoint.keep_latest=2 logging.console=off logging.interval=1 \
    logging.tensorboard=false "precision.rules=[{\"match\": \"layers.*.moe.experts.*\", \"recipe\": \"$recipe\"}]" "$@"; do
    sets+=(--set "$set")
  done
  [ -e "$out/$name/finished" ] && return
  echo "$(date +%H:%M:%S) $name"
  "$mantissa" train configs/moe-tiny.json "${sets[@]}" --set checkpoint.resume=auto
  touch "$out/$name/finished"
}

mkdir -p "$out"
for recipe in "${recipes[@]}"; do
  train "first-step/$recipe" "$recipe" training.steps=1 optimizer.grad_clip=0 eval.iters=1
done
whole() {  # name, recipe, seed, settings
  local name=$steps-steps/$1/seed-$3
  train "$name" "$2" "training.steps=$steps" "training.seed=$3" checkpoint.interval=200 eval.iters=null "${@:4}"
  rm -rf "$out/$name/checkpoints"
}
for seed in "${seeds[@]}"; do
  for recipe in "${recipes[@]}"; do whole "$recipe" "$recipe" "$seed"; done
  whole sigmoid-bias high "$seed" model.moe.score=sigmoid model.moe.aux_loss_coef=0 model.moe.bias_update_rate=1e-3
  whole sigmoid-alone high "$seed" model.moe.score=sigmoid model.moe.aux_loss_coef=0
  whole softmax-alone high "$seed" model.moe.aux_loss_coef=0
done
python3 scripts/moe_quality.py "$out" --steps "$steps"
