#!/usr/bin/env bash
# nvfp4.sh DUMP_SIMULATED: rounding to formats without codes, restated in NumPy, and codes of NVFP4, held against those of others. Skipped without .venv-interop.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$1" "$folder/simulated.bin" "$folder/codes.bin"
"$(dirname "$0")/python.sh" .venv-interop nvfp4.py "$folder/simulated.bin" "$folder/codes.bin"
