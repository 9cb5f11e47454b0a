#!/usr/bin/env python3
"""Holds exports for MLX against mlx_lm itself, on a CPU.

    .venv-interop/bin/python scripts/interop/mlx_served.py --mantissa build/release/bin/mantissa

A model of each architecture is trained for some steps on a text, exported in each form and loaded by mlx_lm. Every module dequantizes to the
dequantized export, bit for bit but for the sign of zeros; in fp32, log-probabilities are those of `mantissa eval` and the likeliest text
that of `mantissa generate`. A model that export refuses by an option is exported all the same, to see that mlx_lm computes it otherwise or
cannot load it. Faults are planted in a folder, to see who notices. Prints a line per case and a table, and exits with 1 if one fails, with
77 where mlx_lm is not installed.
"""
import argparse
import json
import re
import shutil
import struct
import sys

import numpy as np

try:
    import mlx.core as mx
    import mlx_lm
    from mlx.utils import tree_flatten
except ImportError as missing:
    print(f"SKIPPED: {missing}; scripts/interop/setup.sh installs it")
    sys.exit(77)

from mantissa_program import Failed, Mantissa, run_cases, table
from mx_numpy import Folder

LOG_PROBABILITY = 5e-5
NEW_TOKENS = 40
WORDS = "the a small large red old cat dog bird house river sees finds likes near under and or".split()
PROMPT = "the old dog "
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "norm_eps": 1e-5, "init_std": 0.1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
FAMILIES = {
    "llama": {"qk_norm": False, "head_dim": 32},
    "qwen2": {"qk_norm": False, "attention_bias": "qkv"},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "moe": {**EXPERTS, "dense_layers": [0]}},
    "mixtral": {"qk_norm": False, "moe": EXPERTS},
    "gpt_oss": {"qk_norm": False, "head_dim": 32, "attention_bias": "all", "attention_sinks": True, "activation": "swiglu_clamped", "sliding_window": 16,
                "sliding_layers": [0], "moe": {**EXPERTS, "intermediate_size": 96, "router_bias": True, "expert_mlp_bias": True}},
    "gpt2": {"qk_norm": False, "norm": "layer", "norm_bias": True, "position": "learned", "activation": "gelu_tanh", "attention_bias": "all", "mlp_bias": True,
             "num_key_value_heads": 4, "intermediate_size": 256, "tie_word_embeddings": True},
}
MXFP4, MXFP8, TIED = {"recipe": "mxfp4_qat"}, {"recipe": "mxfp8_weights"}, {"tie_word_embeddings": True}
MIXED = {**MXFP8, "rules": [{"match": "layers.0.*", "recipe": "mxfp4_qat"}]}
FORMS = {  # precision, and what it changes in the model
    "dequantized": (MIXED, {}),
    "MXFP4": (MXFP4, {}),
    "MXFP8": (MXFP8, {}),
    "mixed": (MIXED, {}),
    "tied": (MXFP4, TIED),
    "experts": ({"recipe": "high", "rules": [{"match": "layers.*.moe.experts.*", "recipe": "mxfp4_qat"}]}, {}),
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ROWS = {"recipe": "rows", "recipes": {"rows": {"base": "mxfp8_weights", "weight": {"block": [1, 32]}}}}
FOUR_BIT_TABLE = {"rules": [{"match": "embed", "recipe": "mxfp4_qat"}]}
EIGHT_BIT_TABLE = {"recipes": {"rows": {"weight_fake_quant": {"format": "e4m3"}}}, "rules": [{"match": "embed", "recipe": "rows"}]}
OTHERS = [  # name, family, precision, changes
    ("MXFP8 in blocks of 1x32", "qwen3", ROWS, {}),
    ("YaRN", "llama", MXFP8, {"rope_scaling": YARN}),
    ("YaRN with mscale", "qwen3", MXFP4, {"rope_scaling": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.4, "beta_fast": 16.0, "beta_slow": 2.0}}),
    ("rope of Llama 3, biases", "llama", MXFP4, {"rope_scaling": LLAMA3, "mlp_bias": True, "attention_bias": "all"}),
    ("windows in layer 1", "gpt_oss", MXFP4, {"sliding_layers": [1]}),
    ("table in MXFP4", "qwen3", {**MXFP4, **FOUR_BIT_TABLE}, TIED),
    ("table in MXFP8, alone", "llama", EIGHT_BIT_TABLE, {}),
    ("table in MXFP4", "gpt2", {**MXFP8, **FOUR_BIT_TABLE}, {}),
]
REFUSED = [  # family, changes, the option that is told
    ("gpt_oss", {"swiglu_limit": 1.5}, "swiglu_limit"),
    ("gpt_oss", TIED, "tie_word_embeddings"),
    ("gpt_oss", {"sliding_layers": []}, "sliding_layers"),
    ("llama", {"rope_scaling": {**YARN, "attention_factor": 1.5}}, "rope_scaling.attention_factor"),
    ("llama", {"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling.truncate"),
    ("qwen3_moe", {"rope_scaling": YARN}, "rope_scaling"),
    ("mixtral", {"rope_scaling": YARN}, "rope_scaling"),
    ("qwen2", {"sliding_window": 8}, "sliding_window"),
    ("qwen3", {"sliding_window": 8, "sliding_layers": [0]}, "sliding_window"),
    ("qwen3_moe", {"sliding_window": 8}, "sliding_window"),
    ("mixtral", {"sliding_window": 8}, "sliding_window"),
    ("qwen2", {"head_dim": 32}, "head_dim"),
    ("mixtral", {"head_dim": 32}, "head_dim"),
    ("qwen3", {"attention_bias": "all"}, "attention_bias"),
    ("qwen3_moe", {"attention_bias": "all"}, "attention_bias"),
    ("gpt2", {"activation": "gelu_erf"}, "activation"),
    ("gpt2", {"intermediate_size": 96}, "intermediate_size"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
]


def prose(words):
    return " ".join(np.random.default_rng(5).choice(WORDS, words)) + "\n"


def trained(mantissa, family, precision, changes, steps=40):
    (mantissa.work / "text.txt").write_text(prose(8000))
    return mantissa.trained("run", [], {
        "data": {"path": str(mantissa.work / "text.txt"), "tokenizer": "byte", "valid_fraction": 0.1},
        "model": {**SIZES, **FAMILIES[family], **changes},
        "training": {"steps": steps, "seq_len": 64, "micro_batch_size": 4, "grad_accum": 1, "threads": 1},
        "precision": {"dtype": "bf16", **precision},
        "optimizer": {"lr": 5e-3}, "schedule": {"type": "constant", "warmup_steps": 0}}).folder


def prompts():
    generator = np.random.default_rng(3)
    return [generator.integers(0, 256, length).tolist() for length in (3, 33)] + [list(prose(50).encode()[:130])]


def loaded(folder):
    """Model and tokenizer as mlx_lm loads them, but without quantized inputs, which it computes on GPUs only."""
    return mlx_lm.load(str(folder), model_config={"quantize_activations": False})


def weights_of(model):
    """Every parameter by name as fp32, those of quantized modules dequantized, and how many of these there are."""
    weights = {name: np.array(value.astype(mx.float32)) for name, value in tree_flatten(model.parameters())}
    codes = {name: module for name, module in model.named_modules() if "scales" in module}
    for name, module in codes.items():
        del weights[f"{name}.scales"]
        decoded = mx.dequantize(module.weight, module.scales, group_size=module.group_size, bits=module.bits, mode=module.mode, dtype=mx.float32)
        weights[f"{name}.weight"] = np.array(decoded)
    return weights, len(codes)


def same_weights(found, values, what):
    """values: the dequantized export, whose zeros have no sign."""
    if found.keys() != values.names():
        raise Failed(f"{what}: mlx_lm has other parameters: {sorted(found.keys() ^ values.names())[:3]}")
    for name, weight in found.items():
        here, expected = (np.where(one == 0, np.float32(0), one).view(np.uint32) for one in (weight, values.values(name)))
        if here.shape != expected.shape or (here != expected).any():
            raise Failed(f"{what}: {name} differs")


def same_bytes(hf, mlx):
    """The bytes of each codes and scales of the packed folder for transformers stand in that for mlx_lm."""
    whole = [raw for _, _, raw in mlx.entries.values()]
    names = [name for name in hf.names() if name.endswith(("_packed", "_scale")) or hf.dtype(name) == "F8_E4M3"]
    for name in names:
        if not any(hf.entries[name][2] in raw for raw in whole):
            raise Failed(f"the bytes of {name} are not in the folder for mlx_lm")
    return len(names)


def log_probabilities(model, tokens):
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(logs)[np.arange(len(tokens) - 1), tokens[1:]]


def gaps(model, expected):
    return np.concatenate([np.abs(log_probabilities(model, tokens) - logs) for tokens, logs in zip(prompts(), expected)])


def agreement(mantissa, checkpoint, folder):
    """How near mlx_lm is to eval and generate: largest gap in fp32, text, mean gap in the type of the folder. In fp32 these are of the export
    for transformers, whose embeddings and norms are bf16, too."""
    hf = mantissa.work / "hf"
    mantissa.run("export", checkpoint, "--output", hf)
    in_bf16, in_fp32 = mantissa.log_probabilities(checkpoint, prompts()), mantissa.log_probabilities(hf, prompts(), "--dtype", "fp32")
    model, tokenizer = loaded(folder)
    try:
        narrow = f"in bf16 {gaps(model, in_bf16).mean():.1e} on average"
    except RuntimeError as lacking:  # experts that are no codes
        narrow = f"in bf16 not on a CPU ({lacking})"
    model.set_dtype(mx.float32)  # activations have the type of embeddings and norms; codes stay as they are
    gap = gaps(model, in_fp32).max()
    if not gap <= LOG_PROBABILITY:
        raise Failed(f"log-probabilities differ by {gap:.1e}")
    text = mlx_lm.generate(model, tokenizer, prompt=PROMPT, max_tokens=NEW_TOKENS)
    told = mantissa.run("generate", hf, "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, "--temperature", 0, "--dtype", "fp32")
    if not told.strip().endswith((PROMPT + text).strip()):
        raise Failed(f"mlx_lm writes {text!r}, generate {told!r}")
    return f"{gap:.1e}, {NEW_TOKENS} greedy tokens, {narrow}"


def form(mantissa, family, packed, precision, changes):
    checkpoint = trained(mantissa, family, precision, changes)
    values, codes = mantissa.work / "values", mantissa.work / "codes"
    mantissa.run("export", checkpoint, "--output", values, "--format", "mlx")
    same_weights(weights_of(loaded(values)[0])[0], Folder(values), "dequantized")
    if not packed:
        mantissa.run("verify", values, "--against", checkpoint)
        return agreement(mantissa, checkpoint, values)
    mantissa.run("export", checkpoint, "--output", codes, "--format", "mlx", "--weights", "packed")
    told = mantissa.run("verify", codes, "--against", checkpoint)
    if "are those of forward, bit for bit" not in told:
        raise Failed(f"verify: {told}")
    found, modules = weights_of(loaded(codes)[0])
    same_weights(found, Folder(values), "packed")
    outcome = f"{agreement(mantissa, checkpoint, codes)}, {modules} modules are codes"
    if family in ("gpt2", "gpt_oss") or '"embed"' in json.dumps(precision):  # which no other packed form has, or another order of rows
        return outcome
    others = mantissa.work / "compressed-tensors"
    mantissa.run("export", checkpoint, "--output", others, "--weights", "packed")
    return f"{outcome}, {same_bytes(Folder(others), Folder(codes))} tensors byte for byte"


def inputs(mantissa):
    """Weights of a model whose inputs are quantized, too."""
    checkpoint = trained(mantissa, "qwen3", {"recipe": "mxfp8"}, {}, steps=3)
    values, codes = mantissa.work / "values", mantissa.work / "codes"
    mantissa.run("export", checkpoint, "--output", values, "--format", "mlx")
    mantissa.run("export", checkpoint, "--output", codes, "--format", "mlx", "--weights", "packed")
    mantissa.run("verify", codes, "--against", checkpoint)
    if not json.loads((codes / "config.json").read_text()).get("quantize_activations"):
        raise Failed("config.json does not ask for quantized inputs")
    found, modules = weights_of(loaded(codes)[0])
    same_weights(found, Folder(values), "packed")
    return f"{modules} modules are codes; mlx_lm quantizes inputs on GPUs only"


def refusal(mantissa, family, changes, option):
    checkpoint, out = trained(mantissa, family, {"recipe": "high"}, changes, steps=3), mantissa.work / "out"
    told = mantissa.run("export", checkpoint, "--output", out, "--format", "mlx", exit_code=2)
    if f" model.{option}: mlx-lm " not in told:
        raise Failed(f"export refuses another option: {told}")
    mantissa.run("export", checkpoint, "--output", out, "--format", "mlx", "--allow-different")
    if f"- model.{option}: mlx-lm " not in (out / "README.md").read_text():
        raise Failed("README.md does not name the option")
    try:
        model, _ = loaded(out)
    except ValueError as refused:
        return f"refused by model.{option}; mlx_lm cannot load it: {str(refused).splitlines()[0][:60]}"
    model.set_dtype(mx.float32)
    hf = mantissa.work / "hf"
    mantissa.run("export", checkpoint, "--output", hf)
    gap = gaps(model, mantissa.log_probabilities(hf, prompts(), "--dtype", "fp32")).max()
    if gap <= LOG_PROBABILITY:
        raise Failed(f"mlx_lm computes it as training did: {gap:.1e}")
    return f"refused by model.{option}; mlx_lm differs by {gap:.1e}"


class Planted:
    """A folder whose tensors may be changed."""

    def __init__(self, folder):
        self.file = folder / "model.safetensors"
        self.bytes = np.fromfile(self.file, np.uint8)
        self.first = 8 + struct.unpack("<Q", self.bytes[:8].tobytes())[0]
        self.header = json.loads(self.bytes[8 : self.first].tobytes())

    def tensor(self, name):
        """Its bytes, a row for each of the tensor's."""
        entry = self.header[name]
        begin, end = (self.first + offset for offset in entry["data_offsets"])
        return self.bytes[begin:end].reshape(*entry["shape"][:-1], -1)

    def close(self):
        self.bytes.tofile(self.file)


def exchange_nibbles(folder):
    codes = folder.tensor("model.layers.0.self_attn.q_proj.weight")
    codes[:] = codes << 4 | codes >> 4


def take_scale_of_neighbor(folder):
    scales = folder.tensor("model.layers.0.self_attn.q_proj.scales").reshape(-1)
    at = int(np.flatnonzero(scales[1:] != scales[:-1])[0])
    scales[at] = scales[at + 1]


def exchange_experts(folder):
    for part in ("weight", "scales"):
        experts = folder.tensor(f"model.layers.1.mlp.switch_mlp.down_proj.{part}")
        experts[[0, 1]] = experts[[1, 0]]


def turn_rows(folder):
    """Rows of q as llama.cpp has them."""
    for part in ("weight", "scales"):
        rows = folder.tensor(f"model.layers.0.self_attn.q_proj.{part}")
        rows[:] = rows.reshape(-1, 2, 16, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape).copy()


def shift_tokens(folder):
    file = folder.file.parent / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: (id + 1) % len(vocab) for token, id in vocab.items()}
    file.write_text(json.dumps(tokenizer))


PLANTS = {  # and how mlx_lm shows it: by its weights, by its log-probabilities, by its text
    "nibbles exchanged": (exchange_nibbles, {"weights", "log-probabilities"}),
    "one scale of a neighbor": (take_scale_of_neighbor, {"weights", "log-probabilities"}),
    "two experts exchanged": (exchange_experts, {"weights", "log-probabilities"}),
    "rows of q in llama.cpp's order": (turn_rows, {"weights", "log-probabilities"}),
    "tokens shifted by one": (shift_tokens, {"text"}),
}


def symptoms(mantissa, folder, values, expected):
    """By what mlx_lm shows that a folder is none of the model."""
    model, tokenizer = loaded(folder)
    shown = set()
    try:
        same_weights(weights_of(model)[0], values, "packed")
    except Failed:
        shown.add("weights")
    model.set_dtype(mx.float32)
    if not gaps(model, expected).max() <= LOG_PROBABILITY:
        shown.add("log-probabilities")
    text = mlx_lm.generate(model, tokenizer, prompt=PROMPT, max_tokens=NEW_TOKENS)
    told = mantissa.run("generate", mantissa.work / "hf", "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, "--temperature", 0, "--dtype", "fp32")
    if not told.strip().endswith((PROMPT + text).strip()):
        shown.add("text")
    return shown


def plants(mantissa):
    checkpoint, work, lines = trained(mantissa, "qwen3_moe", MXFP4, {}), mantissa.work, []
    for name, options in (("hf", ()), ("values", ("--format", "mlx")), ("good", ("--format", "mlx", "--weights", "packed"))):
        mantissa.run("export", checkpoint, "--output", work / name, *options)
    values, expected = Folder(work / "values"), mantissa.log_probabilities(work / "hf", prompts(), "--dtype", "fp32")
    if symptoms(mantissa, work / "good", values, expected):
        raise Failed("a folder without a fault shows one")
    for number, (fault, (plant, wanted)) in enumerate(PLANTS.items()):
        bad = work / f"bad{number}"
        shutil.copytree(work / "good", bad)
        folder = Planted(bad)
        plant(folder)
        folder.close()
        mantissa.run("verify", bad, exit_code=4)
        mantissa.run("verify", bad, "--against", checkpoint, exit_code=4)
        (bad / "mantissa.json").unlink()  # so that only the contents can tell
        told = mantissa.run("verify", bad, "--against", checkpoint, exit_code=1)
        shown = symptoms(mantissa, bad, values, expected)
        if not shown >= wanted:
            raise Failed(f"{fault}: shown by {sorted(shown)}")
        said = told.strip().splitlines()[-1].partition(": ")[2].partition(f" ({work}")[0]
        lines.append(f"  {fault} | verify: {said} | mlx_lm: {', '.join(sorted(shown))}")
    return f"{len(PLANTS)} faults noticed by verify with and without --against\n" + "\n".join(lines)


def results(found):
    """The largest error of log-probabilities in fp32 by family and form, or what is refused."""
    refused = {(family, "tied"): option for family, changes, option in REFUSED if changes == TIED}

    def cell(family, form):
        if (family, form) in refused:
            return f"refused: `{refused[family, form]}`"
        if form == "experts" and "moe" not in FAMILIES[family]:
            return "no experts"
        told = found.get(f"{family}, {form}", "not run")
        number = re.match(r"(\S+), \d+ greedy", told)
        return number[1] if number else told

    return table(FAMILIES, FORMS, cell)


def all_cases():
    for family, model in FAMILIES.items():
        for name, (precision, changes) in FORMS.items():
            if name == "experts" and "moe" not in model:
                continue
            if (family, name) == ("gpt_oss", "tied"):  # among those refused
                continue
            yield f"{family}, {name}", lambda work, one=(family, name != "dequantized", precision, changes): form(work, *one)
    for name, family, precision, changes in OTHERS:
        yield f"{family}, {name}", lambda work, one=(family, True, precision, changes): form(work, *one)
    yield "qwen3, MXFP8 inputs", inputs
    yield "plants", plants
    for one in REFUSED:
        yield f"{one[0]}, {json.dumps(one[1])}", lambda work, one=one: refusal(work, *one)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    found = {}

    def told(name, check, work):
        found[name] = "FAILED"
        found[name] = check(Mantissa(args.mantissa, work))
        return found[name]

    cases = [(name, lambda work, name=name, check=check: told(name, check, work)) for name, check in all_cases() if name.startswith(args.only)]
    failed = run_cases(f"mlx_lm {mlx_lm.__version__} mlx {mx.__version__}", cases)
    if not args.only:
        print(results(found))
    sys.exit(failed)


if __name__ == "__main__":
    main()
