#!/usr/bin/env python3
"""Holds mantissa's packed exports against decoders that are not mantissa's.

    .venv-interop/bin/python scripts/interop/hf_packed.py --mantissa build/release/bin/mantissa

A model of transformers is trained for some steps by a recipe, and exported twice: dequantized, and packed in each convention that its
formats have. Decoded by NumPy, by compressed-tensors' own decompressor and by the loaders of transformers, the packed weights are the
dequantized ones bit for bit (of MXFP4 -0 is 0). One flipped bit of a scale is found by verify. Prints a line per case, and exits with 1 if
something differs.
"""
import argparse
import json
import sys
import tempfile
from pathlib import Path

import compressed_tensors
import numpy as np
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor, decompress_module
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match

from hf_models import load, log_probabilities, make, pairwise, prompts
from hf_parity import LOG_PROBABILITY, apart, require, same_header, same_side_files
from mantissa_files import Checkpoint
from mantissa_program import Failed, Mantissa
from mx_numpy import INPUT_SCALES, TENSOR_SCALES, Folder, packed_weights, split_name

GPT_OSS = "gpt-oss"  # the blocks of that architecture
EXPERTS, ATTENTION = "layers.*.moe.experts.*", "layers.*.attn.*"
RECIPES = {
    "mxfp8": {"recipe": "mxfp8"},
    "codes as weights": {"recipe": "mxfp8", "fp8_param_gather": True},
    "mxfp8_te": {"recipe": "mxfp8_te"},
    "mxfp8_weights": {"recipe": "mxfp8_weights"},
    "fp8_block": {"recipe": "fp8_block"},
    "mxfp4_qat": {"recipe": "mxfp4_qat"},
    "mxfp4_qat_mxfp8_act": {"recipe": "mxfp4_qat_mxfp8_act"},
    "mxfp4_qat_mxfp4_act": {"recipe": "mxfp4_qat_mxfp4_act"},
    "nvfp4_qat": {"recipe": "nvfp4_qat"},
    "nvfp4_qat_nvfp4_act": {"recipe": "nvfp4_qat_nvfp4_act"},
    "mixed": {"recipe": "high", "rules": [{"match": ATTENTION, "recipe": "mxfp8_weights"}, {"match": "layers.*.mlp.*", "recipe": "mxfp4_qat"}]},
    "mixed experts": {"recipe": "high", "rules": [{"match": ATTENTION, "recipe": "mxfp8_weights"}, {"match": EXPERTS, "recipe": "mxfp4_qat"}]},
    "mxfp4 experts": {"recipe": "high", "rules": [{"match": EXPERTS, "recipe": "mxfp4_qat"}]},
    "kimi_k3 experts": {"recipe": "high", "rules": [{"match": EXPERTS, "recipe": "mxfp4_qat_mxfp8_act"}]},
    "fp8_output_proj": {"recipe": "mxfp8", "fp8_output_proj": True},
    "fp32": {"dtype": "fp32", "recipe": "mxfp8_weights"},
}
HIGH_INPUTS = ("mxfp8_weights", "mxfp4_qat", "nvfp4_qat", "mixed", "mixed experts", "mxfp4 experts", "fp32")  # forward rounds weights only
FOUR_BITS = ("mxfp4_qat", "mxfp4_qat_mxfp8_act", "mxfp4_qat_mxfp4_act", "mixed", "mixed experts", "kimi_k3 experts")
CASES = [*(("qwen3", recipe) for recipe in RECIPES if "experts" not in recipe), ("llama", "mxfp4_qat_mxfp8_act"), ("qwen2", "mxfp8"), ("mixtral", "mxfp8"),
         ("qwen3_moe", "mxfp8"), ("qwen3_moe", "mxfp4_qat"), ("qwen3_moe", "nvfp4_qat_nvfp4_act"), ("qwen3_moe", "mixed experts"), ("qwen3_moe", "kimi_k3 experts"), ("gpt_oss", "mxfp4 experts")]


def model_of(architecture, recipe, folder):
    case = {**pairwise(architecture)[0], "dtype": "bf16"}
    if recipe == "fp8_block":
        case.update(size="wide", kv_heads=4)
    return make(architecture, case, folder)


