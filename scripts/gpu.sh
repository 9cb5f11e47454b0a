#!/usr/bin/env bash
# On a machine with an NVIDIA GPU and the CUDA toolkit (12.8 or newer), and nothing else: builds the GPU tests for this GPU and runs them.
#   scripts/gpu.sh                  exit code 77 without a GPU
#   scripts/gpu.sh --compile-only   all device code for sm_80, sm_90a and sm_100a, nothing is run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
  '') compile_only= ;;
  --compile-only) compile_only=1 ;;
  -h | --help) sed -n '2,4s/^# //p' "$0"; exit 0 ;;
  *) echo "gpu: unknown argument '$1'" >&2; exit 2 ;;
esac

nvcc=${NVCC:-$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}
[ -x "$nvcc" ] || { echo "gpu: no nvcc: install the CUDA toolkit or name it, NVCC=/path/to/nvcc" >&2; exit 3; }
out=${OUT_DIR:-build/gpu}
mkdir -p "$out"

# Rounding as on the host: no fused multiply-add behind our back, subnormals kept, exact division and square root.
flags=(-std=c++20 -O3 -Iinclude -Isrc -Isrc/backend/cuda/chip --expt-relaxed-constexpr -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wno-unused-parameter,-pthread
  -fmad=false -ftz=false -prec-div=true -prec-sqrt=true)

if [ "$compile_only" ]; then
  for arch in 80 90a 100a; do flags+=(-gencode "arch=compute_$arch,code=sm_$arch"); done
  printf '%s\n' tests/gpu/*.cu src/backend/cuda/*.cu | OUT_DIR=$out xargs -P "$(nproc)" -I{} sh -c '
    source=$1; shift; exec "$@" -c "$source" -o "$OUT_DIR/$(basename "$source").o"' _ {} "$nvcc" "${flags[@]}"
  exit 0
fi

nvidia-smi --query-gpu=name --format=csv,noheader >/dev/null 2>&1 || { echo "gpu: SKIPPED, no NVIDIA GPU"; exit 77; }
for source in tests/gpu/*.cu; do
  program=$out/$(basename "$source" .cu)
  "$nvcc" "${flags[@]}" -arch=native "$source" -o "$program"
  "$program"
done
