#!/usr/bin/env python3
"""Holds exports for MLX against mlx_lm itself, on a CPU.

    .venv-interop/bin/python scripts/interop/mlx_served.py --mantissa build/release/bin/mantissa

A model of each architecture is trained for some steps by a recipe, and exported for mlx_lm and for transformers. Every module that mlx_lm
loads dequantizes to the dequantized export, bit for bit but for the sign of zeros, and in fp32 its log-probabilities are those of
`mantissa eval`. Prints a line per case, and exits with 1 if something differs, with 77 where mlx_lm is not installed.
"""
import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

try:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx_lm
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model
except ImportError as missing:
    print(f"SKIPPED: {missing}; pip install mlx mlx-cpu mlx-lm")
    sys.exit(77)

from mantissa_program import Failed, Mantissa, run_cases
from mx_numpy import Folder

LOG_PROBABILITY = 5e-5
VOCABULARY, LENGTH = 96, 64
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 256, "norm_eps": 1e-5, "init_std": 0.1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "llama": {"qk_norm": False, "head_dim": 32},
    "llama yarn": {"qk_norm": False, "rope_scaling": YARN},
    "llama llama3": {"qk_norm": False, "rope_scaling": LLAMA3, "mlp_bias": True, "attention_bias": "all"},
    "qwen2": {"qk_norm": False, "attention_bias": "qkv"},
    "qwen3": {"head_dim": 32},
    "qwen3 tied": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 32, "moe": {**EXPERTS, "dense_layers": [0]}},
    "mixtral": {"qk_norm": False, "moe": EXPERTS},
    "gpt_oss": {"qk_norm": False, "head_dim": 32, "attention_bias": "all", "attention_sinks": True, "activation": "swiglu_clamped", "sliding_window": 16,
                "sliding_layers": [0], "moe": {**EXPERTS, "intermediate_size": 96, "router_bias": True, "expert_mlp_bias": True}},
    "gpt2": {"qk_norm": False, "norm": "layer", "norm_bias": True, "position": "learned", "activation": "gelu_tanh", "attention_bias": "all", "mlp_bias": True,
             "num_key_value_heads": 4, "intermediate_size": 256, "tie_word_embeddings": True},
}
RECIPES = {
    "high": {"recipe": "high"},
    "mxfp4": {"recipe": "mxfp4_qat"},
    "mxfp8 tiles": {"recipe": "mxfp8_weights"},
    "mxfp8 rows": {"recipe": "own", "recipes": {"own": {"base": "mxfp8_weights", "weight": {"block": [1, 32]}}}},
    "mixed": {"recipe": "mxfp8_weights", "rules": [{"match": "layers.0.*", "recipe": "mxfp4_qat"}]},
}
INPUTS = {"recipe": "mxfp8"}  # which mlx computes on GPUs only: here its weights are compared
CASES = [*((model, recipe) for model in MODELS for recipe in RECIPES), ("qwen3", "inputs")]


def trained(mantissa, model, recipe):
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, 4000).tolist()
    return mantissa.trained("run", tokens, {
        "model": {**SIZES, **MODELS[model]},
        "training": {"steps": 3, "seq_len": LENGTH, "micro_batch_size": 2, "grad_accum": 1, "threads": 1},
        "precision": {"dtype": "bf16", **(INPUTS if recipe == "inputs" else RECIPES[recipe])},
        "optimizer": {"lr": 1e-2}, "schedule": {"type": "constant", "warmup_steps": 0}}).folder


def prompts():
    generator = np.random.default_rng(3)
    return [generator.integers(0, VOCABULARY, length).tolist() for length in (3, 33, 130)]


def loaded(folder):
    """The model as mlx_lm loads it, in a mode that CPUs have."""
    model, config = load_model(Path(folder), model_config={"quantize_activations": False})
    return model, config


def as_numpy(array):
    return np.array(array.astype(mx.float32))