def trained(mantissa, made, recipe):
    """A checkpoint some large steps away from the model, so that masters are no bf16 values."""
    model = None
    if recipe == "fp8_output_proj":  # rows of the head are quantized 32 at a time
        start = mantissa.one_step(made.folder, 259, 3, checkpoint=True)
        model = {**start.config["model"], "pad_vocab_to": 32}
    return mantissa.trained("run", np.random.default_rng(4).integers(0, 259, 2000).tolist(), {
        **({"model": model} if model else {}),
        "checkpoint": {"init_from": str(made.folder), "allow_recipe_change": True},
        "training": {"steps": 3, "seq_len": 64, "micro_batch_size": 2, "grad_accum": 1, "threads": 1},
        "precision": {"dtype": "bf16", **RECIPES[recipe]},
        "optimizer": {"lr": 1e-2}, "schedule": {"type": "constant", "warmup_steps": 0}}).folder


def bits(values, zero_has_no_sign):
    return (np.where(values == 0, np.float32(0), values) if zero_has_no_sign else values).view(np.uint32)


def same_values(found, expected, four_bits, what):
    require(found.shape == expected.shape, f"{what}: shape {found.shape}, not {expected.shape}")
    other = np.argwhere(bits(found, four_bits) != bits(expected, four_bits))
    require(not len(other), f"{what}: {len(other)} values differ, first {other[0] if len(other) else ''}")


def decoded_by_numpy(packed, plain):
    """Returns the number of packed weights; all other tensors must be those of the other export, to the byte."""
    weights, parts = packed_weights(packed), set()
    for name, (values, scale, four_bits) in weights.items():
        same_values(values, plain.values(name), four_bits, f"NumPy: {name}")
        module = split_name(name)[0]
        ends = [*TENSOR_SCALES.values(), *INPUT_SCALES]
        parts |= {part for part in (name, name + "_packed", name + "_blocks", scale, *(module + end for end in ends)) if part in packed.names()}
    rest = packed.names() - parts
    require(rest | weights.keys() == plain.names(), "the packed export has other tensors")
    require(all(packed.bytes(name) == plain.bytes(name) for name in rest), "what is not packed differs from the dequantized export")
    require(weights, "nothing is packed")
    return len(weights)


def decompressed(packed, plain):
    """Checks by compressed-tensors that the tensors of each linear module are what config.json says."""
    config = QuantizationConfig.model_validate(json.loads((packed.folder / "config.json").read_text())["quantization_config"])
    weights, linear = packed_weights(packed), torch.nn.Linear(1, 1)
    matrices = [name for name in plain.names() if name.endswith(".weight") and len(plain.bytes(name)[1]) == 2 and "embed_tokens" not in name]
    for name in matrices:
        module = name.removesuffix(".weight")
        schemes = [scheme for scheme in config.config_groups.values() if is_match(module, linear, scheme.targets, config.ignore or ())]
        require(len(schemes) == (name in weights), f"compressed-tensors: config.json has {len(schemes)} schemes for {module}")
        if not schemes:
            continue
        require(not schemes[0].input_activations or (module + INPUT_SCALES[0] in packed.names()) == (schemes[0].input_activations.group_size == 16),
                f"compressed-tensors: inputs of {module} have a scale where they have none, or none where they have one")
        state = {part.removeprefix(module + "."): as_torch(packed, part) for part in packed.names() if part.startswith(name)}
        weight = BaseCompressor.get_value_from_registry(schemes[0].format or config.format).decompress(state, schemes[0])["weight"]
        same_values(weight.float().numpy(), plain.values(name), weights[name][2], f"compressed-tensors: {name}")
    return len(weights)


def as_torch(folder, name):
    if folder.dtype(name) == "F32":
        return torch.from_numpy(folder.values(name).copy())
    codes = torch.from_numpy(folder.codes(name).copy())
    return codes.view(torch.float8_e4m3fn) if folder.dtype(name) == "F8_E4M3" else codes


