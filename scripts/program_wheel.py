#!/usr/bin/env python3
"""Packs an installed program into a wheel that needs neither a compiler nor packages of the system.

    scripts/program_wheel.py PREFIX DIST

PREFIX is where `cmake --install` put the program. The wheel holds it, every library that it links but those of glibc, their licenses, and the
configurations with the texts that they train on. Its platform tag is the newest version of glibc whose symbols one of these asks for. A library
that is not listed here is an error: somebody has to look at its license first. Needs patchelf and readelf, and Debian's files of licenses."""
import argparse
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LICENSES = Path("/usr/share/doc")
# Debian's package of each library, which has its license. UCX lies apart: the system's is taken where there is one.
LIBRARIES = {
    "libpcre2-8.so.0": "libpcre2-8-0", "libspdlog.so.1.10": "libspdlog1.10", "libfmt.so.9": "libfmt9", "libgomp.so.1": "libgomp1",
    "libdnnl.so.2": "libdnnl2", "libcrypto.so.3": "libssl3", "libxxhash.so.0": "libxxhash0", "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1", "libOpenCL.so.1": "ocl-icd-libopencl1", "libnuma.so.1": "libnuma1",
}
UCX = {name: "libucx0" for name in ("libucp.so.0", "libuct.so.0", "libucs.so.0", "libucm.so.0")}
UCX_MODULES = ("libuct_cma.so.0",)  # modules that ask for no library of network cards
GLIBC = re.compile(r"(linux-vdso|ld-linux-x86-64|libc|libm|libdl|librt|libpthread)\.so")
MOST_BYTES = 60 << 20


def output(*command) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def linked(program: Path) -> dict[str, Path]:
    """Libraries that the loader finds for the program, by name, without those of glibc."""
    found = {}
    for line in output("ldd", program).splitlines():
        name, _, path = line.strip().partition(" => ")
        name = name.split(" ")[0]
        if GLIBC.match(Path(name).name):
            continue
        if path.startswith("not found"):
            sys.exit(f"program_wheel: {program} links {name}, which the loader does not find")
        found[name] = Path(path.split(" (")[0])
    unknown = sorted(name for name in found if name not in LIBRARIES and name not in UCX)
    if unknown:
        sys.exit(f"program_wheel: {program} links {', '.join(unknown)}: look at the license and add it to LIBRARIES in {Path(__file__).name}")
    return found


def add_library(source: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to)
    to.chmod(0o755)


def newest_glibc(files) -> int:
    """Minor version of the newest glibc 2.x whose symbols these files ask for."""
    versions = [int(minor) for file in files for minor in re.findall(r"Name: GLIBC_2\.(\d+)", output("readelf", "-VW", file))]
    return max(versions)


def stage(prefix: Path, root: Path, name: str) -> list[Path]:
    """Fills the folder `root` with what the wheel holds but its metadata; returns its programs and libraries."""
    package = root / "mantissa"
    shutil.copytree(ROOT / "python" / "program" / "mantissa", package, ignore=shutil.ignore_patterns("__pycache__"))
    program = package / "bin" / "mantissa"
    program.parent.mkdir()
    subprocess.run(["strip", "-o", program, prefix / "bin" / "mantissa"], check=True)
    # DT_RPATH, not DT_RUNPATH: it holds for the libraries of libraries, too.
    subprocess.run(["patchelf", "--force-rpath", "--set-rpath", "$ORIGIN/../lib", program], check=True)
    binaries, packages = [program], set()
    libraries = linked(prefix / "bin" / "mantissa")
    for library, path in libraries.items():
        to = package / "lib" / ("ucx" if library in UCX else "") / library
        add_library(path, to)
        binaries.append(to)
        packages.add(LIBRARIES.get(library) or UCX[library])
    if "libuct.so.0" in libraries:
        for module in UCX_MODULES:
            to = package / "lib" / "ucx" / "ucx" / module
            add_library(libraries["libuct.so.0"].resolve().parent / "ucx" / module, to)
            (to.parent / module.removesuffix(".0")).write_bytes(to.read_bytes())  # UCX opens it by this name
            binaries.append(to)
    licenses = root / f"{name}.dist-info" / "licenses"
    licenses.mkdir(parents=True)
    shutil.copyfile(ROOT / "LICENSE", licenses / "LICENSE")
    for each in sorted(packages):
        text = LICENSES / each / "copyright"
        if not text.exists():
            sys.exit(f"program_wheel: no {text}; a wheel needs the licenses of its libraries: build it where Debian's packages have their documents")
        shutil.copyfile(text, licenses / f"{each}.txt")
    shutil.copytree(prefix / "share" / "mantissa", root / f"{name}.data" / "data" / "share" / "mantissa")
    return binaries


def write_metadata(folder: Path, version: str, tag: str) -> None:
    (folder / "METADATA").write_text(f"""Metadata-Version: 2.1
Name: mantissa
Version: {version}
Summary: Trainer for GPT and mixture-of-experts models in MXFP8 and MXFP4, whose exports are the weights that training multiplied by
License: Apache-2.0
Requires-Python: >=3.9
Provides-Extra: cuda
Requires-Dist: nvidia-cublas<14,>=13; extra == 'cuda'
Requires-Dist: nvidia-nccl-cu13; extra == 'cuda'
Description-Content-Type: text/markdown

{(ROOT / "python" / "program" / "README.md").read_text()}""")
    (folder / "WHEEL").write_text(f"Wheel-Version: 1.0\nGenerator: mantissa\nRoot-Is-Purelib: false\nTag: {tag}\n")
    (folder / "entry_points.txt").write_text("[console_scripts]\nmantissa = mantissa.__main__:main\n")


def write_zip(root: Path, wheel: Path, record: str) -> None:
    """Writes the files of `root` in order, with fixed times, and the list of their hashes last."""
    lines = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as out:
        for path in sorted(file for file in root.rglob("*") if file.is_file()):
            name, content = path.relative_to(root).as_posix(), path.read_bytes()
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100755 if os.access(path, os.X_OK) else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(entry, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}")
        out.writestr(zipfile.ZipInfo(record), "\n".join([*lines, f"{record},,"]) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("prefix", type=Path)
    p.add_argument("dist", type=Path)
    args = p.parse_args()
    for tool in ("patchelf", "readelf", "strip"):
        if not shutil.which(tool):
            print(f"program_wheel: no {tool}; install it: apt-get install patchelf binutils", file=sys.stderr)
            sys.exit(3)
    version = output(args.prefix / "bin" / "mantissa", "--version").split()[1]
    name = f"mantissa-{version}"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        binaries = stage(args.prefix, root, name)
        tag = f"py3-none-manylinux_2_{newest_glibc(binaries)}_x86_64"
        write_metadata(root / f"{name}.dist-info", version, tag)
        args.dist.mkdir(parents=True, exist_ok=True)
        wheel = args.dist / f"{name}-{tag}.whl"
        write_zip(root, wheel, f"{name}.dist-info/RECORD")
    size = wheel.stat().st_size
    print(f"{wheel}: {size / 2**20:.1f} MiB")
    if size > MOST_BYTES:
        sys.exit(f"program_wheel: more than {MOST_BYTES >> 20} MiB")


if __name__ == "__main__":
    main()
