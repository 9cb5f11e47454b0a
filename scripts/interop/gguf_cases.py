"""The cases of llama_served.py: models that are trained, exported, and read by the package gguf and by llama.cpp."""
import json
import re
import subprocess
from pathlib import Path

import gguf
import numpy as np

from mantissa_program import Failed, Mantissa, run_cases
from mx_numpy import Folder

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, LENGTH, HEAD = 96, 64, 32
F32, MXFP4, GELU, TIE = 5e-5, 0.5, 2e-3, 0.1  # log-probabilities of llama.cpp: in fp32; with inputs in Q8_0; with a GELU in fp16; of a tie
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 256, "norm_eps": 1e-5, "init_std": 0.1, "head_dim": HEAD}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "llama": {"qk_norm": False},
    "llama biases": {"qk_norm": False, "mlp_bias": True, "attention_bias": "all", "tie_word_embeddings": True},
    "llama llama3": {"qk_norm": False, "rope_scaling": LLAMA3},
    "llama yarn": {"qk_norm": False, "rope_scaling": YARN},
    "llama yarn, attention_factor": {"qk_norm": False, "rope_scaling": {**YARN, "attention_factor": 1.4}},
    "qwen2": {"qk_norm": False, "attention_bias": "qkv", "num_attention_heads": 2},
    "qwen3": {},
    "qwen3 tied yarn": {"tie_word_embeddings": True, "rope_scaling": YARN},
    "qwen3_moe": {"moe": EXPERTS},
    "mixtral": {"qk_norm": False, "moe": EXPERTS},
    "mixtral llama3": {"qk_norm": False, "moe": EXPERTS, "rope_scaling": LLAMA3},
    "gpt_oss": {"qk_norm": False, "attention_bias": "all", "attention_sinks": True, "activation": "swiglu_clamped", "sliding_window": 16, "sliding_layers": [0],
                "moe": {**EXPERTS, "intermediate_size": 96, "router_bias": True, "expert_mlp_bias": True}},
    "gpt2": {"qk_norm": False, "norm": "layer", "norm_bias": True, "position": "learned", "activation": "gelu_tanh", "attention_bias": "all", "mlp_bias": True,
             "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128, "tie_word_embeddings": True},
}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
                 "mixtral": gguf.MODEL_ARCH.LLAMA, "gpt_oss": gguf.MODEL_ARCH.GPT_OSS, "gpt2": gguf.MODEL_ARCH.GPT2}
RECIPES = {
    "high": {"recipe": "high"},
    "mxfp4": {"recipe": "mxfp4_qat"},
    "mxfp8": {"recipe": "mxfp8_weights"},
    "mixed": {"recipe": "mxfp8_weights", "rules": [{"match": "layers.0.*", "recipe": "mxfp4_qat"}]},
}
CASES = [*((model, "mxfp4") for model in MODELS), ("qwen3", "high"), ("qwen3", "mxfp8"), ("llama", "mixed"), ("gpt_oss", "mixed")]


def trained(mantissa, model, recipe):
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, 4000).tolist()
    return mantissa.trained("run", tokens, {
        "model": {**SIZES, **MODELS[model]},
        "training": {"steps": 3, "seq_len": LENGTH, "micro_batch_size": 2, "grad_accum": 1, "threads": 1},
        "precision": {"dtype": "bf16", **RECIPES[recipe]},
        "optimizer": {"lr": 1e-2}, "schedule": {"type": "constant", "warmup_steps": 0}}).folder


def prompts():
    generator = np.random.default_rng(3)
    return [generator.integers(0, VOCABULARY, length).tolist() for length in (3, 33, 130)]


