#!/usr/bin/env python3
"""Holds the tokenizer.json that mantissa exports for models of bytes and of characters against tokenizers.

    .venv-interop/bin/python scripts/interop/hf_tokenizers.py --mantissa build/release/bin/mantissa

A model is trained for a step on a text, exported and read by transformers, whose tokenizer has to give the ids that training saw, and the text back.
Bytes: of any text. Characters: of those in the training text. Prints a line per tokenizer, and exits with 1 if something differs.
"""
import argparse
import json
import sys

import numpy as np
import transformers

from hf_models import load
from mantissa_files import Checkpoint, encode
from mantissa_program import Failed, Mantissa, run_cases

WORDS = "To be, or not\u00a0to be:\n\tStraße  naïve\r\n 日本語 🙂 \u0301e 'll <|endoftext|> \\u0041 a\u200db  "
CONFIG = {
    "model": {"hidden_size": 32, "num_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64},
    "training": {"steps": 1, "seq_len": 32, "micro_batch_size": 1, "grad_accum": 1, "threads": 1},
    "precision": {"recipe": "high"}, "eval": {"interval": 0, "iters": 1, "samples": None},
}


def samples(alphabet):
    """Texts from an alphabet: the words above, and random ones."""
    generator = np.random.default_rng(6)
    texts = ["".join(generator.choice(alphabet, length)) for length in (1, 2, 5, 20, 200, 2000)]
    return [WORDS, *texts, *alphabet[:50], "".join(alphabet)]


def check(mantissa, kind):
    text, run = mantissa.work / "text", mantissa.work / kind
    text.write_text(WORDS * 40, newline="")
    config = {**CONFIG, "data": {"path": str(text), "tokenizer": kind, "valid_fraction": 0.1}, "logging": {"dir": str(run)}}
    (mantissa.work / f"{kind}.json").write_text(json.dumps(config))
    mantissa.run("train", mantissa.work / f"{kind}.json")
    checkpoint = Checkpoint(run / "checkpoints/step-00000001")
    export = mantissa.work / f"{kind}-export"
    mantissa.run("export", checkpoint.folder, "--output", export)
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(export), load(export)[0]
    if len(tokenizer) > model.config.vocab_size:
        raise Failed(f"{kind}: {len(tokenizer)} tokens, but {model.config.vocab_size} rows")
    alphabet = sorted(set(WORDS)) if kind == "char" else [chr(point) for point in range(0x3000) if not 0xD800 <= point < 0xE000]
    texts = samples(alphabet)
    for sample in texts:
        expected = encode(sample.encode(), checkpoint.manifest["tokenizer"]).tolist()
        found = tokenizer(sample, add_special_tokens=False)["input_ids"]
        if found != expected:
            raise Failed(f"{kind}: {sample[:60]!r} has ids {found[:20]}, not {expected[:20]}")
        back = tokenizer.decode(found, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if back != sample:
            raise Failed(f"{kind}: {sample[:60]!r} comes back as {back[:60]!r}")
    return f"{len(texts)} texts"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cases = [(kind, lambda work, k=kind: check(Mantissa(args.mantissa, work), k)) for kind in ("byte", "char")]
    sys.exit(run_cases(f"transformers {transformers.__version__}", cases))


if __name__ == "__main__":
    main()
