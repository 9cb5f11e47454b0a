#!/usr/bin/env bash
# killed_start.sh BINARY: a launcher that is killed while UCX makes the segments of its ranks leaves them in /dev/shm; the next start removes
# them, and leaves one that a process of the same user has mapped. 77 where there may be no /dev/shm of its own, or no strace.
set -euo pipefail
if [ "${2:-}" != inside ]; then
  unshare -rm sh -c 'mount -t tmpfs none /dev/shm && strace -o /dev/null true' 2>/dev/null ||
    { echo "SKIPPED: no /dev/shm of its own (unshare -rm), or no strace"; exit 77; }
  exec unshare -rm "$0" "$1" inside
fi
mount -t tmpfs none /dev/shm  # ranks of other tests would remove what is left
binary=$1 repository=$PWD work=$(mktemp -d) strace='' mapper=''
trap 'kill -9 $strace $mapper 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"
train=(launch --nproc-per-node 2 -- train "$repository/configs/shakespeare-char.json" --set "data.path=$repository/LICENSE" --set training.steps=2
  --set training.threads=1 --set training.seq_len=32 --set training.micro_batch_size=1 --set eval.interval=0 --set eval.samples=null)

# Ranks stay where they are about to take away the name of a segment.
strace -f -o /dev/null -e trace=unlink -e inject=unlink:delay_enter=250s \
  sh -c 'echo $$ > launcher; exec "$@"' sh "$binary" "${train[@]}" --set logging.dir=killed >killed.out 2>&1 &
strace=$!
for _ in {1..6000}; do [ -z "$(find /dev/shm -name 'ucx_shm_posix_*' -size +0)" ] || break; sleep 0.01; done
launcher=$(cat launcher)
read -ra ranks <"/proc/$launcher/task/$launcher/children" || true  # a line without an end
kill -9 "$launcher" "${ranks[@]}"  # ranks also here, because they die with their launcher at a time of the kernel's choosing
kill -9 "$strace" 2>/dev/null || true  # not before: ranks that strace releases alive remove the name
for rank in "${ranks[@]}"; do while kill -0 "$rank" 2>/dev/null; do sleep 0.01; done; done
left=$(find /dev/shm -name 'ucx_shm_posix_*' -size +0)
[ -n "$left" ] || { echo "nothing was left"; cat killed.out; exit 1; }

mapped=/dev/shm/ucx_shm_posix_12345678
python3 -c "
import mmap, time
with open('$mapped', 'w+b') as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
open('mapped', 'w').close()
time.sleep(600)" &
mapper=$!
for _ in {1..6000}; do [ ! -e mapped ] || break; sleep 0.01; done
"$binary" "${train[@]}" --set logging.dir=next >next.out 2>&1 || { cat next.out; exit 1; }
[ "$(find /dev/shm -name 'ucx_shm_posix_*' -size +0)" = "$mapped" ] || { ls -l /dev/shm; exit 1; }
grep "/dev/shm: removed [12] segments\? of UCX" next/log.txt
