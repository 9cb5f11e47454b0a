#!/usr/bin/env bash
# two_hosts.sh BINARY: two network namespaces with a cable between them stand for two hosts of two ranks each; the run has the losses and
# weights of one process. 77 where namespaces cannot be made.
set -euo pipefail
binary=$1 repository=$PWD work=$(mktemp -d)
. tests/four_ranks.sh
. tests/two_hosts.sh

clean() {
  kill "${first:-}" 2>/dev/null || true
  two_hosts_delete
  rm -rf "$work"
}
trap clean EXIT
two_hosts_make "$work/problem"

cd "$work"
node() { four_ranks_run hosts two_hosts_node "$1" "$2"; }

four_ranks_run alone "$binary" >alone.out
node "$a" 0 >first.out 2>first.err &
first=$!
node "$b" 1 >second.out 2>second.err || { cat first.err second.err; exit 1; }
wait "$first" || { cat first.err second.err; exit 1; }

require_same_run alone hosts
# In each of 10 steps both ranks of a host send half of the other's quarter of the 0.8M gradients, as sums of both, and their own quarter of
# the weights once, in fp32; a direct exchange would send twice as much.
sent=$(ip netns exec "$a" cat /proc/net/dev | awk '$1 == "cable:" { print $10 }')
echo "sent by the first host: $sent bytes"
[ "$sent" -gt 32000000 ] && [ "$sent" -lt 40000000 ] || { echo "that is not between 32 and 40 million"; exit 1; }
