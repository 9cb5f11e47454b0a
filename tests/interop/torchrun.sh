#!/usr/bin/env bash
# torchrun.sh BINARY: four ranks that torchrun starts have the losses and weights of one process. Skipped without .venv-interop.
set -euo pipefail
binary=$1 repository=$PWD work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
. tests/four_ranks.sh
torchrun=$repository/.venv-interop/bin/torchrun
[ -x "$torchrun" ] || { echo "SKIPPED: no .venv-interop; scripts/interop/setup.sh makes it"; exit 77; }

cd "$work"
four_ranks_run alone "$binary" >alone.out
four_ranks_run ranks "$torchrun" --standalone --no-python --nproc-per-node 4 "$binary" >ranks.out 2>ranks.err || { cat ranks.err; exit 1; }
require_same_run alone ranks
