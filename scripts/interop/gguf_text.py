"""Cases of llama_served.py with tokenizers: models that learned a text or conversations, ids of random texts, and answers of llama-server."""
import json
import random
from pathlib import Path

import numpy as np

from gguf_cases import HIGH, MOST, MXFP4, PACKED, SIZES, TIE, Errors, emulated, served
from hf_bpe import LLAMA3, Texts, corpus, of_bytes, split
from llama_cpp import Llama, Server
from mantissa_program import Failed

ROOT = Path(__file__).resolve().parents[2]
TEXTS, WINDOWS, WINDOW, ANSWER = 1000, 32, 32, 40
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def learned(mantissa, data, steps, model, precision):
    """The run folder of a model that learned some data."""
    work = mantissa.work
    config = {"model": {**SIZES, "vocab_size": None, "init_std": 0.02, **model}, "data": data, "precision": {"dtype": "bf16", **precision},
              "training": {"steps": steps, "seq_len": 128, "micro_batch_size": 8, "grad_accum": 1, "threads": 1},
              "optimizer": {"lr": 3e-3}, "schedule": {"warmup_steps": min(10, steps - 1)}, "eval": {"interval": 0, "iters": 1, "samples": None},
              "logging": {"dir": str(work / "run")}}
    (work / "run.json").write_text(json.dumps(config))
    mantissa.run("train", work / "run.json")
    return work / "run"


def check_text(mantissa, program):
    """A model that learned some text by byte pairs: log-probabilities of that text, and greedy continuations."""
    text, work = "".join(path.read_text() for path in sorted(ROOT.glob("src/*/*.h"))), mantissa.work
    (work / "text.txt").write_text(text)
    mantissa.run("tokenize", work / "text.txt", "--output", work / "tokenizer.json", "--train-vocab", 512)
    data = {"path": str(work / "text.txt"), "tokenizer": str(work / "tokenizer.json")}
    run = learned(mantissa, data, 400, {"hidden_size": 128, "num_layers": 3, "intermediate_size": 256}, MXFP4)
    packed, mlx, hf = work / "packed.gguf", work / "mlx", work / "hf"
    mantissa.run("export", run, "--output", packed, "--format", "gguf", *PACKED)
    mantissa.run("verify", packed, "--against", run)
    mantissa.run("export", run, "--output", mlx, "--format", "mlx", *PACKED)
    mantissa.run("export", run, "--output", hf)
    ids = mantissa.token_ids(work / "tokenizer.json", [text[-30000:]])[0]
    windows = [ids[at * WINDOW : (at + 1) * WINDOW] for at in range(WINDOWS)]
    ours = np.concatenate(mantissa.log_probabilities(hf, windows, "--dtype", "fp32"))
    errors = Errors(served(program, packed, windows), emulated(mlx, True, windows), ours).check("text", MOST)
    starts = [line[:40] for line in text.splitlines() if len(line) > 60][:200:20]
    equal = 0
    with Llama(program, packed) as llama:
        for start in starts:
            here = mantissa.run("generate", hf, "--prompt", start, "--max-new-tokens", ANSWER, "--temperature", 0, "--dtype", "fp32").removesuffix("\n")
            there = start + llama.continuation(start, ANSWER)
            equal += here.endswith(there)
            if not here.endswith(there) and close_call(mantissa, llama.tokens(here[here.index(start) :]), llama.tokens(there)) > TIE:
                raise Failed(f"llama.cpp goes on as {there!r}, mantissa as {here!r}")
    return f"{len(ours)} tokens, loss {-ours.mean():.3f}: {errors}; greedy continuations of {ANSWER} tokens: {equal} of {len(starts)} are equal, others part at a tie"


def close_call(mantissa, here, there):
    """By how much the log-probabilities of the first tokens that differ do."""
    same = next((i for i, (a, b) in enumerate(zip(here, there)) if a != b), min(len(here), len(there)) - 1)
    first, second = (mantissa.log_probabilities(mantissa.work / "hf", [tokens[: same + 1]], "--dtype", "fp32")[0][-1] for tokens in (here, there))
    return abs(first - second)


