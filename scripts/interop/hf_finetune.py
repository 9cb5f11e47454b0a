#!/usr/bin/env python3
"""Fine-tunes a model of transformers on conversations as docs/huggingface.md does, and lets transformers answer with the export.

    .venv-interop/bin/python scripts/interop/hf_finetune.py --mantissa build/release/bin/mantissa [--small]

The model has the shape of Qwen3, 20M random parameters (--small: 1M), and a tokenizer that tokenizers trained; the data are 1,000 sums as questions and
answers. configs/finetune.json trains it. Checked: the loss on the answers falls below half, verify finds the export equal to the run, and from the export
transformers generates in fp32 what generate does, greedily, 64 tokens or up to the first place where its two likeliest tokens are closer than 1e-3.
Prints what it measured, and exits with 1 if something does not hold.
"""
import argparse
import json
import random
import re
import sys
from pathlib import Path

import torch
import transformers

from hf_bpe import LLAMA3, corpus, of_bytes, split
from mantissa_program import Failed, Mantissa, run_cases

ROOT = Path(__file__).resolve().parents[2]
TOKENS, GAP = 64, 1e-3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
SHAPES = {
    False: {"vocab_size": 4096, "hidden_size": 384, "num_hidden_layers": 9, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1280},
    True: {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384}}


def write_model(folder, shape):
    config = transformers.Qwen3Config(**shape, max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(1)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    _, texts = corpus()
    bare = of_bytes(texts, split(LLAMA3.replace("{1,3}", "")), SPECIAL, size=shape["vocab_size"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|im_end|>")
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_sums(file, count, seed):
    draw, lines = random.Random(seed), []
    for _ in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        messages = [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": f"{a} + {b} = {a + b}"}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    file.write_text("".join(lines))


def loss_of(said):
    found = re.search(r"\| loss ([\d.]+) ", said)
    if not found:
        raise Failed(f"eval tells no loss: {said}")
    return float(found[1])


def greedy(model, ids):
    """The tokens that transformers goes on with, and the lead of each over the next likely one, in log-probability."""
    out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS, eos_token_id=model.end, pad_token_id=0,
                         output_logits=True, return_dict_in_generate=True)
    gaps = [(best := logits[0].topk(2).values)[0].item() - best[1].item() for logits in out.logits]
    return out.sequences[0, len(ids):].tolist(), gaps


def compare_answers(mantissa, export, run, questions):
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    model = transformers.Qwen3ForCausalLM.from_pretrained(export, dtype=torch.float32)
    model.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    compared = 0
    for question in questions:
        asked = mantissa.work / "ask.jsonl"
        asked.write_text(json.dumps({"messages": [{"role": "user", "content": question}]}) + "\n")
        answer = mantissa.run("generate", export, "--chat", asked, "--chat-template", "qwen3", "--temperature", 0, "--max-new-tokens", TOKENS, "--dtype", "fp32")
        prompt = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        theirs, gaps = greedy(model, prompt)
        ours = mantissa.likeliest(export, prompt, TOKENS, "--dtype", "fp32")
        whole = theirs[:-1] if theirs[-1] == model.end else theirs
        sure = next((i for i, gap in enumerate(gaps) if gap < GAP), len(theirs))
        if ours[:sure] != whole[:sure] or (sure == len(theirs) and len(ours) != len(whole)):
            raise Failed(f"{question}: transformers answers {tokenizer.decode(theirs)!r}, mantissa {tokenizer.decode(ours)!r}")
        if answer.strip() != tokenizer.decode(ours, skip_special_tokens=True).strip():
            raise Failed(f"{question}: --chat answers {answer!r}, the ids say {tokenizer.decode(ours)!r}")
        compared += sure
    if compared < 5 * len(questions):
        raise Failed(f"only {compared} tokens could be compared")
    return compared


def finetune(mantissa, small):
    work = mantissa.work
    parameters = write_model(work / "model", SHAPES[small])
    write_sums(work / "chats.jsonl", 1000, 1)
    write_sums(work / "valid.jsonl", 100, 2)
    before = loss_of(mantissa.run("eval", work / "model", "--data", work / "valid.jsonl", "--chat-template", "qwen3"))
    sets = [f"checkpoint.init_from={work / 'model'}", f'data.train=[{{"path": "{work / "chats.jsonl"}"}}]', f'data.valid=[{{"path": "{work / "valid.jsonl"}"}}]',
            f"logging.dir={work / 'run'}", "optimizer.lr=1e-3"]
    mantissa.run("train", ROOT / "configs/finetune.json", *[word for one in sets for word in ("--set", one)])
    after = loss_of(mantissa.run("eval", work / "run"))
    if after >= before / 2:
        raise Failed(f"the loss falls from {before} to {after} only")
    mantissa.run("export", work / "run", "--output", work / "packed", "--weights", "packed")
    mantissa.run("verify", work / "packed", "--against", work / "run")
    mantissa.run("export", work / "run", "--output", work / "export")
    mantissa.run("verify", work / "export", "--against", work / "run")
    questions = [f"What is {a} + {b}?" for a, b in ((12, 7), (99, 99), (3, 50), (8, 1))] + ["Who are you?", "Größe 😀\n?"]
    compared = compare_answers(mantissa, work / "export", work / "run", questions)
    return f"{parameters / 1e6:.1f}M parameters | loss {before:.3f} before, {after:.3f} after | {compared} tokens of {len(questions)} answers as transformers'"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cases = [("fine-tuning", lambda work: finetune(Mantissa(args.mantissa, work), args.small))]
    sys.exit(run_cases(f"transformers {transformers.__version__}", cases))


if __name__ == "__main__":
    main()
