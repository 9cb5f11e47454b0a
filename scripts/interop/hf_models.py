#!/usr/bin/env python3
"""Makes tiny random models of the architectures that mantissa reads, with transformers itself.

    .venv-interop/bin/python scripts/interop/hf_models.py ARCHITECTURE FOLDER     writes every case of an architecture and loads it again

The cases of an architecture are few enough to run and cover every pair of options once. Nothing in a model is one or zero where it need not be: norms,
biases and sinks are random, and numbers such as the epsilon of norms are no architecture's own. Sizes are multiples of 32 except where the case is called odd, so that every matrix can be quantized; of 128 where it
is called wide.
"""
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from mx_numpy import BLOCK, Folder, packed_weights

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2", "qwen3_moe", "mixtral", "gpt_oss")
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gpt2": "GPT2", "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "gpt_oss": "GptOss"}
HEAD = {"gpt2": "LMHeadModel"}
FIFTH = int(transformers.__version__.split(".")[0]) >= 5
EPSILON = 3e-3

# Options of the files. One-case tests take the first value of each.
FILES = {"dtype": ["fp32", "bf16", "fp16", "mixed"], "shards": ["one", "many"]}
COMMON = {"tied": [False, True], "vocab_size": [259, 256], "size": ["even", "odd"], **FILES}
ATTENTION = {"kv_heads": [2, 1], "head_dim": ["other", "natural"], "rope": ["default", "llama3", "yarn"]}
OPTIONS = {
    "llama": {**COMMON, **ATTENTION, "rope": [*ATTENTION["rope"], "yarn factor"], "biases": [False, True]},
    "qwen2": {**COMMON, "kv_heads": [2, 1], "rope": ["default", "llama3", "yarn"], "window": [False, True]},
    "qwen3": {**COMMON, **ATTENTION, "rope": [*ATTENTION["rope"], "yarn mscale"], "biases": [False, True], "window": [False, True]},
    "gpt2": {**COMMON, "tied": [True, False], "prefix": [True, False], "buffers": [False, True], "n_inner": [None, 96], "activation": ["gelu_new", "gelu"]},
    "qwen3_moe": {**COMMON, **ATTENTION, "biases": [False, True], "norm_topk_prob": [True, False], "dense": ["none", "first", "every second"],
                  "window": [False, True]},
    "mixtral": {**COMMON, **ATTENTION, "window": [False, True]},
    "gpt_oss": {**COMMON, **ATTENTION, "rope": ["yarn", "default", "llama3"], "dtype": ["fp32", "bf16", "fp16", "mixed", "mxfp4"],
                "window": ["alternating", "last", "none"]},
}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "mixed": torch.bfloat16, "mxfp4": torch.bfloat16}
ROPE = {
    "default": {"rope_type": "default"},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5, "original_max_position_embeddings": 64},
    "yarn factor": {"rope_type": "yarn", "factor": 2.5, "attention_factor": 1.3, "truncate": False, "original_max_position_embeddings": 100},
    "yarn mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, "original_max_position_embeddings": 64},
}


def allowed(case):
    if case.get("dtype") == "mxfp4" and case.get("size") == "odd":
        return False  # its rows are blocks of 32
    return case.get("prefix", True) or case.get("tied", True)  # a head never lies beside names without prefix


def pairwise(architecture):
    """Dictionaries of options that contain every allowed pair of two options' values; the first is of all first values."""
    options = OPTIONS[architecture]
    pairs = [((a, x), (b, y)) for a, b in itertools.combinations(options, 2) for x in options[a] for y in options[b]]
    left = {pair for pair in pairs if allowed(dict(pair))}
    cases = []
    while left:
        case = {key: values[0] for key, values in options.items()} if not cases else grown(options, left, pairs)
        left -= set(itertools.combinations(case.items(), 2))
        cases.append(case)
    return cases


def grown(options, left, order):
    """One case: a pair not yet covered, then option by option the value that covers most."""
    case = dict(next(pair for pair in order if pair in left))

    def gain(key, value):
        return sum(((key, value), item) in left or (item, (key, value)) in left for item in case.items())

    for key in options:
        if key not in case:
            fitting = [value for value in options[key] if allowed({**case, key: value})]
            case[key] = max(fitting, key=lambda value: gain(key, value))
    return {key: case[key] for key in options}


def sizes(case):
    """hidden_size, heads, head_dim, intermediate_size, that of an expert beside dense layers."""
    if case["size"] == "wide":  # multiples of 128
        return 128, 4, 32, 128, 128
    hidden, heads, head_dim, intermediate, expert = (40, 4, 12, 52, 20) if case["size"] == "odd" else (64, 4, 32, 96, 32)
    return hidden, heads, hidden // heads if case.get("head_dim") == "natural" else head_dim, intermediate, expert


