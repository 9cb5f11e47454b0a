#!/usr/bin/env bash
# torch_losses.sh BINARY CONFIG [--set KEY=VALUE ...]: 20 steps of mantissa and of PyTorch from the same weights. The sums differ in order
# only, so fp32 losses agree to 1e-5; in bf16 PyTorch also rounds gradients to bf16: 5e-3.
set -euo pipefail
python=.venv-interop/bin/python
[ -x "$python" ] || { echo "SKIPPED: no .venv-interop; scripts/interop/setup.sh makes it"; exit 77; }
compare() { "$python" scripts/interop/torch_bench.py --mantissa "$1" --config "$2" --set data.path=LICENSE --rounds 1 "${@:3}" | tail -n 1; }
compare "$@" --dtype fp32 --steps 20 --loss-tolerance 1e-5
compare "$@" --dtype bf16 --steps 5 --loss-tolerance 5e-3
