#!/usr/bin/env bash
# Installs missing packages, builds, runs the tests:   scripts/test.sh [--preset release|debug|asan|tsan] [arguments of ctest]
# Left out: tests labeled slow, gpu without a device, interop without .venv-interop. asan and tsan run those in tests/sanitizers.cmake.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=release
case ${1:-} in
  --preset) preset=${2:-}; shift $(($# < 2 ? $# : 2)) ;;
  --preset=*) preset=${1#*=}; shift ;;
  -h | --help) sed -n '2,3s/^# //p' "$0"; exit 0 ;;
esac
case $preset in
  release | debug | asan | tsan) ;;
  *) echo "test: unknown preset '$preset' (release, debug, asan, tsan)" >&2; exit 2 ;;
esac

scripts/setup.sh
. scripts/jobs.sh
only=() target=(all)
[ ! -e /dev/nvidia0 ] || target+=(gpu_programs)
case $preset in
  asan) only=(-L '^(unit|threads)$') target=(unit_tests) ;;
  tsan) only=(-L '^threads$') target=(threads_tests) ;;
  *) scripts/setup.sh scripts/packages-test.txt || echo "test: without these packages the tests that use them are skipped" >&2 ;;
esac
# Neither a GPU nor a test looks at the code of CUDA kernels here, so it may be slow. A folder that has been configured keeps its choice.
kernels=()
if [ -e /dev/nvidia0 ] || [ -x .venv-interop/bin/python ]; then
  kernels=(-DMANTISSA_CUDA_FAST_COMPILE=OFF)
elif [ ! -e "build/$preset/CMakeCache.txt" ]; then
  kernels=(-DMANTISSA_CUDA_FAST_COMPILE=ON)
fi
cmake --preset "$preset" -DMANTISSA_TESTS=ON "${kernels[@]}"
NINJA_STATUS='[%p, %f of %t, %e s] ' cmake --build --preset "$preset" --parallel "$jobs" --target "${target[@]}"

excluded=slow
[ -e /dev/nvidia0 ] || excluded+='|gpu'
[ -x .venv-interop/bin/python ] || excluded+='|interop'
# One more than cores: tests of rendezvous, watchdogs and launchers wait most of their time.
tests=(ctest --preset "$preset" --parallel "$(($(nproc) + 1))" --label-exclude "^($excluded)\$" "${only[@]}" "$@")
"${tests[@]}" --show-only >"build/$preset/listed_tests"  # before they run: it begins a log of tests as well
"${tests[@]}" | scripts/watch_tests.py "build/$preset" "build/$preset/listed_tests"
