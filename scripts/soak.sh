#!/usr/bin/env bash
# Trains on 4 ranks under random faults and compares every bit with a quiet run:   scripts/soak.sh [--hours H] [--seed S] [--layout tensor|experts]
# All options: --help. It runs in its own namespaces if it may, and says what it leaves out if not. Results: build/soak/. Needs python3, gcc.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p build/soak
gcc -O1 -shared -fPIC -o "build/soak/shim-$$.so" scripts/soak_shim.c -ldl
trap 'rm -f "build/soak/shim-$$.so"' EXIT
own=(--kill-child --mount --net --pid --fork --mount-proc)
[ "$(id -u)" = 0 ] || own+=(--user --map-root-user)
if command -v ip >/dev/null && unshare "${own[@]}" true 2>/dev/null; then
  # The shell is process 1 of the namespace: it waits for whatever a dead launcher leaves.
  unshare "${own[@]}" bash -c 'ip link set lo up && mount -t tmpfs soak /dev/shm && "$@"; exit $?' soak python3 scripts/soak.py --isolated --shim "build/soak/shim-$$.so" "$@"
else
  echo "soak: SKIPPED without the right to make namespaces: the cut network, the full disk that is no shim, leftovers of /dev/shm" >&2
  python3 scripts/soak.py --shim "build/soak/shim-$$.so" "$@"
fi
