#!/usr/bin/env python3
"""Holds mantissa's reading and writing of block FP8 against its public definition (DeepSeek-V3, DeepSeek-V4, Qwen3-FP8), in NumPy.

    .venv-interop/bin/python scripts/interop/block_fp8.py --mantissa build/release/bin/mantissa

Folders of random codes and scales, whole and ragged, are exported dequantized: the values are those of the formula, rounded once to fp32.
Packed again they have the same bytes, where scales are powers of two and tiles whole; inputs of ragged ones are refused. Runs by fp8_block and by
configs/recipes/deepseek_v4.json are exported packed: NumPy decodes what the dequantized export holds, and verify finds it equal. Prints a line
per case, and exits with 1 if something differs.
"""
import argparse
import json
import struct
import sys
from pathlib import Path

import numpy as np

from mantissa_program import Failed, Mantissa, run_cases
from mx_numpy import Folder, e2m1, e4m3, scaled

TILE, BLOCK = 128, 32
ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [TILE, TILE]}
WHOLE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
RAGGED = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
USAGE, DATA = 2, 4


def require(holds, *what):
    if not holds:
        raise Failed(" ".join(map(str, what)))


def config_of(sizes, experts=0, **more):
    config = {"model_type": "qwen3", "vocab_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
              "quantization_config": {**QUANTIZATION, "modules_to_not_convert": ["lm_head"]}, **sizes}
    if experts:
        config.update(model_type="qwen3_moe", num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True)
        config["quantization_config"]["modules_to_not_convert"] += [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    return {**config, **more}


def shapes_of(config):
    """Shapes of the linears, by name, then of all other tensors."""
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    linears, rest = {}, {"model.embed_tokens": [config["vocab_size"], hidden], "lm_head": [config["vocab_size"], hidden], "model.norm": [hidden]}
    for layer in (f"model.layers.{i}." for i in range(config["num_hidden_layers"])):
        linears.update({layer + "self_attn.q_proj": [q, hidden], layer + "self_attn.k_proj": [kv, hidden], layer + "self_attn.v_proj": [kv, hidden],
                        layer + "self_attn.o_proj": [hidden, q]})
        rest.update({layer + "input_layernorm": [hidden], layer + "post_attention_layernorm": [hidden], layer + "self_attn.q_norm": [head], layer + "self_attn.k_norm": [head]})
        experts, width = config.get("num_experts", 0), config.get("moe_intermediate_size", config["intermediate_size"])
        if experts:
            rest[layer + "mlp.gate"] = [experts, hidden]
        for mlp in [layer + f"mlp.experts.{e}." for e in range(experts)] or [layer + "mlp."]:
            linears.update({mlp + "gate_proj": [width, hidden], mlp + "up_proj": [width, hidden], mlp + "down_proj": [hidden, width]})
    return linears, rest


def bf16_bytes(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def made_scales(rng, shape, dtype, powers):
    exponents = rng.integers(105, 125, shape).astype(np.uint32)
    if dtype == "F8_E8M0":
        return exponents.astype(np.uint8).tobytes()
    values = ((exponents << 23) + (0 if powers else rng.integers(1, 1 << 23, shape, dtype=np.uint32))).astype(np.uint32).view(np.float32)
    return bf16_bytes(values) if dtype == "BF16" else values.astype("<f4").tobytes()


def write_safetensors(folder, tensors):
    header, at = {}, 0
    ordered = sorted(tensors.items(), key=lambda entry: (-SIZES[entry[1][0]], entry[0]))
    for name, (dtype, shape, raw) in ordered:
        require(len(raw) == SIZES[dtype] * int(np.prod(shape)), name, "has other bytes than its shape")
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw for _, (_, _, raw) in ordered))


