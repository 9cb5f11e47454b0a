#!/usr/bin/env python3
"""Holds mantissa's reading of tokenizer.json against tokenizers: ids of random texts, whole and in parts, and texts of random ids.

    .venv-interop/bin/python scripts/interop/hf_bpe.py --mantissa build/release/bin/mantissa [--strings 100000] [--seed 1] [--speed] [FILE ...]

tokenizers trains the vocabularies of the families GPT-2, Llama 3, Qwen, o200k and Llama 2 on the sources of mantissa; FILEs are read besides them, or
with --only-files alone. Texts are encoded by the program tokenize_frames beside mantissa. --speed times both on documents of 100 KB, which `mantissa
tokenize` reads and writes. Prints a line per tokenizer, and exits with 1 if something differs.
"""
import argparse
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = Path(__file__).resolve().parents[2]
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = "|".join([CASED % ("*", "+"), CASED % ("+", "*"), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
OTHER_SCRIPTS = "Größe naïve café Ελληνικά русский язык 中文字符測試 日本語テスト 한국어 العربية עברית हिन्दी ไทย 😀👩‍👩‍👧‍👦🏳️‍🌈 1234 ½ ² Ⅷ\n" * 200
BLANKS = [" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2003", "\u0085", "\u180e", "\u200b", "\u2028", " \n ", "\x0b"]
WORDS = ["'s", "'S", "'ll", "'LL", "'ſ", "'re", " 'd", "n't", " the", " word", "İstanbul", "ŒUVRE", "▁x", "▁", "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪"]
POINTS = [point for point in range(0x110000) if not 0xD800 <= point <= 0xDFFF]
ASSIGNED = [point for point in POINTS if unicodedata.category(chr(point)) != "Cn"]  # in this Python's version of Unicode


def corpus():
    text = "".join(path.read_text(errors="ignore") for path in sorted((ROOT / "src").glob("*/*.cpp"))[:80]) + OTHER_SCRIPTS
    return text, [text[at:at + 2000] for at in range(0, len(text), 2000)]


def of_bytes(texts, pre_tokenizer, specials, normalizer=None, ignore_merges=False, size=3000):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                                             show_progress=False, special_tokens=specials))
    return tokenizer


def split(pattern):
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])