def weights_of(model):
    """Every parameter by name as fp32, those of quantized modules dequantized."""
    weights = {name: as_numpy(value) for name, value in tree_flatten(model.parameters())}
    codes = {name: module for name, module in model.named_modules() if hasattr(module, "scales") or "scales" in module}
    for name, module in codes.items():
        del weights[f"{name}.scales"]
        decoded = mx.dequantize(module.weight, module.scales, group_size=module.group_size, bits=module.bits, mode=module.mode, dtype=mx.float32)
        weights[f"{name}.weight"] = np.array(decoded)
    return weights, len(codes)


def same_weights(found, values, what):
    """values: the dequantized export for mlx_lm, whose zeros have no sign."""
    if found.keys() != values.names():
        raise Failed(f"{what}: mlx_lm has other parameters: {sorted(found.keys() ^ values.names())[:3]}")
    for name, weight in found.items():
        here, expected = (np.where(one == 0, np.float32(0), one).view(np.uint32) for one in (weight, values.values(name)))
        if here.shape != expected.shape or (here != expected).any():
            raise Failed(f"{what}: {name} differs")


def same_codes(hf, mlx):
    """The bytes of each codes and scales of the folder for transformers stand in that for mlx_lm."""
    whole = [raw for _, _, raw in mlx.entries.values()]
    names = [name for name in hf.names() if name.endswith(("_packed", "_scale", "_scales", "_blocks")) or hf.dtype(name) == "F8_E4M3"]
    for name in names:
        if "gate_up_proj" not in name and not any(hf.entries[name][2] in raw for raw in whole):
            raise Failed(f"the bytes of {name} are not in the folder for mlx_lm")
    return len(names)


def log_probabilities(model, tokens):
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(logs)[np.arange(len(tokens) - 1), tokens[1:]]


def in_fp32(model):
    """Activations have the type of embeddings and norms; codes stay as they are."""
    model.set_dtype(mx.float32)
    return model


def apart(model, ours, what):
    gap = max(float(np.abs(log_probabilities(model, tokens) - expected).max()) for tokens, expected in zip(prompts(), ours))
    if not gap <= LOG_PROBABILITY:
        raise Failed(f"{what}: log-probabilities differ by {gap:.1e}")
    return gap


def check(mantissa, model, recipe):
    checkpoint, outcome = trained(mantissa, model, recipe), []
    values, packed = mantissa.work / "values", mantissa.work / "packed"
    mantissa.run("export", checkpoint, "--output", values, "--format", "mlx")
    mantissa.run("verify", values, "--against", checkpoint)
    ours = mantissa.log_probabilities(checkpoint, prompts(), "--dtype", "fp32")
    served, _ = loaded(values)
    same_weights(weights_of(served)[0], Folder(values), "dequantized")
    if recipe != "inputs":
        outcome.append(f"dequantized {apart(in_fp32(served), ours, 'dequantized'):.1e}")
    if recipe == "high":
        return outcome[0]
    mantissa.run("export", checkpoint, "--output", packed, "--format", "mlx", "--weights", "packed")
    mantissa.run("verify", packed, "--against", checkpoint)
    served, config = loaded(packed)
    found, codes = weights_of(served)
    same_weights(found, Folder(values), "packed")
    outcome.append(f"{codes} modules are codes")
    if model not in ("gpt2", "gpt_oss"):
        mantissa.run("export", checkpoint, "--output", mantissa.work / "hf", "--weights", "packed")
        outcome.append(f"{same_codes(Folder(mantissa.work / 'hf'), Folder(packed))} tensors byte for byte")
    if recipe == "inputs":
        if not json.loads((packed / "config.json").read_text()).get("quantize_activations"):
            raise Failed("config.json does not ask for quantized inputs")
        return ", ".join(outcome)
    return ", ".join([*outcome, f"packed {apart(in_fp32(served), ours, 'packed'):.1e}"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    parser.add_argument("--case", type=int, action="append", help="only these, by number")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    chosen = [CASES[number] for number in args.case] if args.case else CASES
    cases = [(f"{model}, {recipe}", lambda work, one=(model, recipe): check(Mantissa(args.mantissa, work), *one)) for model, recipe in chosen]
    sys.exit(run_cases(f"mlx_lm {mlx_lm.__version__} mlx {mx.__version__}", cases))


if __name__ == "__main__":
    main()
