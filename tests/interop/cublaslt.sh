#!/usr/bin/env bash
# cublaslt.sh SIMT_TESTS: GEMMs over the descriptors of a cuBLASLt that has groups at once. Skipped without .venv-cublas.
set -euo pipefail
library=$(echo .venv-cublas/lib/python3*/site-packages/nvidia/cu13/lib/libcublasLt.so.13)
[ -e "$library" ] || { echo "SKIPPED: no .venv-cublas (scripts/interop/setup.sh cublas)"; exit 77; }
MANTISSA_SIMT_CUBLASLT=$library exec "$1" --gtest_brief=1 --gtest_filter='*LibraryGemm*:*GroupGemm*'
