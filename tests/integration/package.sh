#!/usr/bin/env bash
# The Debian packages that CPACK makes of this build, in the new folder WORK: unpacked, the program's package works and nothing is
# missing that Debian asks for. Exit code 77: this system has no dpkg, or the build no help2man.
#   package.sh CPACK WORK
set -euo pipefail
cpack=$1 work=$2
skip() { echo "SKIPPED: $1"; exit 77; }
wrong() { echo "package: $1" >&2; exit 1; }
command -v dpkg-deb >/dev/null && command -v dpkg-shlibdeps >/dev/null || skip "no dpkg-deb or dpkg-shlibdeps (package dpkg-dev)"
command -v readelf >/dev/null || skip "no readelf (package binutils)"
command -v help2man >/dev/null && [ -d man ] || skip "built without help2man"

rm -rf "$work" && mkdir -p "$work"
"$cpack" -G DEB -D CPACK_DEBIAN_COMPRESSION_TYPE=zstd -B "$work" >"$work/cpack.log" || { cat "$work/cpack.log"; exit 1; }
dpkg-deb -x "$work"/mantissa_*.deb "$work/program"
dpkg-deb -x "$work"/mantissa-dev_*.deb "$work/development"
share=$work/program/usr/share mantissa=$work/program/usr/bin/mantissa

! find "$work/program" -name '*.a' | grep . || wrong "the program's package has a library"
[ -f "$work/development/usr/include/mantissa/train/train.h" ] || wrong "mantissa-dev has no headers"
! readelf -S "$mantissa" | grep -F .symtab || wrong "the program is not stripped"
readelf -hWld --dyn-syms "$mantissa" >"$work/elf"
for protection in 'Type: *DYN' GNU_RELRO 'BIND_NOW\|FLAGS.*NOW' __stack_chk_fail __memcpy_chk; do
  grep -q -e "$protection" "$work/elf" || wrong "the program lacks the protection $protection"
done
for package in mantissa:program mantissa-dev:development; do
  doc=$work/${package#*:}/usr/share/doc/${package%:*}
  grep -q '^License: Apache-2.0' "$doc/copyright" || wrong "$doc/copyright"
  zcat "$doc/changelog.gz" | grep -q '^mantissa (' || wrong "$doc/changelog.gz"
done

pages=$(grep -o '](docs/[a-z-]*\.md)' "$share/doc/mantissa/README.md" | tr -d '()]')
[ "$(wc -w <<<"$pages")" -ge 10 ] || wrong "pages that the README links to: $pages"
for page in $pages; do [ -f "$share/doc/mantissa/$page" ] || wrong "$page is missing beside the README"; done
[ -f "$share/doc/mantissa/docs/pictures/weight.svg" ] || wrong "the picture of the README is missing"

commands=$("$mantissa" --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z]*\) .*/\1/p')
[ "$(wc -w <<<"$commands")" -gt 10 ] || wrong "subcommands: $commands"
for command in $commands; do
  zcat "$share/man/man1/mantissa-$command.1.gz" | grep -q "^mantissa-$command " || wrong "manual page of mantissa $command"
done

# Completes `mantissa WORDS...` as bash does.
. "$share/bash-completion/completions/mantissa"
completed() {
  COMP_WORDS=("$mantissa" "$@") COMP_CWORD=$# COMPREPLY=()
  _mantissa
  echo "${COMPREPLY[*]}"
}
[ "$(completed ex)" = "export explain" ] || wrong "completion of ex: $(completed ex)"
[ "$(completed train --dry)" = --dry-run ] || wrong "completion of train --dry: $(completed train --dry)"
[ "$(completed launch --nnodes 1 --node_)" = --node_rank ] || wrong "completion of launch --node_: $(completed launch --nnodes 1 --node_)"

# Configurations whose data is the program's own source find it beside them.
for config in "$share"/mantissa/configs/*.json; do
  grep -q '"\.\./src/' "$config" || continue
  "$mantissa" train "$config" --dry-run --set logging.dir="$work/runs" >"$work/dry_run.log" || wrong "$config does not start"
done
if command -v lintian >/dev/null; then lintian --allow-root --fail-on error "$work"/*.deb; fi
rm -rf "$work"