def own_tokenizer(mantissa):
    file = mantissa.work / "tokenizer.json"
    mantissa.run("tokenize", ROOT / "README.md", ROOT / "docs/*.md", "--output", file, "--train-vocab", 1000, "--chat-template", "qwen3")
    return file


def theirs(expression):
    """A tokenizer of the package tokenizers that cuts texts by an expression."""
    def made(mantissa):
        file = mantissa.work / "tokenizer.json"
        of_bytes(corpus()[1], split(expression), SPECIAL, size=1000).save(str(file))
        (mantissa.work / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0]}))
        return file
    return made


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TOKENIZERS = {"own": own_tokenizer, "Qwen2's expression": theirs(LLAMA3.replace("{1,3}", "")), "GPT-2's expression": theirs(GPT2)}


def check_tokens(mantissa, program, tokenizer):
    """Ids of random texts: any characters, special tokens and their parts, blanks, digits, other scripts."""
    file, packed = TOKENIZERS[tokenizer](mantissa), mantissa.work / "model.gguf"
    added = [token["content"] for token in json.loads(file.read_text())["added_tokens"]]
    make = Texts(corpus()[0], added, 7)
    texts = ["".join(make.part() for _ in range(make.random.randrange(1, 12))) for _ in range(3 * TEXTS)]
    texts = [text for text in texts if text][:TEXTS]
    (mantissa.work / "some.txt").write_text(corpus()[0][:40000])
    run = learned(mantissa, {"path": str(mantissa.work / "some.txt"), "tokenizer": str(file)}, 2, {"num_layers": 1}, HIGH)
    mantissa.run("export", run, "--output", packed, "--format", "gguf")
    ours = mantissa.token_ids(file, texts)
    with Llama(program, packed) as llama:
        other = [text for text, ids in zip(texts, ours, strict=True) if llama.tokens(text) != ids]
    if other:
        raise Failed(f"{len(other)} of {len(texts)} texts have other ids, the first {other[0]!r}")
    return f"equal ids of {len(texts)} texts, {sum(map(len, ours))} tokens"


def chats(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        yield [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": f"{a} + {b} = {a + b}"}]


def check_server(mantissa, server):
    """A model that learned conversations answers by llama-server as by generate."""
    work = mantissa.work
    tokenizer = own_tokenizer(mantissa)
    for name, seed in (("train", 1), ("valid", 2)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats(1000, seed)))
    data = {"train": [{"path": str(work / "train.jsonl")}], "valid": [{"path": str(work / "valid.jsonl")}], "tokenizer": str(tokenizer), "chat_template": "qwen3"}
    run = learned(mantissa, data, 200, {"hidden_size": 128}, MXFP4)
    questions = [messages[:1] for messages in chats(10, 3)]
    (work / "ask.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in questions))
    outcome = []
    for name, options in (("F32", ("--dtype", "fp32")), ("MXFP4", PACKED)):
        file, hf = work / f"{name}.gguf", work / f"{name}-hf"
        mantissa.run("export", run, "--output", file, "--format", "gguf", *options)
        mantissa.run("export", run, "--output", hf)
        equal = []
        with Server(server, file) as asked:
            for messages in questions:
                (work / "ask.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
                here = mantissa.run("generate", hf, "--chat", work / "ask.jsonl", "--chat-template", "qwen3", "--temperature", 0, "--dtype", "fp32",
                                    "--max-new-tokens", ANSWER)
                there = asked.answer(messages, ANSWER)
                equal.append(here.strip() == there.strip())
                if name == "F32" and not equal[-1]:
                    raise Failed(f"llama-server answers {there!r}, generate {here!r}")
        outcome.append(f"{name} {sum(equal)} of {len(questions)} answers equal")
    return f"{', '.join(outcome)}; the last {there.strip()!r}"
