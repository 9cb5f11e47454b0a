#!/usr/bin/env bash
# scripts/setup.sh [LIST]: installs the packages of LIST (scripts/packages.txt) that are missing, with apt-get. Does nothing, and needs no
# network, when all are there.
set -euo pipefail
list=${1:-$(dirname "${BASH_SOURCE[0]}")/packages.txt}
mapfile -t packages < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' "$list")

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  echo "setup: this system has no apt-get. Install the counterparts of these Debian packages, then build with CMake:" >&2
  printf '  %s\n' "${packages[@]}" >&2
  exit 3
fi

missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || { echo "setup: all ${#packages[@]} packages are installed"; exit 0; }
echo "setup: installing ${missing[*]}"

root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "setup: run as root, or install sudo; missing: ${missing[*]}" >&2; exit 3; }
  root=(sudo)
fi
apt() { "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q "$@"; }
install() { apt install -y --no-install-recommends "${missing[@]}"; }

# The package index may be absent (a new container) or older than the mirror: fetch it only then.
if ! apt install -s --no-install-recommends "${missing[@]}" >/dev/null 2>&1; then
  apt update
  install
else
  install || { apt update; install; }
fi
