#!/usr/bin/env bash
# two_hosts.sh BINARY: two network namespaces with a cable between them stand for two hosts of two ranks each; the run has the losses and
# weights of one process. 77 where namespaces cannot be made.
set -euo pipefail
binary=$1 repository=$PWD work=$(mktemp -d) a=mantissa-a-$$ b=mantissa-b-$$
. tests/four_ranks.sh

clean() {
  kill "${first:-}" 2>/dev/null || true
  ip netns delete "$a" 2>/dev/null || true
  ip netns delete "$b" 2>/dev/null || true
  rm -rf "$work"
}
trap clean EXIT
skip() { echo "SKIPPED: $1"; exit 77; }
command -v ip >/dev/null || skip "no ip (package iproute2)"
ip netns add "$a" 2>"$work/problem" && ip netns add "$b" && ip link add name cable netns "$a" type veth peer name cable netns "$b" ||
  skip "no network namespaces: $(cat "$work/problem")"
for host in "$a 1" "$b 2"; do
  read -r name number <<<"$host"
  ip -n "$name" link set lo up
  ip -n "$name" address add "10.77.0.$number/24" dev cable
  ip -n "$name" link set cable up
done
# The kernel notices a cable within a second or so, and UCX takes an interface only then.
for host in "$a" "$b"; do
  for _ in {1..300}; do ip -n "$host" link show cable | grep -q 'state UP' && break; sleep 0.1; done
done

export MANTISSA_TOKEN=2a2a2a2a2a2a2a2a2a2a2a2a2a2a2a2a UCX_TLS=tcp,self
cd "$work"
node() { four_ranks_run hosts ip netns exec "$1" "$binary" launch --nnodes 2 --node-rank "$2" --nproc-per-node 2 --master-addr 10.77.0.1 --master-port 29555 --; }

four_ranks_run alone "$binary" >alone.out
node "$a" 0 >first.out 2>first.err &
first=$!
node "$b" 1 >second.out 2>second.err || { cat first.err second.err; exit 1; }
wait "$first" || { cat first.err second.err; exit 1; }

require_same_run alone hosts
# In each of 10 steps both ranks of a host send a quarter of the 0.8M gradients and of the weights, in fp32, to either rank of the other.
sent=$(ip netns exec "$a" cat /proc/net/dev | awk '$1 == "cable:" { print $10 }')
echo "sent by the first host: $sent bytes"
[ "$sent" -gt 64000000 ] || { echo "that is too little"; exit 1; }
