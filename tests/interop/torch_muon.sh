#!/usr/bin/env bash
# torch_muon.sh BINARY CONFIG [--set KEY=VALUE ...]: 20 steps of Muon, by both scales, of mantissa and of torch.optim.Muon from the same
# weights, in fp32. Losses and weights agree to 1e-5, where a step of Muon is 1e-3.
set -euo pipefail
python=.venv-interop/bin/python
[ -x "$python" ] || { echo "SKIPPED: no .venv-interop; scripts/interop/setup.sh makes it"; exit 77; }
for scale in match_rms_adamw original; do
  "$python" scripts/interop/torch_bench.py --mantissa "$1" --config "$2" --set data.path=LICENSE --rounds 1 "${@:3}" --set optimizer.type=muon \
    --set optimizer.muon.scale=$scale --set optimizer.lr=1e-3 --dtype fp32 --steps 20 --loss-tolerance 1e-5 --weight-tolerance 1e-5 | tail -n 1
done