def rope(name, architecture):
    theta = 30000.0 if architecture == "gpt_oss" else 7000.0
    scaling = {**ROPE[name], **({"truncate": False} if architecture == "gpt_oss" and name == "yarn" else {})}
    if FIFTH:
        return {"rope_parameters": {"rope_theta": theta, **scaling}}
    return {"rope_theta": theta, "rope_scaling": None if name == "default" and architecture != "gpt_oss" else scaling}  # None means yarn to version 5


def config_of(architecture, case):
    hidden, heads, head_dim, intermediate, expert = sizes(case)
    settings = {"vocab_size": case["vocab_size"], "tie_word_embeddings": case["tied"], "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    if architecture == "gpt2":
        settings.update(n_positions=160, n_embd=hidden, n_layer=2, n_head=heads, n_inner=case["n_inner"] and intermediate, activation_function=case["activation"],
                        layer_norm_epsilon=EPSILON)
        return transformers.GPT2Config(**settings)
    settings.update(hidden_size=hidden, num_hidden_layers=case.get("layers", 2), num_attention_heads=heads, num_key_value_heads=case["kv_heads"], intermediate_size=intermediate,
                    max_position_embeddings=case.get("positions", 256), rms_norm_eps=EPSILON, **rope(case["rope"], architecture))
    if "head_dim" in case:
        settings["head_dim"] = head_dim
    if "biases" in case:
        settings["attention_bias"] = case["biases"]
    if architecture == "llama":
        settings["mlp_bias"] = case["biases"]
    if architecture in ("qwen2", "qwen3") and case["window"]:
        settings.update(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    if architecture in ("mixtral", "qwen3_moe", "gpt_oss"):
        settings.update(router_aux_loss_coef=case.get("balance", 0.0), output_router_logits="balance" in case)
    if architecture == "mixtral":
        settings.update(num_local_experts=4, num_experts_per_tok=2, sliding_window=8 if case["window"] else None)
    if architecture == "qwen3_moe":
        settings.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=expert, norm_topk_prob=case["norm_topk_prob"],
                        mlp_only_layers=[0] if case["dense"] == "first" else [], decoder_sparse_step=2 if case["dense"] == "every second" else 1)
    if architecture == "qwen3_moe" and case["window"]:
        settings.update(use_sliding_window=True, sliding_window=8)
    if architecture == "gpt_oss":
        if FIFTH:
            settings["swiglu_limit"] = 1.5  # transformers 4 computes with 7 whatever the file says
        sliding = {"alternating": (0, 2), "last": (2,), "none": ()}[case["window"]]
        layers = ["sliding_attention" if layer in sliding else "full_attention" for layer in range(case.get("layers", 4))]
        settings.update(num_local_experts=4, num_experts_per_tok=2, sliding_window=8, layer_types=layers, num_hidden_layers=len(layers))
    return getattr(transformers, CLASSES[architecture] + "Config")(**settings)


def spread(name, shape):
    """Mean and deviation of a parameter's values."""
    if name.endswith("bias") or name.endswith("_proj_bias"):
        return 0.0, 0.3
    if len(shape) == 1:
        return (0.0, 1.0) if name.endswith("sinks") else (1.0, 0.3)
    if "gate_up_proj" in name and "gpt_oss" in name:
        return 0.0, 0.3 if FIFTH else 0.6  # enough to reach the clamp
    return 0.0, 0.3 if any(part in name for part in ("embed", "wte", "wpe", "lm_head")) else 0.15


@torch.no_grad()
def randomize(model, architecture, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        mean, deviation = spread(f"{architecture}.{name}", parameter.shape)
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation + mean)


@dataclass
class Model:
    """A case as it lies in a folder, and the fp32 model that transformers makes of it."""

    architecture: str
    case: dict
    folder: Path
    model: torch.nn.Module

    def label(self):
        return " ".join(f"{key}={value}" for key, value in self.case.items())


def make(architecture, case, folder, seed=1):
    folder, dtype = Path(folder), DTYPES[case["dtype"]]
    model = getattr(transformers, CLASSES[architecture] + HEAD.get(architecture, "ForCausalLM"))(config_of(architecture, case))
    randomize(model, architecture, seed)
    if case["dtype"] != "mixed":
        model.to(dtype)
    model.save_pretrained(folder, max_shard_size="60KB" if case["shards"] == "many" else "1GB")
    if case["vocab_size"] == 259:
        write_tokenizer(folder)
    for edit in edits(case):
        edit_files(folder, edit)
    if case["dtype"] == "mixed":
        edit_config(folder, {"dtype" if FIFTH else "torch_dtype": "bfloat16"})
    if case["dtype"] == "mxfp4":
        unpacked = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        edit_config(folder, {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": unpacked}})
    return Model(architecture, case, folder, load(folder)[0])


def edits(case):
    """Edits of tensors by name, where transformers cannot write them so: mixed types, MXFP4 blocks, GPT-2 with buffers or without
    prefix."""
    if case["dtype"] == "mixed":
        yield narrow_some
    if case["dtype"] == "mxfp4":
        yield pack_experts
    if case.get("buffers"):
        yield add_buffers
    if not case.get("prefix", True):
        yield lambda tensors: {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def edit_config(folder, settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}, indent=2))


def edit_files(folder, edit):
    """Passes each file's tensors through edit, and makes the index again."""
    files, places, total = sorted(folder.glob("*.safetensors")), {}, 0
    for file in files:
        tensors = edit(load_file(file))
        save_file(tensors, file, metadata={"format": "pt"})
        places.update({name: file.name for name in tensors})
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))


