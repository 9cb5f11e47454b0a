#!/usr/bin/env bash
# Runs scripts/gpu.sh on a machine that only seems to have a GPU, with a pack of programs that only print their arguments.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
command -v xz >/dev/null || { echo "SKIPPED: no xz"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/scripts" "$work/bin" "$work/stage/lib" "$work/build/gpu"
cp "$root/scripts/gpu.sh" "$work/scripts/"
fail() { echo "FAILED: $*" >&2; exit 1; }
program() { { echo '#!/usr/bin/env bash'; cat; } >"$1"; chmod +x "$1"; }

program "$work/bin/nvidia-smi" <<<'echo "GPU of the test, 570.1"'
program "$work/stage/mantissa" <<<'
case $1 in
  doctor) echo "GEMMs of a GPU  ${LIBRARY:-sm_90 with cuBLASLt 13.1}"; exit "${DOCTOR_ENDS_WITH:-0}" ;;
  *) echo "$@ $LD_LIBRARY_PATH" ;;
esac'
program "$work/stage/gpu_tests" <<<'echo "$@"; exit "${TESTS_END_WITH:-0}"'
program "$work/stage/gpu_formats" <<<'exit 0'
tar -C "$work/stage" -c . | xz -0 >"$work/build/gpu/mantissa-gpu.tar.xz"
results=$work/build/gpu/results.jsonl
run() { PATH=$work/bin:$PATH LD_LIBRARY_PATH=/of/the/user "$work/scripts/gpu.sh" run "$@" >"$work/out" 2>&1; }
ends_with() { local wanted=$1 code=0; shift; "$@" || code=$?; [ "$code" = "$wanted" ] || { cat "$work/out"; fail "$* ended with $code, not $wanted"; }; }

ends_with 0 run conformance
grep -q '"slice": "conformance".*"device": "GPU of the test, 570.1".*"passed"' "$results" || fail "no line of a slice that passed"
grep -q '/lib:/of/the/user$' "$work/build/gpu/conformance.log" || fail "the libraries of the user are not looked for: $(cat "$work/build/gpu/conformance.log")"
ends_with 0 run conformance
grep -q 'conformance has passed' "$work/out" || fail "a slice that has passed ran again"
program "$work/bin/nvidia-smi" <<<'echo "another GPU, 570.1"'
ends_with 0 run conformance
[ "$(grep -c '"conformance"' "$results")" = 2 ] || fail "a slice that has passed on another GPU did not run"

TESTS_END_WITH=1 ends_with 1 run kernels
grep -q '"slice": "kernels".*"failed"' "$results" || fail "no line of a slice that failed"
LIBRARY='sm_90 without cuBLASLt' ends_with 77 run bench
grep -q '"slice": "bench".*"skipped"' "$results" || fail "figures without the library that they are ratios to"
DOCTOR_ENDS_WITH=3 ends_with 1 run bench
ends_with 0 run bench
ends_with 2 run nothing
rm "$work/build/gpu/mantissa-gpu.tar.xz"
ends_with 77 run conformance
echo "gpu.sh: all as it should be"
