#!/usr/bin/env bash
# python.sh ENVIRONMENT SCRIPT [ARGUMENT ...]: a comparison of scripts/interop in .venv-interop or .venv-interop4. Skipped where setup.sh did not
# make it, or made it from other requirements. A GPU is not shown: with one, transformers keeps packed weights packed.
set -euo pipefail
requirements=scripts/interop/requirements${1#.venv-interop}.txt
cmp -s "$requirements" "$1/installed" || { echo "SKIPPED: no $1 of $requirements; scripts/interop/setup.sh ${1#.venv-interop} makes it"; exit 77; }
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=
exec "$1/bin/python" "scripts/interop/$2" "${@:3}"