class Llama:
    """llama.cpp with a file."""

    def __init__(self, program, file, length=256):
        self.process = subprocess.Popen([program, str(file), str(length)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def ask(self, *words):
        try:
            print(*words, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed("llama.cpp cannot load the file") from None
        answer = self.process.stdout.readline()
        if not answer.endswith("\n"):
            raise Failed(f"llama.cpp ends with {self.process.wait()}")
        return answer.split()

    def log_probabilities(self, tokens):
        return np.array(self.ask("logprobs", ",".join(map(str, tokens))), np.float64)

    def tokens(self, text):
        return [int(word) for word in self.ask("tokens", text.encode().hex())]

    def continuation(self, text, count):
        return bytes.fromhex("".join(self.ask("go_on", count, text.encode().hex()))).decode(errors="replace")


def bits(array):
    """fp32 bits, zeros without a sign."""
    return np.where(array == 0, np.float32(0), array).astype(np.float32).view(np.uint32)


def rotated(values, heads):
    """Rows of q or k as llama.cpp has them in the architecture llama: LlamaModel.permute() of convert_hf_to_gguf.py."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def converted(model, folder):
    """Tensors of a folder for transformers by the names that the package gguf has for them, as llama.cpp lays them out."""
    family = model.split()[0]
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], SIZES["num_layers"])
    sizes = {**SIZES, **MODELS[model]}
    out, experts = {}, {}

    def put(name, values):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise Failed(f"the package gguf has no name for {name}")
        out[found] = values

    for name in folder.names():
        values = folder.values(name)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert:
            experts.setdefault(name.replace(expert[0], ".experts."), {})[int(expert[1])] = values
        elif family == "gpt_oss" and ".experts.gate_up_proj" in name:
            rows = values if name.endswith("_bias") else values.swapaxes(1, 2)
            kind = "bias" if name.endswith("_bias") else "weight"
            for part, first in (("gate_proj", 0), ("up_proj", 1)):
                put(f"{name.rpartition('gate_up_proj')[0]}{part}.{kind}", rows[:, first::2])
        elif family == "gpt_oss" and ".experts.down_proj" in name:
            put(f"{name.rpartition('down_proj')[0]}down_proj.{'bias' if name.endswith('_bias') else 'weight'}",
                values if name.endswith("_bias") else values.swapaxes(1, 2))
        elif name.endswith(".sinks"):
            put(name + ".weight", values)
        elif family == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
            put(name, values.T)
        elif family in ("llama", "mixtral") and re.search(r"\.[qk]_proj\.", name):
            put(name, rotated(values, sizes["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]))
        else:
            put(name, values)
    for name, of_layer in experts.items():
        stacked = re.sub(r"^model\.(layers\.\d+)\.block_sparse_moe", r"\1.feed_forward", name)
        put(stacked, np.stack([of_layer[i] for i in range(len(of_layer))]))
    return out


def decoded(file):
    """The tensors of a GGUF file as the package reads and decodes them, and how many are MXFP4."""
    reader = gguf.GGUFReader(file)
    values = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in reversed(tensor.shape)]) for tensor in reader.tensors}
    codes = [tensor.name for tensor in reader.tensors if tensor.tensor_type == gguf.GGMLQuantizationType.MXFP4]
    extra = reader.get_field("general.tensor_extra.name")
    allowed = reader.get_field("general.tensor_extra.prec_a4")
    if (extra.contents() if extra else []) != codes or (allowed.contents() if allowed else []) != [False] * len(codes):
        raise Failed("general.tensor_extra does not keep all MXFP4 tensors from inputs of 4 bits")
    return values, len(codes)


def same_values(found, expected, what):
    if found.keys() - {"rope_freqs.weight"} != expected.keys():
        raise Failed(f"{what}: other tensors: {sorted(found.keys() ^ expected.keys())[:4]}")
    for name, values in expected.items():
        if found[name].shape != values.shape or (bits(found[name]) != bits(values)).any():
            raise Failed(f"{what}: {name} differs")


def apart(program, file, ours, most, what):
    with Llama(program, file) as llama:
        gap = max(float(np.abs(llama.log_probabilities(tokens) - expected).max()) for tokens, expected in zip(prompts(), ours))
    if not gap <= most:
        raise Failed(f"{what}: log-probabilities differ by {gap:.1e}")
    return gap


def check(mantissa, program, model, recipe):
    checkpoint, outcome = trained(mantissa, model, recipe), []
    mantissa.run("export", checkpoint, "--output", mantissa.work / "hf")
    expected = converted(model, Folder(mantissa.work / "hf"))
    wide, packed = mantissa.work / "wide.gguf", mantissa.work / "packed.gguf"
    mantissa.run("export", checkpoint, "--output", wide, "--format", "gguf", "--dtype", "fp32")
    mantissa.run("verify", wide, "--against", checkpoint)
    same_values(decoded(wide)[0], expected, "fp32")
    outcome.append(f"{len(expected)} tensors bit for bit")
    ours = mantissa.log_probabilities(mantissa.work / "hf", prompts(), "--dtype", "fp32") if program else []
    exact = GELU if model == "gpt2" else F32
    if program:
        outcome.append(f"fp32 {apart(program, wide, ours, exact, 'fp32'):.1e}")
    if recipe == "high":
        return ", ".join(outcome)
    mantissa.run("export", checkpoint, "--output", packed, "--format", "gguf", "--weights", "packed")
    mantissa.run("verify", packed, "--against", checkpoint)
    found, codes = decoded(packed)
    same_values(found, expected, "packed")
    outcome.append(f"{codes} in MXFP4")
    if program:
        outcome.append(f"packed {apart(program, packed, ours, MXFP4, 'packed'):.1e}")
    return ", ".join(outcome)


def check_text(mantissa, program):
    """A model that learned some text by byte pairs: ids of that text, and greedy continuations."""
    text, work = "".join(path.read_text() for path in sorted(ROOT.glob("src/*/*.h"))), mantissa.work
    some = text[: text.rindex("\n", 0, 20000)]
    (work / "text.txt").write_text(text)
    (work / "some.txt").write_text(some)
    mantissa.run("tokenize", work / "text.txt", "--output", work / "tokenizer.json", "--train-vocab", 512)
    mantissa.run("tokenize", work / "some.txt", "--tokenizer", work / "tokenizer.json", "--output", work / "ids")
    config = {"model": {**SIZES, "vocab_size": None, "hidden_size": 128, "num_layers": 3, "intermediate_size": 256, "init_std": 0.02},
              "data": {"path": str(work / "text.txt"), "tokenizer": str(work / "tokenizer.json")},
              "training": {"steps": 400, "seq_len": 128, "micro_batch_size": 8, "grad_accum": 1}, "precision": {"dtype": "bf16", "recipe": "mxfp4_qat"},
              "optimizer": {"lr": 3e-3}, "schedule": {"warmup_steps": 10}, "eval": {"interval": 0, "iters": 1}, "logging": {"dir": str(work / "run")}}
    (work / "text.json").write_text(json.dumps(config))
    mantissa.run("train", work / "text.json")
    packed = work / "packed.gguf"
    mantissa.run("export", work / "run", "--output", packed, "--format", "gguf", "--weights", "packed")
    mantissa.run("verify", packed, "--against", work / "run")
    expected = np.fromfile(work / "ids.bin", np.uint16).tolist()
    starts = [line[:40] for line in text.splitlines() if len(line) > 60][:200:20]
    mantissa.run("export", work / "run", "--output", work / "hf")
    equal = 0
    with Llama(program, packed) as llama:
        if llama.tokens(some) != expected:
            raise Failed("the text has other ids")
        for start in starts:
            here = mantissa.run("generate", work / "hf", "--prompt", start, "--max-new-tokens", 40, "--temperature", 0, "--dtype", "fp32").removesuffix("\n")
            there = start + llama.continuation(start, 40)
            equal += here.endswith(there)
            if not here.endswith(there) and close_call(mantissa, llama.tokens(here[here.index(start) :]), llama.tokens(there)) > TIE:
                raise Failed(f"llama.cpp goes on as {there!r}, mantissa as {here!r}")
    return f"{len(expected)} ids, greedy continuations of 40 tokens: {equal} of {len(starts)} are equal, others part at a tie"


def close_call(mantissa, here, there):
    """By how much the log-probabilities of the first tokens that differ do."""
    same = next((i for i, (a, b) in enumerate(zip(here, there)) if a != b), min(len(here), len(there)) - 1)
    first, second = (mantissa.log_probabilities(mantissa.work / "hf", [tokens[: same + 1]], "--dtype", "fp32")[0][-1] for tokens in (here, there))
    return abs(first - second)


def run(binary, program, chosen):
    cases = [(f"{model}, {recipe}", lambda work, one=(model, recipe): check(Mantissa(binary, work), program, *one)) for model, recipe in CASES]
    if program:
        cases.append(("text, mxfp4", lambda work: check_text(Mantissa(binary, work), program)))
    return run_cases("llama.cpp" if program else "gguf", [cases[number] for number in chosen] if chosen else cases)
