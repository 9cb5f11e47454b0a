#!/usr/bin/env bash
# torch_moe.sh BINARY SHAPE: 20 steps of a small mixture of experts in mantissa and in PyTorch from the same weights, in the shape of qwen3-moe,
# mixtral or, with what these two do not have, deepseek. Losses and auxiliary losses agree to 1e-5 and loads are equal, with the first seed for
# which no choice of PyTorch's is so close that rounding could turn it. Which one that is depends on the CPU: rounding changes the weights that
# the steps start from.
set -euo pipefail
python=.venv-interop/bin/python
[ -x "$python" ] || { echo "SKIPPED: no .venv-interop; scripts/interop/setup.sh makes it"; exit 77; }

# 32 tokens a step, in two micro batches of two sequences. The rate and the coefficients are large enough for the auxiliary gradients to show.
sets=(model.vocab_size=null data.train=[] data.valid=[] data.path=LICENSE data.valid_fraction=0.1 data.dtype=u16 data.tokenizer=char
  training.seq_len=8 training.micro_batch_size=2 training.global_batch_size=4 training.recompute=none optimizer.lr=1e-3 schedule.warmup_steps=5
  model.hidden_size=64 model.num_layers=2 model.num_attention_heads=4 model.num_key_value_heads=2 model.intermediate_size=96
  model.moe.intermediate_size=32 model.moe.aux_loss_coef=0.05 model.moe.seq_aux_loss_coef=0.02 model.moe.z_loss_coef=0.01)
case $2 in
  qwen3) config=qwen3-moe-30b-a3b first_seed=11 sets+=(model.head_dim=32 model.moe.num_experts=16 model.moe.num_experts_per_tok=4) ;;
  mixtral) config=mixtral-8x7b first_seed=6 ;;
  deepseek) config=mixtral-8x7b first_seed=3 sets+=(model.moe.score=sigmoid model.moe.bias_update_rate=0.01 model.moe.routed_scaling_factor=2.5 model.moe.shared_intermediate_size=48 "model.moe.dense_layers=[0]") ;;
  *) echo "torch_moe: no shape '$2'" >&2; exit 2 ;;
esac
options=()
for set in "${sets[@]}" "${@:3}"; do options+=(--set "$set"); done
undecided=3
for ((seed = first_seed; seed < first_seed + 20; ++seed)); do
  status=0
  lines=$("$python" scripts/interop/torch_bench.py --mantissa "$1" --config "configs/$config.json" "${options[@]}" --set training.seed="$seed" \
    --threads 1 --rounds 1 --steps 20 --dtype fp32 --loss-tolerance 1e-5 --margin 1e-4) || status=$?
  echo "seed $seed: $(tail -n 1 <<<"$lines")"
  [ $status = $undecided ] || break
done
exit $status
