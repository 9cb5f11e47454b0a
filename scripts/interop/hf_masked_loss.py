#!/usr/bin/env python3
"""Holds the loss of fine-tuning data against transformers, and the masks of chat_tokens.py against those expected.

    .venv-interop/bin/python scripts/interop/hf_masked_loss.py --mantissa build/release/bin/mantissa

Examples of tokens and masks train a random model of transformers for a step, once packed into long rows and once one a row. transformers reads each
example alone, with labels of -100 where the mask is 0; its loss is the sum of all over the number of labels. Losses agree to 1e-6, gradients to 1e-3
of their root mean square, and the loss that eval tells to the digits that it prints. Prints a line per case, and exits with 1 if something differs.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hf_gradients import as_mantissa
from hf_models import make, pairwise
from hf_parity import gradients_apart
from mantissa_files import Checkpoint
from mantissa_program import Failed, Mantissa, run_cases

LOSS, GRADIENT = 1e-6, 1e-3  # tolerances
SEQ_LEN = 64
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}OPEN{{ m.content + '<|im_end|>' }}CLOSE"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# Templates like that of gpt-oss: another turn changes the end of the one before, and hides its reasoning.
RETURNING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.thinking if loop.last and m.thinking else '') + m.content }}{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
CONVERSATION = [{"role": "user", "content": "Hi ü"}, {"role": "assistant", "content": "Hello.", "thinking": "A greeting."},
                {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def examples(vocab_size, lengths):
    """Ragged examples: of one token, without a trained one, with several stretches."""
    generator = np.random.default_rng(8)
    out = []
    for length in lengths:
        begin = generator.integers(0, length + 1)
        mask = (np.arange(length) >= begin) & (np.arange(length) % 7 != 3)
        out.append({"tokens": generator.integers(0, vocab_size, length).tolist(), "mask": mask.astype(int).tolist()})
    return out


def reference(model, data):
    """Loss and gradients of transformers."""
    labels = [[token if trained else -100 for token, trained in zip(example["tokens"], example["mask"])] for example in data]
    total = sum(label != -100 for row in labels for label in row[1:])
    model.zero_grad()
    loss = 0.0
    for example, row in zip(data, labels):
        count = sum(label != -100 for label in row[1:])
        if count == 0:
            continue
        mean = model(torch.tensor([example["tokens"]]), labels=torch.tensor([row])).loss  # shifts labels, skips those of -100
        (mean * count / total).backward()
        loss += mean.item() * count / total
    return loss, total, {name: parameter.grad for name, parameter in model.named_parameters()}


def trained(mantissa, name, folder, data, seq_len, rows):
    """Loss of the first step, and the checkpoint after it."""
    file, run = mantissa.work / f"{name}.jsonl", mantissa.work / name
    file.write_text("".join(json.dumps(example) + "\n" for example in data))
    config = {
        "data": {"train": [{"path": str(file)}], "valid": [{"path": str(file)}]},
        "checkpoint": {"init_from": str(folder)},
        "training": {"steps": 1, "seq_len": seq_len, "micro_batch_size": 1, "grad_accum": rows, "threads": 1},
        "precision": {"dtype": "fp32", "recipe": "high"},
        "optimizer": {"lr": 1e-12, "beta1": 0.5, "weight_decay": 0.0, "grad_clip": 0.0},
        "schedule": {"type": "constant", "warmup_steps": 0}, "eval": {"interval": 0, "iters": None}, "logging": {"dir": str(run)}}
    (mantissa.work / f"{name}.json").write_text(json.dumps(config))
    mantissa.run("train", mantissa.work / f"{name}.json")
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(event["loss"] for event in events if event["type"] == "step"), Checkpoint(run / "checkpoints/step-00000001")


def check_loss(mantissa, architecture, packed):
    made = make(architecture, pairwise(architecture)[0], mantissa.work / "model")
    # Packed rows are filled to the last token, so that their number is known; others hold no two examples.
    lengths = [40, 24, 1, 63, 30, 33, 1, 17, 2, 45] if packed else [40, 33, 64, 63, 34, 50]
    data = examples(made.case["vocab_size"], lengths)
    rows = sum(lengths) // SEQ_LEN if packed else len(lengths)
    expected, targets, gradients = reference(made.model, data)
    loss, checkpoint = trained(mantissa, f"{architecture}-{packed}", made.folder, data, SEQ_LEN, rows)
    apart = abs(loss - expected) / expected
    if apart > LOSS:
        raise Failed(f"the loss is {loss:.9f}, that of transformers {expected:.9f}: {apart:.1e} apart")
    moments = {name.removeprefix("m."): checkpoint.read(name) / 0.5 for name in checkpoint.tensors if name.startswith("m.")}
    worst, name = gradients_apart(moments, as_mantissa(gradients, architecture))
    if worst > GRADIENT:
        raise Failed(f"gradient of {name} differs by {worst:.2e} of its size")
    told = mantissa.run("eval", checkpoint.folder.parent.parent)
    if f"| loss {expected:.6g}"[:-1] not in told or f"| {targets} targets" not in told:
        raise Failed(f"eval tells {told.strip()}, not {expected:.6g} of {targets} targets")
    return f"{len(data)} examples in {rows} rows, {targets} targets | loss {apart:.1e} gradients {worst:.1e} ({name})"


def write_tokenizer(folder, template):
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>", "<|return|>")])
    end = "<|return|>" if template == RETURNING else "<|im_end|>"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def check_chat_tokens(work, name):
    template, expected = {
        "marked": (CHATML.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}"), ["Hello.<|im_end|>", "4<|im_end|>"]),
        "unmarked": (CHATML.replace("OPEN", "").replace("CLOSE", ""), ["Hello.<|im_end|>", "4<|im_end|>"]),
        "returning": (RETURNING, ["Hello.", "4<|return|>"])}[name]
    tokenizer = write_tokenizer(work / name, template)
    script, source, out = Path(__file__).with_name("chat_tokens.py"), work / f"{name}.in", work / f"{name}.jsonl"
    conversations = [CONVERSATION, CONVERSATION[1:]]  # the second one begins with the assistant
    source.write_text("\n\n".join(json.dumps({"messages": messages}) for messages in conversations) + "\n")
    subprocess.run([sys.executable, script, work / name, source, out], check=True, stdout=subprocess.DEVNULL)
    for messages, line in zip(conversations, out.read_text().splitlines(), strict=True):
        record = json.loads(line)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        if tokenizer.decode(record["tokens"]) != text:
            raise Failed(f"chat_tokens writes {tokenizer.decode(record['tokens'])!r}, not {text!r}")
        stretches, mask = [], [0] + record["mask"] + [0]
        for at in range(len(record["mask"])):
            if mask[at + 1] and not mask[at]:
                stretches.append([])
            if mask[at + 1]:
                stretches[-1].append(record["tokens"][at])
        if [tokenizer.decode(ids) for ids in stretches] != expected:
            raise Failed(f"chat_tokens trains {[tokenizer.decode(ids) for ids in stretches]}, not {expected}")
    source.write_text(json.dumps({"messages": CONVERSATION[:1]}))
    bad = subprocess.run([sys.executable, script, work / name, source, out], stderr=subprocess.PIPE, text=True)
    if bad.returncode != 4 or "line 1: messages: has no message of the assistant" not in bad.stderr:
        raise Failed(f"chat_tokens takes a conversation without an answer: {bad.returncode} {bad.stderr[-300:]}")
    return f"{expected}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    cases = [(f"{architecture}, {'packed' if packed else 'not packed'}", lambda work, a=architecture, p=packed: check_loss(Mantissa(args.mantissa, work), a, p))
             for architecture in ("llama", "qwen3", "gpt2") for packed in (True, False)]
    cases += [(f"chat_tokens, {name} template", lambda work, n=name: check_chat_tokens(work, n)) for name in ("marked", "unmarked", "returning")]
    sys.exit(run_cases(f"transformers {transformers.__version__}", cases))


if __name__ == "__main__":
    main()
