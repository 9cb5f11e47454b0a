# Functions for scripts of tests that source this with $binary set: two network namespaces, $a and $b, with a cable between them, as two
# hosts.
a=mantissa-a-$$ b=mantissa-b-$$

skip() { echo "SKIPPED: $1"; exit 77; }

# two_hosts_make FILE: FILE takes the reason why it cannot be done; without the right to make namespaces the script ends with 77.
two_hosts_make() {
  command -v ip >/dev/null || skip "no ip (package iproute2)"
  ip netns add "$a" 2>"$1" && ip netns add "$b" && ip link add name cable netns "$a" type veth peer name cable netns "$b" ||
    skip "no network namespaces: $(cat "$1")"
  local host name number
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
  export MANTISSA_SECRET=2a2a2a2a2a2a2a2a2a2a2a2a2a2a2a2a UCX_TLS=tcp,self
}

two_hosts_delete() {
  ip netns delete "$a" 2>/dev/null || true
  ip netns delete "$b" 2>/dev/null || true
}

# two_hosts_node HOST NUMBER WORDS...: two of four ranks on this host, which has a name of its own.
two_hosts_node() {
  local host=$1 number=$2
  shift 2
  ip netns exec "$host" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$host" \
    "$binary" launch --nnodes 2 --node-rank "$number" --nproc-per-node 2 --master-addr 10.77.0.1 --master-port 29555 -- "$@"
}