def make_folder(folder, config, scale_dtype, powers, scale_name="weight_scale_inv"):
    """Random codes, of which none is NaN."""
    rng, tensors = np.random.default_rng(7), {}
    folder.mkdir()
    linears, rest = shapes_of(config)
    for name, shape in rest.items():
        tensors[name + ".weight"] = "BF16", shape, bf16_bytes(rng.normal(0, 0.5, shape))
    for name, (rows, columns) in linears.items():
        if ".experts." in name and config.get("expert_dtype") == "fp4":
            tensors[name + ".weight"] = "I8", (rows, columns // 2), rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8).tobytes()
            shape, dtype = (rows, columns // BLOCK), "F8_E8M0"
        else:
            codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
            tensors[name + ".weight"] = "F8_E4M3", (rows, columns), np.where(codes & 0x7F == 0x7F, 0x3A, codes).astype(np.uint8).tobytes()
            shape, dtype = (-(-rows // TILE), -(-columns // TILE)), scale_dtype
        tensors[f"{name}.{scale_name}"] = dtype, shape, made_scales(rng, shape, dtype, powers)
    write_safetensors(folder, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def scale_values(folder, name):
    if folder.dtype(name) == "F8_E8M0":
        return np.ldexp(np.float32(1), folder.codes(name).astype(np.int32) - 127)
    return folder.values(name)


def decoded(folder):
    """The fp32 values of weights that have scales, and a flag that is true if -0 is 0, by the name of the weight."""
    values = {}
    for name in folder.names():
        scale = next((name.removesuffix("weight") + end for end in ("weight_scale_inv", "scale") if name.removesuffix("weight") + end in folder.names()), None)
        if not name.endswith(".weight") or scale is None:
            continue
        if folder.dtype(name) == "I8":
            found = scaled(e2m1(folder.codes(name)), folder.codes(scale))
            values[name] = np.where(found == 0, np.float32(0), found)
        else:
            codes = e4m3(folder.codes(name)).astype(np.float32)
            whole = np.repeat(np.repeat(scale_values(folder, scale), TILE, 0), TILE, 1)[: codes.shape[0], : codes.shape[1]]
            values[name] = codes * whole.astype(np.float32)
    return values


def same_values(packed, plain, four_bits):
    values = decoded(packed)
    require(values, "nothing is packed")
    for name, expected in values.items():
        found = plain.values(name)
        if four_bits and ".experts." in name:
            found = np.where(found == 0, np.float32(0), found)
        require(found.shape == expected.shape and (found.view(np.uint32) == expected.view(np.uint32)).all(), name, "differs from the formula")
    rest = {name for name in plain.names() if name not in values}
    require(all(packed.bytes(name) == plain.bytes(name) for name in rest), "what has no scales differs")
    return len(values)


def imported(work, sizes, scale_dtype, powers, experts=0, scale_name="weight_scale_inv", **more):
    mantissa = Mantissa(BINARY, work)
    config = config_of(sizes, experts, **more)
    tensors = make_folder(work / "in", config, scale_dtype, powers, scale_name)
    told = mantissa.run("export", work / "in", "--output", work / "plain")
    count = same_values(Folder(work / "in"), Folder(work / "plain"), more.get("expert_dtype") == "fp4")
    require(("not powers of two" in told) == (not powers), "scales that are not powers of two:", told)
    mantissa.log_probabilities(work / "in", [[1, 2, 3, 4]])
    as_codes = powers and sizes is WHOLE
    if not as_codes and not experts:
        told = mantissa.run("export", work / "in", "--output", work / "refused", "--weights", "packed", "--convention", "fp8", exit_code=USAGE)
        require(("end within a block of 128" if powers else "nothing to pack") in told, told)
        return f"{count} weights are those of the formula"
    mantissa.run("export", work / "in", "--output", work / "packed", "--weights", "packed", "--convention", "fp8")
    packed = Folder(work / "packed")
    again = {name.replace(f".{scale_name}", ".weight_scale_inv"): entry for name, entry in tensors.items()}
    differing = [name for name, (dtype, shape, raw) in again.items() if packed.bytes(name) != (dtype, tuple(shape), raw)]
    require(not differing and packed.names() == again.keys(), "packed again, bytes differ:", differing[:3])
    require("0 values differ" in mantissa.run("verify", work / "packed", "--against", work / "in"), "verify")
    return f"{count} weights are those of the formula, and packed again the same bytes"


def refused(work, change, code, words, model_type=None):
    """A folder with one scale changed, or of another architecture."""
    mantissa = Mantissa(BINARY, work)
    config = config_of(WHOLE, **({"model_type": model_type} if model_type else {}))
    tensors = make_folder(work / "in", config, "F32", True)
    if change is not None:
        name = "model.layers.1.mlp.down_proj.weight_scale_inv"
        dtype, shape, raw = tensors[name]
        tensors[name] = dtype, shape, raw[:8] + struct.pack("<f", change) + raw[12:]
        write_safetensors(work / "in", tensors)
    told = mantissa.run("export", work / "in", "--output", work / "out", exit_code=code)
    require(all(word in told for word in words), "told instead:", told)
    return "refused: " + " ".join(words)


def trained(work, *options, four_bits=False):
    mantissa = Mantissa(BINARY, work)
    mantissa.run("train", ROOT / "configs/moe-tiny.json", *options, *(f"--set={one}" for one in (
        "model.num_key_value_heads=4", f"data.path={ROOT / 'LICENSE'}", f"logging.dir={work / 'run'}", "training.steps=20", "training.threads=1", "optimizer.lr=1e-2",
        "schedule.warmup_steps=5", "eval.interval=0", "eval.iters=1")))
    mantissa.run("export", work / "run", "--output", work / "plain")
    mantissa.run("export", work / "run", "--output", work / "packed", "--weights", "packed", "--convention", "fp8")
    for folder in ("plain", "packed"):
        require("0 values differ" in mantissa.run("verify", work / folder, "--against", work / "run"), "verify", folder)
    packed, config = Folder(work / "packed"), json.loads((work / "packed/config.json").read_text())
    count = same_values(packed, Folder(work / "plain"), four_bits)
    require((config.get("expert_dtype") == "fp4") == four_bits and config["quantization_config"]["weight_block_size"] == [TILE, TILE], "config.json", config)
    ours, theirs = (mantissa.log_probabilities(work / folder, [[5, 3, 8, 1, 9, 2]])[0] for folder in ("run", "packed"))
    require((ours == theirs).all(), "log-probabilities of the run and of its packed export differ")
    return f"{count} weights decoded are those of the dequantized export"


def main():
    global BINARY
    parser = argparse.ArgumentParser()
    parser.add_argument("--mantissa", default=str(ROOT / "build/release/bin/mantissa"))
    BINARY = str(Path(parser.parse_args().mantissa).resolve())
    cases = [(f"{size} {dtype} {'powers of two' if powers else 'any numbers'}",
              lambda work, sizes=sizes, dtype=dtype, powers=powers: imported(work, sizes, dtype, powers))
             for size, sizes in (("whole", WHOLE), ("ragged", RAGGED)) for dtype in ("F32", "BF16", "F8_E8M0") for powers in (True, False) if powers or dtype != "F8_E8M0"]
    fp4 = {"experts": 4, "expert_dtype": "fp4"}
    cases += [("experts E4M3", lambda work: imported(work, WHOLE, "F8_E8M0", True, experts=4)),
              ("experts E2M1", lambda work: imported(work, WHOLE, "F8_E8M0", True, **fp4)),
              ("experts E2M1, DeepSeek-V4's names", lambda work: imported(work, WHOLE, "F8_E8M0", True, scale_name="scale", **fp4))]
    for change, word in ((float("nan"), "nan"), (float("inf"), "inf"), (0.0, "0"), (-0.5, "-0.5")):
        cases.append((f"a scale of {change}", lambda work, change=change, word=word: refused(work, change, DATA, ["down_proj.weight_scale_inv[0, 2] is " + word])))
    cases += [("DeepSeek's own architecture", lambda work: refused(work, None, USAGE, ['model_type "deepseek_v3"'], model_type="deepseek_v3")),
              ("fp8_block, trained", lambda work: trained(work, "--set=precision.recipe=fp8_block")),
              ("deepseek_v4, trained", lambda work: trained(work, "--set-file", ROOT / "configs/recipes/deepseek_v4.json", four_bits=True))]
    sys.exit(run_cases("block_fp8", cases))


if __name__ == "__main__":
    main()
