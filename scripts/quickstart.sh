#!/usr/bin/env bash
# Goes from a fresh clone to a trained model: installs what is missing, builds, trains configs/quickstart.json, evaluates it and writes a
# sample.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
. scripts/jobs.sh
cmake --preset release -DMANTISSA_TESTS=OFF -DMANTISSA_CUDA_FAST_COMPILE=OFF
cmake --build --preset release --parallel "$jobs"

mantissa=build/release/bin/mantissa
name=quickstart  # the run that the examples of --help read
[ ! -e runs/quickstart ] || name=quickstart-$(date +%Y%m%d-%H%M%S)
"$mantissa" train configs/quickstart.json --set "logging.run_name=$name"
"$mantissa" eval "runs/$name"
"$mantissa" generate "runs/$name" --prompt "// The " --max-new-tokens 200
echo
echo "Trained model: runs/$name. Another sample:"
echo "  $mantissa generate runs/$name --prompt 'TEXT'"
