#!/usr/bin/env bash
# Builds the targets of tests/fuzz with clang and runs one, or all:   scripts/fuzz.sh [TARGET|all] [--hours H] [arguments of libFuzzer]
# Each gets 60 seconds, or its share of H hours on all cores. --coverage runs none, and prints the lines of each parser that kept inputs reach.
# Kept inputs are in build/fuzz/kept/TARGET, an input that fails is beside them, output in build/fuzz/log. Needs clang with libFuzzer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  -h | --help) sed -n '2,4s/^# //p' "$0"; exit 0 ;;
esac
. scripts/jobs.sh
coverage=
[ "${1:-}" != --coverage ] || { coverage=yes; shift; }
targets=(tests/fuzz/corpus/*)
[ "${1:-all}" = all ] || targets=("tests/fuzz/corpus/$1")
shift $(($# < 1 ? $# : 1))
[ -d "${targets[0]}" ] || { echo "fuzz: unknown target '${targets[0]##*/}' ($(ls tests/fuzz/corpus | xargs))" >&2; exit 2; }
seconds=60
if [ "${1:-}" = --hours ]; then
  seconds=$(python3 -c 'import sys; print(max(1, int(float(sys.argv[1]) * 3600 * int(sys.argv[2]) / int(sys.argv[3]))))' "${2:-}" "$jobs" ${#targets[@]} 2>/dev/null) ||
    { echo "fuzz: --hours needs a number, got '${2:-}'" >&2; exit 2; }
  shift 2
fi

if ! echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
  clang++ -fsanitize=fuzzer -fopenmp -x c++ - -o /dev/null 2>/dev/null; then
  echo "fuzz: SKIPPED, there is no clang++ with libFuzzer and OpenMP (Debian: clang libclang-rt-dev libomp-dev)" >&2
  exit 77
fi
if [ -n "$coverage" ]; then
  cmake --preset fuzz -B build/fuzz-coverage -DMANTISSA_FUZZ_COVERAGE=ON
  cmake --build build/fuzz-coverage --parallel "$jobs" --target fuzzers
  exec python3 scripts/fuzz_coverage.py "${targets[@]##*/}"
fi
cmake --preset fuzz
cmake --build --preset fuzz --parallel "$jobs"
mkdir -p build/fuzz/log
run() {
  local name=$1 kept=build/fuzz/kept/$1 code=0
  shift
  mkdir -p "$kept"
  "build/fuzz/bin/fuzz_$name" "$kept" "tests/fuzz/corpus/$name" -dict=tests/fuzz/json.dict -artifact_prefix="$kept-" -max_len=4096 -max_total_time="$seconds" \
    -print_final_stats=1 "$@" >"build/fuzz/log/$name.txt" 2>&1 || code=$?
  echo "$name: $(sed -n 's/^stat::number_of_executed_units: *//p' "build/fuzz/log/$name.txt") inputs tried, $(ls "$kept" | wc -l) kept"
  [ $code = 0 ] || { tail -n 30 "build/fuzz/log/$name.txt"; return $code; }
}
export -f run
export seconds
printf '%s\n' "${targets[@]##*/}" | xargs -P "$jobs" -I{} bash -c 'run "$@"' run {} "$@"