def narrow_some(tensors):
    """Norms, routers and every second other tensor stay fp32."""
    wide = ("norm", "ln_", ".gate.weight", "router")
    return {name: tensor if number % 2 or any(part in name for part in wide) else tensor.bfloat16() for number, (name, tensor) in enumerate(sorted(tensors.items()))}


def add_buffers(tensors):
    layers = sorted({name.rsplit(".attn.", 1)[0] for name in tensors if ".attn.c_attn.weight" in name})
    buffers = {f"{layer}.attn.bias": torch.ones(1, 1, 160, 160).tril().to(torch.uint8) for layer in layers}
    return {**tensors, **buffers, **{f"{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in layers}}


def pack_experts(tensors):
    """Experts as random blocks, which hold every code; their values before are forgotten."""
    generator, out = np.random.default_rng(len(tensors)), {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            out[name] = tensor
            continue
        experts, inner, rows = tensor.shape
        shape = (experts, rows, inner // BLOCK)
        out[name + "_blocks"] = torch.from_numpy(generator.integers(0, 256, (*shape, BLOCK // 2), np.uint8))
        out[name + "_scales"] = torch.from_numpy(generator.integers(120, 124, shape, np.uint8))
    return out


def write_tokenizer(folder):
    """Writes 256 bytes and three special tokens, as tokenizer.json and the files beside it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|begin|>", "<|end|>", "<|pad|>")])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>")
    fast.save_pretrained(folder)


def load(folder, dtype=torch.float32):
    """The model that transformers loads from a folder, and its messages about it: empty if every tensor found its place."""
    options = {"dtype" if FIFTH else "torch_dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    if dtype == torch.float32:
        model = model.float()  # transformers 4 leaves experts that it dequantized in bf16
    return model.eval(), {key: sorted(map(str, value)) for key, value in info.items() if value}


@torch.no_grad()
def log_probabilities(model, tokens):
    """Log-probability of each token after the first, given those before it."""
    logits = model(torch.tensor([tokens])).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


@torch.no_grad()
def likeliest(model, tokens, count):
    """Tokens that follow, each with all those before it anew; fewer at the end token."""
    found = list(tokens)
    while len(found) < len(tokens) + count:
        found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
        if found[-1] == model.config.eos_token_id:
            return found[len(tokens) : -1]
    return found[len(tokens) :]


def prompts(vocab_size):
    """Token ids: a few, one block of them, and more than the positions that scaled rotations were made for; the last id is among them."""
    generator = np.random.default_rng(3)
    return [[*generator.integers(0, vocab_size, length - 1).tolist(), vocab_size - 1] for length in (3, 33, 130)]


def main():
    architecture, root = sys.argv[1], Path(sys.argv[2])
    transformers.logging.set_verbosity_error()
    for number, case in enumerate(pairwise(architecture)):
        made = make(architecture, case, root / f"{architecture}-{number}")
        means = [log_probabilities(made.model, ids).mean() for ids in prompts(case["vocab_size"])]
        print(f"{number:2} {made.label()} | mean log-probabilities {' '.join(f'{mean:.2f}' for mean in means)}", flush=True)
        if case["dtype"] == "mxfp4":
            packed = packed_weights(Folder(made.folder))
            assert packed and all(np.array_equal(values, made.model.get_parameter(name).detach().numpy()) for name, (values, _, _) in packed.items())


if __name__ == "__main__":
    main()
