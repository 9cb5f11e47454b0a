#!/usr/bin/env bash
# torch_distillation.sh BINARY: 20 steps of mantissa and of PyTorch from the same weights, with a teacher of another shape: its divergence
# alone, and at a temperature beside the labels. The sums differ in order only, so fp32 losses agree to 1e-5.
set -euo pipefail
python=.venv-interop/bin/python
[ -x "$python" ] || { echo "SKIPPED: no .venv-interop; scripts/interop/setup.sh makes it"; exit 77; }
compare() {
  "$python" scripts/interop/torch_bench.py --mantissa "$1" --config configs/shakespeare-qwen3.json --set data.path=LICENSE --rounds 1 \
    --dtype fp32 --steps 20 --loss-tolerance 1e-5 "${@:2}" | tail -n 1
}
compare "$1" --teacher-share 1
compare "$1" --teacher-share 0.6 --teacher-temperature 2.5