def llama2(texts, first):
    """Bytes for characters without a token, and spaces as ▁: by a normalizer, or by Metaspace as newer files have it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=3000, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]))
    content = json.loads(tokenizer.to_str())
    for byte in range(256):
        content["model"]["vocab"][f"<0x{byte:02X}>"] = len(content["model"]["vocab"])
    content["decoder"] = {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                                                          {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False} if first else None
    if not first:
        content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                                                                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    return Tokenizer.from_str(json.dumps(content))


def families(texts):
    yield "gpt2", of_bytes(texts, pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])
    llama = of_bytes(texts, split(LLAMA3), ["<|begin_of_text|>", "<|end_of_text|>"], ignore_merges=True)
    llama.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)])
    yield "llama3", llama
    qwen = of_bytes(texts, split(LLAMA3.replace("{1,3}", "")), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizers.NFC())
    qwen.add_tokens(["<think>", "</think>", AddedToken("<tool_call>", normalized=False)])
    yield "qwen", qwen
    yield "o200k", of_bytes(texts, split(O200K), ["<|startoftext|>", "<|endoftext|>", "<|return|>"])
    yield "llama2", llama2(texts, False)
    yield "tinyllama", llama2(texts, True)


class Texts:
    def __init__(self, text, added, seed):
        self.text, self.added, self.random = text, added or ["x"], random.Random(seed)

    def part(self):
        pick, count = self.random.choice, self.random.randrange
        start = count(len(self.text) - 40)
        token = pick(self.added)
        return pick([lambda: chr(pick(ASSIGNED)), lambda: self.text[start:start + count(1, 40)], lambda: pick(BLANKS) * count(1, 4),
                     lambda: "".join(pick("0123456789²½Ⅷ٣") for _ in range(count(1, 7))), lambda: pick(WORDS), lambda: token, lambda: token[:count(len(token))],
                     lambda: "".join(pick("!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~«»…—") for _ in range(count(1, 5))),
                     lambda: unicodedata.normalize("NFD", pick(["é", "ñ", "Å", "한국", "ộ", "ǖ", "naïve"])),
                     lambda: "".join(chr(pick(ASSIGNED)) for _ in range(count(1, 6))), lambda: pick("abcXYZ") * count(1, 100),
                     lambda: chr(count(128))])()

    def make(self, count):
        long = ["a" * (1 << 20), " " * (1 << 20), "".join(map(chr, POINTS)), " \n" * 1000]
        return long + ["".join(self.part() for _ in range(self.random.randrange(1, 12))) for _ in range(count)]


class Frames:
    """The answers of tokenize_frames: the ids of a string, the string of ids."""

    def __init__(self, program):
        self.program = program

    def ask(self, file, window, frames):
        sent = b"".join(kind + struct.pack("<I", len(content)) + content for kind, content in frames)
        ran = subprocess.run([self.program, str(file), str(window)], input=sent, capture_output=True, check=False)
        if ran.returncode:
            sys.exit(f"tokenize_frames {file}: {ran.stderr.decode()}")
        answers, at = [], 0
        while at < len(ran.stdout):
            length, = struct.unpack_from("<I", ran.stdout, at)
            answers.append(ran.stdout[at + 4:at + 4 + length])
            at += 4 + length
        return answers

    def encode(self, file, window, texts):
        answers = self.ask(file, window, [(b"e", text.encode()) for text in texts])
        return [list(struct.unpack(f"<{len(answer) // 4}i", answer)) for answer in answers]

    def decode(self, file, lists):
        return [answer.decode() for answer in self.ask(file, 0, [(b"d", struct.pack(f"<{len(ids)}i", *ids)) for ids in lists])]


def differences(found, expected, what):
    wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    for i in wrong[:3]:
        print(f"  {what} {i}: {str(found[i])[:150]} is not {str(expected[i])[:150]}")
    return len(wrong)


def returns_texts(tokenizer):
    """Returns true if decoding gives the text, or its NFC."""
    return isinstance(tokenizer.decoder, decoders.ByteLevel) and (tokenizer.normalizer is None or isinstance(tokenizer.normalizer, normalizers.NFC))


def check(frames, name, file, text, arguments):
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    texts = Texts(text, added, arguments.seed).make(arguments.strings)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    wrong = differences(frames.encode(file, 0, texts), ids, "text")
    for window in (1, 7, 4096, 1 << 20):
        some = texts[:2000]
        wrong += differences(frames.encode(file, window, some), ids[:len(some)], f"in parts of {window}, text")
    size = tokenizer.get_vocab_size()
    lists = ids + [[random.Random(i).randrange(size + 3) for _ in range(1 + i % 12)] for i in range(5000)]
    decoded = frames.decode(file, lists)
    wrong += differences(decoded, [tokenizer.decode(one) for one in lists], "ids")
    if returns_texts(tokenizer):
        plain = [i for i, one in enumerate(texts) if not any(token in one for token in added)]
        expected = [tokenizer.normalizer.normalize_str(texts[i]) if tokenizer.normalizer else texts[i] for i in plain]
        wrong += differences([decoded[i] for i in plain], expected, "there and back, text")
    print(f"{name}: {len(texts)} texts, {len(lists)} lists of ids, {wrong} different", flush=True)
    return wrong


def speed(mantissa, name, file, text):
    """Documents of 100 KB: tokenizers encodes them on one thread, `mantissa tokenize` makes token files of them on one and two. Prints the ratios."""
    tokenizer = Tokenizer.from_file(str(file))
    long = text * (1 + 8_000_000 // len(text))
    documents = [long[at:at + 100_000] for at in range(0, len(long), 100_000)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    theirs = min(timed(lambda: [tokenizer.encode(document, add_special_tokens=False) for document in documents]) for _ in range(2))
    ours = {}
    with tempfile.TemporaryDirectory() as folder:
        for threads in (1, 2):
            base = min(tokenized(mantissa, file, ["a"], Path(folder), threads) for _ in range(3))
            ours[threads] = min(tokenized(mantissa, file, documents, Path(folder), threads) for _ in range(2)) - base
    print(f"{name}: tokenizers {len(long) / theirs / 1e6:.1f} MB/s; mantissa {theirs / ours[1]:.2f} of that on one thread, {theirs / ours[2]:.2f} on two", flush=True)


def tokenized(mantissa, file, documents, folder, threads):
    """Seconds of the command, which takes as many threads as it has cores."""
    source, out = folder / "documents.jsonl", folder / "tokens"
    source.write_text("".join(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents))
    for old in folder.glob("tokens.*"):
        old.unlink()
    cores = sorted(os.sched_getaffinity(0))[:threads]
    command = [mantissa, "tokenize", "--tokenizer", file, "--output", out, source]
    return timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, cores)))


def timed(action):
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mantissa", required=True, type=Path)
    parser.add_argument("--strings", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--only-files", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    arguments = parser.parse_args()
    frames, wrong = Frames(arguments.mantissa.resolve().parent / "tokenize_frames"), 0
    text, texts = corpus()
    with tempfile.TemporaryDirectory() as folder:
        named = [(file.name, file) for file in arguments.files]
        for name, tokenizer in [] if arguments.only_files else families(texts):
            file = Path(folder) / f"{name}.json"
            tokenizer.save(str(file))
            named.append((name, file))
        for name, file in named:
            wrong += check(frames, name, file, text, arguments)
            if arguments.speed:
                speed(arguments.mantissa, name, file, text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
