#!/usr/bin/env bash
# Runs the tests N times beside four busy loops, and names what failed and how often:   scripts/repeat.sh N [arguments of ctest]
# Takes the release build that scripts/test.sh makes, and the same tests. Output of runs that failed: build/repeat/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  -h | --help) sed -n '2,3s/^# //p' "$0"; exit 0 ;;
  *[!0-9]* | '' | 0) echo "repeat: say how often (scripts/repeat.sh 20)" >&2; exit 2 ;;
esac
times=$1
shift
excluded=slow
[ -e /dev/nvidia0 ] || excluded+='|gpu'
[ -x .venv-interop/bin/python ] || excluded+='|interop'

loops=()
trap 'kill "${loops[@]}" 2>/dev/null' EXIT
for _ in 1 2 3 4; do
  while :; do :; done &
  loops+=($!)
done

rm -rf build/repeat
mkdir -p build/repeat
for ((run = 1; run <= times; ++run)); do
  begin=$SECONDS
  if ctest --preset release --parallel "$(($(nproc) + 1))" --label-exclude "^($excluded)\$" --output-on-failure "$@" >"build/repeat/$run.txt" 2>&1; then
    result=passed
    rm "build/repeat/$run.txt"
  else
    # A line is NUMBER:NAME. Without this file, ctest did not get as far as a test.
    failed=build/release/Testing/Temporary/LastTestsFailed.log
    [ "$failed" -nt build/repeat ] || { tail -n 5 "build/repeat/$run.txt" >&2; exit 2; }
    cut -d: -f2- "$failed" >>build/repeat/failed
    result="failed: $(cut -d: -f2- "$failed" | xargs)"
  fi
  echo "run $run of $times, $((SECONDS - begin)) s: $result"
done
[ -e build/repeat/failed ] || { echo "repeat: no failure in $times runs"; exit 0; }
echo "failures in $times runs:"
sort build/repeat/failed | uniq -c | sort -rn
exit 1
