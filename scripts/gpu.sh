#!/usr/bin/env bash
# Tests and measures this program on a machine with an NVIDIA GPU that has the CUDA driver and none of the packages that a build needs.
#   scripts/gpu.sh pack         where there is the CUDA toolkit: builds for all GPUs, and packs the programs for a GPU's machine
#   scripts/gpu.sh run SLICE    there, in the same folder: unpacks it and runs a slice, or all, one after another:
#                               profile primitives kernels formats conformance train ranks memcheck racecheck initcheck synccheck bench speed
# A slice takes at most ten minutes and is passed over where this pack has passed it on such a GPU. Each writes a JSON line to
# build/gpu/results.jsonl. cuBLASLt and NCCL are those of the machine. Exit code 77: something is missing that it must have.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=build/gpu pack=build/gpu/mantissa-gpu.tar.xz
slices=(profile primitives kernels formats conformance train ranks memcheck racecheck initcheck synccheck bench speed)
usage() { sed -n '2,8s/^# //p' "$0"; exit "$1"; }

make_pack() {
  local bin=build/pack/bin
  scripts/setup.sh
  . scripts/jobs.sh
  cmake --preset release -B build/pack -DMANTISSA_TESTS=ON -DMANTISSA_CUDA=ON -DMANTISSA_CUDA_ARCHITECTURES=all -DMANTISSA_CUDA_FAST_COMPILE=OFF
  cmake --build build/pack --parallel "$jobs" --target mantissa gpu_programs
  stage=$(mktemp -d)
  trap 'rm -rf "$stage"' EXIT
  mkdir -p "$stage/lib" "$out"
  for program in mantissa gpu_tests gpu_formats; do strip -o "$stage/$program" "$bin/$program"; done
  # All libraries but those that come with the system's loader.
  ldd "$stage/mantissa" "$stage/gpu_tests" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u | grep -vE '/lib(c|m|dl|rt|pthread)\.so' |
    while read -r library; do strip -o "$stage/lib/$(basename "$library")" "$library" 2>/dev/null || cp -L "$library" "$stage/lib/"; done
  tar -C "$stage" --sort=name --owner=0 --group=0 --mtime=@0 -c . | xz -T0 -6 >"$pack"
  local size
  size=$(stat -c %s "$pack")
  echo "gpu: $pack, $((size >> 20)) MiB"
  [ "$size" -le $((45 << 20)) ] || { echo "gpu: larger than 45 MiB" >&2; exit 1; }
}

