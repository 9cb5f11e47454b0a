#!/usr/bin/env bash
# cut_cable.sh BINARY: the cable between two hosts of two ranks each goes down in the middle of a run (fault table row 10): nobody hears of
# it, and all ranks leave with 6 once heartbeats are missing. 77 where namespaces cannot be made.
set -euo pipefail
binary=$1 repository=$PWD work=$(mktemp -d)
. tests/two_hosts.sh

clean() {
  kill "${first:-}" "${second:-}" 2>/dev/null || true
  two_hosts_delete
  rm -rf "$work"
}
trap clean EXIT
two_hosts_make "$work/problem"

cd "$work"
node() {
  two_hosts_node "$1" "$2" train "$repository/configs/shakespeare-char.json" --set "data.path=$repository/LICENSE" --set logging.dir=run \
    --set training.threads=1 --set training.grad_accum=null --set training.global_batch_size=4 --set training.micro_batch_size=1 \
    --set eval.interval=0 --set eval.samples=null --set parallel.heartbeat_timeout_s=4
}
node "$a" 0 >first.out 2>first.err &
first=$!
node "$b" 1 >second.out 2>second.err &
second=$!
for _ in {1..600}; do grep -q '"step":20,' run/metrics.jsonl 2>/dev/null && break; sleep 0.1; done
grep -q '"step":20,' run/metrics.jsonl || { cat first.err second.err; exit 1; }

ip -n "$a" link set cable down
cut=$SECONDS
for host in first second; do
  code=0
  wait "${!host}" || code=$?
  [ "$code" = 6 ] || { echo "the $host host ended with $code"; cat "$host.err"; exit 1; }
done
echo "all ranks left with 6 within $((SECONDS - cut)) s"
[ $((SECONDS - cut)) -le 300 ] || { echo "of 4 s that heartbeats may be missing"; exit 1; }
grep -h "heartbeat_timeout_s" first.err second.err | head -2
for host in first second; do
  grep -q "sent no heartbeat for 4 s (parallel.heartbeat_timeout_s)\|closed its connection" "$host.err" || { cat "$host.err"; exit 1; }
  grep -q "exit code 6" "$host.err" && ! grep -q "exit code [^6]" "$host.err" || { cat "$host.err"; exit 1; }
done