def loaded(packed, plain_model, convention):
    """Says in words how transformers loads a packed folder without a GPU; the values that it loads must be right."""
    if convention == "modelopt":
        return "transformers has no loader"
    if convention == "compressed-tensors" and any(".experts." in name and packed.dtype(name) == "F8_E4M3" for name in packed_weights(packed).keys() & packed.names()):
        return cannot_load(packed.folder)
    model, complaints = load(packed.folder, dtype=torch.bfloat16)
    unknown = [key for key in complaints.pop("unexpected_keys", []) if ".experts." not in key or not key.endswith(INPUT_SCALES[0])]
    require(not unknown and not complaints, f"transformers, {convention}:", unknown, complaints)  # it never quantizes inputs of experts
    two_levels = any(name.endswith(TENSOR_SCALES[True]) for name in packed.names())
    for module in model.modules():
        decompress_module(module)  # as it would be before the first product, if it is compressed
    for name, expected in plain_model.named_parameters():
        found = model.get_parameter(name).detach()
        factor = 2.0 ** 8 if two_levels and ".experts." in name else 1.0
        same_values(found.float().numpy(), factor * expected.detach().to(found.dtype).float().numpy(), True, f"transformers, {convention}: {name}")
    if two_levels and ".experts." in "".join(packed.names()):
        return "transformers loads it, but leaves out the scale of the tensor of experts (2^-8)"
    if convention == "compressed-tensors":
        return "transformers loads it"  # and rounds inputs
    rounded = type(plain_model)(plain_model.config).eval()
    rounded.load_state_dict({name: value.to(model.get_parameter(name).dtype) for name, value in plain_model.state_dict().items()})
    found, expected = ([log_probabilities(one.float(), ids) for ids in prompts(259)] for one in (model, rounded))
    return f"transformers loads it and computes the same to {apart(found, expected, LOG_PROBABILITY, f'transformers, {convention}'):.1e}"


def cannot_load(folder):
    """transformers 5.23 multiplies codes of MXFP8 experts with scales of another shape."""
    try:
        load(folder, dtype=torch.bfloat16)
    except RuntimeError as error:
        require("CONVERSION" in str(error), "transformers cannot load MXFP8 experts for another reason:", error)
        return "transformers cannot load MXFP8 experts"
    raise Failed("transformers loads MXFP8 experts of compressed-tensors: docs/huggingface.md and this comparison say that it cannot")