need() { "${@:2}" >/dev/null 2>&1 || missing+=("$1"); }
check_machine() {
  missing=()
  need "$pack (scripts/gpu.sh pack, where there is the CUDA toolkit)" test -f "$pack"
  need "xz (package xz-utils)" command -v xz
  need "a GPU and its driver (nvidia-smi)" nvidia-smi
  [ ${#missing[@]} = 0 ] && return
  printf 'gpu: SKIPPED, this machine lacks: %s\n' "${missing[@]}" >&2
  exit 77
}

unpack() {
  build=$(sha256sum "$pack" | cut -c1-16)
  home=$out/$build
  [ -x "$home/mantissa" ] && return
  mkdir -p "$home"
  tar -C "$home" -xJf "$pack"
}

# Speeds are told as ratios to the GEMMs of the library.
need_library() {
  local report
  report=$("$home/mantissa" doctor)
  grep -q 'with cuBLASLt' <<<"$report" || { echo "gpu: no cuBLASLt; set LD_LIBRARY_PATH to the folder that has it" >&2; exit 77; }
}

# Runs tests in processes beside each other, with two cores each.
shards() {
  local count=$((($(nproc) + 1) / 2))
  export GTEST_TOTAL_SHARDS=$count
  seq 0 $((count - 1)) | xargs -P "$count" -I{} bash -c 'export GTEST_SHARD_INDEX=$1
    cores=$((2 * $1)),$((2 * $1 + 1)); taskset -c $cores true 2>/dev/null && pin="taskset -c $cores" || pin=
    exec $pin "$2" --gtest_filter="$3"' _ {} "$home/gpu_tests" "$1"
}

run_slice() {
  case $1 in
    profile) scripts/gpu_profile.py "$home" "$out/profile" ;;
    primitives) "$home/gpu_tests" --gtest_brief=1 --gtest_filter='*Primitives*' ;;
    kernels) shards '-*Primitives*:*TrainingOnCuda*' ;;
    formats) "$home/gpu_formats" ;;
    conformance) "$home/mantissa" conformance tests/golden --device cuda ;;
    train) shards '*TrainingOnCudaMatrix*' ;;
    ranks) "$home/gpu_tests" --gtest_filter='*TrainingOnCuda.*' ;;
    memcheck | racecheck | initcheck | synccheck)
      sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
      [ -x "$sanitizer" ] || { echo "gpu: no compute-sanitizer in PATH, \$CUDA_HOME/bin or /usr/local/cuda/bin (package cuda-sanitizer)" >&2; return 77; }
      "$sanitizer" --tool "$1" --error-exitcode 1 "$home/gpu_tests" --gtest_brief=1 --gtest_filter='*OneCase*:*OnTensorCores*' ;;
    bench) need_library
      for each in kernels gemm attention moe; do
        "$home/mantissa" bench "$each" --device cuda --time-budget 30 --json "$out/bench.jsonl"; done ;;
    speed) need_library
      # GPT-2 124M; a dense model of 1.3 billion parameters; a mixture of experts with 2.8 billion, of which a billion is active
      steps() { "$home/mantissa" bench train "$@" --set training.device=cuda --time-budget 15 --json "$out/bench.jsonl"; }
      steps configs/gpt2-124m.json --set training.micro_batch_size=16 --set training.global_batch_size=16
      for recipe in high mxfp8 fp8_block; do
        steps configs/dense-1.3b.json --set training.global_batch_size=8 --set precision.recipe=$recipe; done
      steps configs/moe-8x1b.json --set model.num_layers=16 --set model.num_attention_heads=16 --set model.num_key_value_heads=16 \
        --set model.moe.intermediate_size=3072 --set training.micro_batch_size=4 --set training.global_batch_size=4 ;;
  esac
}

# Runs a slice in a process of its own, with a time limit, and writes its line.
try_slice() {
  local began=$SECONDS code=0 device
  device=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sed -n 1p)
  grep -s "\"slice\": \"$1\", \"build\": \"$build\", \"device\": \"$device\"" "$out/results.jsonl" | grep -q '"passed"' &&
    { echo "gpu: $1 has passed"; return; }
  LD_LIBRARY_PATH=$PWD/$home/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} home=$home out=$out \
    timeout 600 bash -c 'set -euo pipefail; '"$(declare -f run_slice shards need_library)"'; run_slice "$1"' _ "$1" >"$out/$1.log" 2>&1 || code=$?
  case $code in 0) result=passed ;; 77) result=skipped ;; 124) result="took over ten minutes" ;; *) result=failed ;; esac
  printf '{"slice": "%s", "build": "%s", "device": "%s", "date": "%s", "seconds": %d, "result": "%s"}\n' \
    "$1" "$build" "$device" "$(date -u +%F)" $((SECONDS - began)) "$result" | tee -a "$out/results.jsonl"
  [ "$code" != 77 ] || [ "$failed" != 0 ] || failed=$((${#wanted[@]} == 1 ? 77 : 0))
  [ "$code" != 77 ] || tail -1 "$out/$1.log" >&2
  [ "$code" = 0 ] || [ "$code" = 77 ] || { tail -40 "$out/$1.log"; failed=1; }
}

case ${1:-} in
  pack) make_pack ;;
  run)
    wanted=("${slices[@]}")
    [ "${2:-}" = all ] || wanted=("${2:-}")
    [[ " ${slices[*]} " == *" ${wanted[0]} "* ]] || usage 2
    check_machine
    unpack
    failed=0
    for slice in "${wanted[@]}"; do try_slice "$slice"; done
    exit "$failed" ;;
  -h | --help) usage 0 ;;
  *) usage 2 ;;
esac
