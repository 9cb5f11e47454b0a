#!/usr/bin/env bash
# Builds the targets of tests/fuzz with clang and runs one, or all:   scripts/fuzz.sh [TARGET|all] [arguments of libFuzzer]
# The default is 60 seconds each. Kept inputs are in build/fuzz/kept/TARGET, an input that fails is beside them. Needs clang with libFuzzer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  -h | --help) sed -n '2,3s/^# //p' "$0"; exit 0 ;;
esac
. scripts/jobs.sh
targets=(tests/fuzz/corpus/*)
[ "${1:-all}" = all ] || targets=("tests/fuzz/corpus/$1")
shift $(($# < 1 ? $# : 1))
[ -d "${targets[0]}" ] || { echo "fuzz: unknown target '${targets[0]##*/}' ($(ls tests/fuzz/corpus | xargs))" >&2; exit 2; }

if ! echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
  clang++ -fsanitize=fuzzer -fopenmp -x c++ - -o /dev/null 2>/dev/null; then
  echo "fuzz: SKIPPED, there is no clang++ with libFuzzer and OpenMP (Debian: clang libclang-rt-dev libomp-dev)" >&2
  exit 77
fi
cmake --preset fuzz
cmake --build --preset fuzz --parallel "$jobs"
for corpus in "${targets[@]}"; do
  name=${corpus##*/} kept=build/fuzz/kept/${corpus##*/}
  mkdir -p "$kept"
  "build/fuzz/bin/fuzz_$name" "$kept" "$corpus" -dict=tests/fuzz/json.dict -artifact_prefix="$kept-" -max_len=4096 -max_total_time=60 "$@"
done
