#!/usr/bin/env python3
"""Holds mantissa's tokenizers against those of published models, with the vocabularies that two packages of PyPI carry.

    python -m pip download --no-deps --dest wheels llama-models==0.3.0 mistral-common==1.13.1
    python -m pip install tokenizers==0.23.3 tiktoken sentencepiece
    python scripts/interop/real_vocabularies.py --mantissa build/release/bin/mantissa --wheels wheels [--strings 5000]

Llama 3, Llama 4 and Mistral's tekken are ranks of tiktoken, which then encodes the texts to compare with; Mistral v1 and v3 are models of SentencePiece. A
tokenizer.json is made of each as transformers' converters do: what two tokens a rank merges follows from the ranks below it. Long runs of spaces lose
something in that: the ids of SentencePiece are others than those of tokenizers, which mantissa's must then equal. Prints a line per vocabulary, and exits
with 1 if ids or decoded strings differ.
"""
import argparse
import base64
import json
import sys
import tempfile
import zipfile
from pathlib import Path

import sentencepiece
import tiktoken
from tokenizers import Tokenizer

from hf_bpe import LLAMA3, O200K, Frames, Texts, corpus, differences

BOS = "<|begin_of_text|>"


def byte_letters():
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {**{byte: chr(byte) for byte in own}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


LETTERS = byte_letters()


def letters(token):
    return "".join(LETTERS[byte] for byte in token)


def merged_by_lower_ranks(ranks, token, rank):
    parts = [bytes([byte]) for byte in token]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if ranks.get(a + b, rank) < rank]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]


def of_ranks(ranks, pattern, special, first_id):
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = merged_by_lower_ranks(ranks, token, rank) if len(token) > 1 else []
        if len(parts) == 2:
            merges.append([letters(parts[0]), letters(parts[1])])
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"version": "1.0", "added_tokens": added(special), "normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "ignore_merges": True, "vocab": {letters(token): rank + first_id for token, rank in ranks.items()}, "merges": merges}}


def added(special):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": number, "content": content, **flags} for content, number in special.items()]


def of_pieces(model):
    vocab, merges = {model.id_to_piece(i): i for i in range(model.vocab_size())}, []
    for piece, i in vocab.items():
        if len(piece) < 2 or model.is_byte(i) or model.is_control(i) or model.is_unknown(i):
            continue
        halves = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        merges += [(-model.get_score(i), vocab[a], vocab[b], [a, b]) for a, b in halves if a in vocab and b in vocab]
    replace = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    back = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    return {"version": "1.0", "added_tokens": added({model.id_to_piece(i): i for i in range(3)}), "pre_tokenizer": None, "post_processor": None,
            "normalizer": {"type": "Sequence", "normalizers": replace}, "decoder": {"type": "Sequence", "decoders": back},
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
                      "merges": [pair for *_, pair in sorted(merges, key=lambda merge: merge[:3])]}}


def llama(wheel, name, pattern):
    lines = wheel.read(f"llama_models/{name}/tokenizer.model").splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    special = {BOS: len(ranks)}
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return of_ranks(ranks, pattern, special, 0), lambda text: encoding.encode(text, allowed_special="all"), lambda ids: encoding.decode(ids).replace(BOS, "")


def tekken(wheel, name):
    content = json.loads(wheel.read(f"mistral_common/data/{name}.json"))
    config = content["config"]
    first = config["default_num_special_tokens"]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"][:config["default_vocab_size"] - first]}
    encoding = tiktoken.Encoding(name, pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={})
    return (of_ranks(ranks, config["pattern"], {}, first), lambda text: [first + i for i in encoding.encode(text, disallowed_special=())],
            lambda ids: encoding.decode([i - first for i in ids]))


def pieces(wheel, name):
    model = sentencepiece.SentencePieceProcessor(model_proto=wheel.read(f"mistral_common/data/{name}"))
    return of_pieces(model), model.encode, model.decode


def vocabularies(wheels):
    """Name, the length of a string from which on the reference fails or takes too long, tokenizer.json, encode(), decode()."""
    wheel = zipfile.ZipFile(next(wheels.glob("llama_models-*.whl")))
    yield "llama3", 500_000, *llama(wheel, "llama3", LLAMA3)
    yield "llama4", 500_000, *llama(wheel, "llama4", O200K)
    wheel = zipfile.ZipFile(next(wheels.glob("mistral_common-*.whl")))
    for name in ("tekken_240718", "tekken_240911"):
        yield name, 500_000, *tekken(wheel, name)
    for name in ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"):
        yield name, 100_000, *pieces(wheel, name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, type=Path)
    parser.add_argument("--wheels", required=True, type=Path)
    parser.add_argument("--strings", type=int, default=5000)
    arguments = parser.parse_args()
    frames, wrong = Frames(arguments.mantissa.resolve().parent / "tokenize_frames"), 0
    texts = Texts(corpus()[0], [BOS], 1).make(arguments.strings)
    with tempfile.TemporaryDirectory() as folder:
        for name, longest, content, encode, decode in vocabularies(arguments.wheels):
            file = Path(folder) / f"{name}.json"
            file.write_text(json.dumps(content, ensure_ascii=False))
            some = [text for text in texts if len(text) < longest]
            ids = [encode(text) for text in some]
            ours, converted = frames.encode(file, 0, some), Tokenizer.from_file(str(file))
            as_converted = {i for i, text in enumerate(some) if ours[i] != ids[i] and ours[i] == converted.encode(text, add_special_tokens=False).ids}
            found = differences([ids[i] if i in as_converted else one for i, one in enumerate(ours)], ids, "text")
            found += differences(frames.decode(file, ids), [decode(one) for one in ids], "ids")
            print(f"{name}: {len(content['model']['vocab'])} tokens, {len(some)} texts, {found} different, {len(as_converted)} only from what was converted", flush=True)
            wrong += found
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
