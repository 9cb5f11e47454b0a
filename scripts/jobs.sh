# Sets $jobs for the scripts that source this: so many compilers at a time, one per core as far as memory allows (3 GiB each).
jobs=$(awk -v cores="$(nproc)" '/^MemAvailable:/ { fit = int($2 / 3145728); print fit < 1 ? 1 : fit < cores ? fit : cores }' /proc/meminfo)