def flipped_scale(mantissa, export, checkpoint):
    """verify tells the tensor and the index of the first value that one flipped bit changed, and alone that the file is damaged."""
    folder = Folder(export)
    name, (values, scale, _) = list(packed_weights(folder).items())[-1]
    columns = values.swapaxes(1, 2) if values.ndim == 3 else values  # gpt-oss: the last dimension is the one of blocks
    *row, column = np.argwhere(columns != 0)[-1]
    block = columns.shape[-1] // folder.codes(scale).shape[-1]
    first = column - column % block + np.flatnonzero(columns[*row, column - column % block :][:block])[0]
    byte = np.ravel_multi_index((*row, column // block), folder.codes(scale).shape)
    file, offset = place(export, scale, int(byte))
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 1
    file.write_bytes(raw)
    index = [*row, first] if values.ndim == 2 else [row[0], first, row[1]]
    told = mantissa.run("verify", export, "--against", checkpoint, exit_code=4)
    require(f"{name}[{', '.join(map(str, index))}]" in told, f"verify does not name {name} {index}: {told[-400:]}")
    told = mantissa.run("verify", export, exit_code=4)
    require(file.name in told or scale in told, f"verify alone names neither {file.name} nor {scale}: {told[-400:]}")
    raw[offset] ^= 1
    file.write_bytes(raw)


def place(export, name, byte):
    """The file of a tensor, and the position of one of its bytes in the file."""
    for file in sorted(Path(export).glob("*.safetensors")):
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        if name in header:
            return file, 8 + length + header[name]["data_offsets"][0] + byte
    raise Failed(f"no file has {name}")


def verify(mantissa, export, checkpoint, plain):
    told = mantissa.run("verify", export, "--against", checkpoint)
    require(f": 0 values differ in {len(plain.names())} tensors " in told, f"verify tells of other tensors: {told}")


def again(mantissa, export, options, packed):
    """A packed export that is exported again has the same bytes."""
    out = mantissa.work / f"again-{export.name}-export"
    mantissa.run("export", export, "--output", out, *options)
    repeated = Folder(out)
    require(repeated.entries == packed.entries, f"{export.name}: packed again, tensors differ:",
            sorted(name for name in repeated.names() | packed.names() if repeated.entries.get(name) != packed.entries.get(name))[:3])
    return repeated


def check_packed(mantissa, checkpoint, plain, model, convention, forward, dtype, forward_tolerance=0):
    """forward: the log-probabilities of the checkpoint, which its codes and scales have, too, where inputs are quantized in blocks of 32."""
    export, options = mantissa.work / f"packed-{convention}", ["--weights", "packed"]
    if convention != GPT_OSS:
        options += ["--convention", convention]
    mantissa.run("export", checkpoint, "--output", export, *options)
    verify(mantissa, export, checkpoint, plain)
    mantissa.run("verify", export)
    same_header(export)
    served = mantissa.log_probabilities(export, prompts(259), "--dtype", dtype)
    gap = apart(served, forward, forward_tolerance, f"{convention}: eval of the checkpoint and of its packed export")
    packed = Folder(export)
    words = f"{convention}: gap {gap:.1e}, {decoded_by_numpy(packed, plain)} weights by NumPy"
    if convention == "compressed-tensors":
        words += f", {decompressed(packed, plain)} by compressed-tensors"
    words += ", " + loaded(packed, model, convention)
    again(mantissa, export, options, packed)
    flipped_scale(mantissa, export, checkpoint)
    return words


def check_blocks(mantissa):
    """Blocks of a gpt-oss that was not trained, of every code, go out as they came in, and are to transformers what they are to NumPy."""
    blocks = make("gpt_oss", {**pairwise("gpt_oss")[0], "dtype": "mxfp4"}, mantissa.work / "blocks")
    export = again(mantissa, blocks.folder, ["--weights", "packed"], Folder(blocks.folder))
    model, complaints = load(export.folder, dtype=torch.bfloat16)
    require(not complaints, "transformers, blocks:", complaints)
    weights = packed_weights(export)
    for name, (values, _, _) in weights.items():
        same_values(model.get_parameter(name).detach().float().numpy(), values, True, f"transformers, blocks: {name}")
    return f"{len(weights)} weights in blocks go out as they came in, transformers has the values of NumPy"


def check(mantissa, made, recipe):
    checkpoint, export = trained(mantissa, made, recipe), mantissa.work / "plain"
    mantissa.run("export", checkpoint, "--output", export)
    verify(mantissa, export, checkpoint, Folder(export))
    model, complaints = load(export)
    require(not complaints, "from_pretrained:", complaints)
    same_side_files(made, export)
    tokens = prompts(259)
    ours = mantissa.log_probabilities(export, tokens, "--dtype", "fp32")
    plain = apart([log_probabilities(model, ids) for ids in tokens], ours, LOG_PROBABILITY, "dequantized export")
    dtype = RECIPES[recipe].get("dtype", "bf16")
    trained_form, served_form = (mantissa.log_probabilities(folder, tokens, "--dtype", dtype) for folder in (checkpoint, export))
    gap = apart(trained_form, served_form, 0 if recipe in HIGH_INPUTS else np.inf, "eval of the checkpoint and of its export")
    outcome = [f"dequantized {plain:.1e}, checkpoint and export {gap:.1e}"]
    if made.architecture == "gpt_oss":
        return "; ".join([*outcome, check_blocks(mantissa), check_packed(mantissa, checkpoint, Folder(export), model, GPT_OSS, trained_form, dtype)])
    for convention in ("compressed-tensors", "sglang", "modelopt"):
        no_form = recipe in (*FOUR_BITS, *HIGH_INPUTS) if "nvfp4" not in recipe else convention == "sglang"
        if no_form and convention != "compressed-tensors":
            mantissa.run("export", checkpoint, "--output", mantissa.work / "refused", "--weights", "packed", "--convention", convention, exit_code=2)
            require(not (mantissa.work / "refused").exists(), "a refused export left a folder")
        else:
            outcome.append(check_packed(mantissa, checkpoint, Folder(export), model, convention, trained_form, dtype, np.inf if recipe == "fp8_block" else 0))
    return "; ".join(outcome)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    parser.add_argument("--case", type=int, action="append", help="only these, by number")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    versions = f"transformers {transformers.__version__} compressed-tensors {compressed_tensors.__version__} torch {torch.__version__}"
    failures = 0
    for number, (architecture, recipe) in enumerate(CASES):
        if args.case and number not in args.case:
            continue
        with tempfile.TemporaryDirectory(prefix="hf-packed-") as work:
            made = model_of(architecture, recipe, Path(work) / "model")
            try:
                outcome = check(Mantissa(args.mantissa, work), made, recipe)
            except Failed as failure:
                outcome, failures = f"FAILED: {failure}", failures + 1
        print(f"{versions} | {number}: {architecture} {recipe} | {outcome}", flush=True)
    print(f"hf_packed: {failures} cases failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
