#!/usr/bin/env bash
# counted_bytes.sh BINARY: a run counts as sent the bytes that the kernel sees. Four ranks over TCP in a network namespace of their own, 4
# steps and 12: the bytes that lo carried for the 8 steps more, against comm_bytes of these steps. 77 where there can be no namespace.
set -euo pipefail
binary=$1 repository=$PWD work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
skip() { echo "SKIPPED: $1"; exit 77; }
command -v ip >/dev/null || skip "no ip (package iproute2)"
unshare --net true 2>"$work/problem" || skip "no network namespaces: $(cat "$work/problem")"
export UCX_TLS=tcp
cd "$work"

# carried FOLDER STEPS SETS...: bytes that lo of a fresh namespace sent for a run.
carried() {
  local folder=$1 steps=$2
  shift 2
  local words=(launch --nproc-per-node 4 -- train "$repository/configs/shakespeare-mx.json" --set "data.path=$repository/LICENSE"
    --set "logging.dir=$folder" --set "training.steps=$steps" --set logging.interval=1 --set training.micro_batch_size=1
    --set training.grad_accum=null --set training.global_batch_size=4 --set training.threads=1 --set schedule.type=constant
    --set eval.iters=1)
  unshare --net bash -c 'set -e; ip link set lo up; "$@" >&2; awk "\$1 == \"lo:\" { print \$10 }" /proc/net/dev' lo "$binary" "${words[@]}" "$@" \
    2>"$folder.err" || { cat "$folder.err" >&2; exit 1; }
}

compare() {
  local name=$1
  shift
  local short long
  short=$(carried "$name-4" 4 "$@")
  long=$(carried "$name-12" 12 "$@")
  python3 - "$name" "$((long - short))" <<'END'
import json, sys
name, carried = sys.argv[1], int(sys.argv[2]) / 8
steps = [e for e in map(json.loads, open(f"{name}-12/metrics.jsonl")) if e["type"] == "step" and e["step"] > 4]
assert len(steps) == 8, len(steps)
counted = {purpose: sum(e["comm_bytes"][purpose] for e in steps) / 8 for purpose in steps[0]["comm_bytes"]}
total = sum(counted.values())
print(f"{name}: carried {carried:.0f} bytes a step, counted {total:.0f} ({carried / total - 1:+.2%}):", counted)
assert abs(carried / total - 1) <= 0.02, "more than 2% apart"
END
}
compare bf16
compare gather --set precision.recipe=mxfp8 --set precision.fp8_param_gather=true
