#!/usr/bin/env python3
"""Prints how many lines of each parser the inputs of its fuzz targets reach: those of tests/fuzz/corpus and those kept in build/fuzz/kept.

    scripts/fuzz.sh --coverage [TARGET|all]      builds the programs in build/fuzz-coverage, and calls this script
"""
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/fuzz-coverage"
# Files of which a target runs the parser. Some also write, or open files by name, which no target does.
PARSERS = {
    "safetensors_header": ["io/safetensors.cpp"], "safetensors_file": ["io/safetensors.cpp"], "safetensors_index": ["io/safetensors.cpp"],
    "manifest": ["checkpoint/checkpoint_manifest.cpp"],
    "json_core": ["json/json.cpp"],
    "run_config": ["json/config_reader.cpp", "config/run_config.cpp"],
    "token_file": ["data/token_file.cpp"],
    "tokenizer": ["data/tokenizer.cpp"],
    "bpe_tokenizer": ["text/bpe_tokenizer.cpp", "text/bpe_model.cpp", "text/normalizer.cpp", "text/pretokenizer.cpp", "text/pattern_syntax.cpp", "text/split_pattern.cpp"],
    "examples": ["data/example.cpp", "data/chat_template.cpp"],
    "chat_template": ["text/jinja.cpp", "text/jinja_syntax.cpp", "text/jinja_values.cpp"],
    "hugging_face_config": ["hf/architecture_config.cpp"],
    "quantization_config": ["hf/packed_config.cpp", "hf/mlx.cpp"],
    "gguf_file": ["io/gguf_file.cpp", "hf/gguf_config.cpp", "hf/gguf_reader.cpp"],
    "mlx_folder": ["hf/mlx.cpp"],
    "store_frames": ["job/frames.cpp"],
}


def main():
    targets = sys.argv[1:]
    profiles = []
    for name in targets:
        inputs = [path for path in (ROOT / "build/fuzz/kept" / name, ROOT / "tests/fuzz/corpus" / name) if path.exists()]
        profile = BUILD / f"{name}.profraw"
        subprocess.run([BUILD / f"bin/fuzz_{name}", "-runs=0", *inputs], env={"LLVM_PROFILE_FILE": str(profile)}, check=True, capture_output=True)
        profiles.append(profile)
    merged = BUILD / "all.profdata"
    subprocess.run(["llvm-profdata", "merge", "-sparse", *profiles, "-o", merged], check=True)
    files = {ROOT / "src" / file for name in targets for file in PARSERS[name]}
    binaries = [BUILD / f"bin/fuzz_{name}" for name in targets]
    exported = subprocess.run(["llvm-cov", "export", "-summary-only", f"-instr-profile={merged}", binaries[0], *(f"-object={binary}" for binary in binaries[1:]), *files],
                              check=True, capture_output=True, text=True).stdout
    print("| parser | lines | reached |\n|---|---|---|")
    for entry in sorted(json.loads(exported)["data"][0]["files"], key=lambda entry: entry["filename"]):
        lines = entry["summary"]["lines"]
        print(f"| {Path(entry['filename']).relative_to(ROOT / 'src')} | {lines['count']} | {lines['percent']:.0f} % |")


if __name__ == "__main__":
    main()
