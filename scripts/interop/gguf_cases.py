"""The cases of llama_served.py: models that are trained, exported, and read by the package gguf and by llama.cpp."""
import re

import gguf
import numpy as np

from llama_cpp import Llama
from mantissa_program import Failed, table
from mlx_served import log_probabilities
from mx_numpy import Folder
from rounded_inputs import GeluTable, rounded_model

from mantissa_formats import dequantize, from_ggml  # isort: skip (mx_numpy says where it is)

VOCABULARY, LENGTH, HEAD = 96, 64, 32
# Log-probabilities of llama.cpp are within F32 of those that the same rounding of inputs gives. Their errors against eval are within MOST times those of
# the rounding on average, and LARGEST times the largest one of some hundred tokens.
F32, MOST, LARGEST = 5e-5, 1.1, 1.5
GELU = 2e-3  # GPT-2, whose GELU llama.cpp takes from a table in fp16
TIE = 0.1  # two tokens so near to each other may both be the likeliest
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 256, "norm_eps": 1e-5, "init_std": 0.1, "head_dim": HEAD}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
FAMILIES = {
    "llama": {"qk_norm": False},
    "qwen2": {"qk_norm": False, "attention_bias": "qkv", **TWO_HEADS},
    "qwen3": {},
    "qwen3_moe": {"moe": EXPERTS},
    "mixtral": {"qk_norm": False, "moe": EXPERTS, **TWO_HEADS},
    "gpt_oss": {"qk_norm": False, "attention_bias": "all", "attention_sinks": True, "activation": "swiglu_clamped", "sliding_window": 16, "sliding_layers": [0],
                "moe": {**EXPERTS, "intermediate_size": 96, "router_bias": True, "expert_mlp_bias": True}},
    "gpt2": {"qk_norm": False, "norm": "layer", "norm_bias": True, "position": "learned", "activation": "gelu_tanh", "attention_bias": "all", "mlp_bias": True,
             "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 256, "tie_word_embeddings": True},
}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
                 "mixtral": gguf.MODEL_ARCH.LLAMA, "gpt_oss": gguf.MODEL_ARCH.GPT_OSS, "gpt2": gguf.MODEL_ARCH.GPT2}
HIGH, MXFP4, MXFP8, TIED = {"recipe": "high"}, {"recipe": "mxfp4_qat"}, {"recipe": "mxfp8_weights"}, {"tie_word_embeddings": True}
MIXED = {**MXFP8, "rules": [{"match": "layers.0.*", "recipe": "mxfp4_qat"}]}
PACKED = ("--weights", "packed")
FORMS = {  # precision, changes of the model, options of export, matrices that are no MXFP4 are BF16
    "F32": (MIXED, {}, ("--dtype", "fp32"), False),
    "BF16": (MIXED, {}, ("--dtype", "bf16"), True),
    "MXFP4": (MXFP4, {}, PACKED, True),
    "MXFP8 as BF16": (MXFP8, {}, PACKED, True),
    "mixed": (MIXED, {}, PACKED, True),
    "tied": (MXFP4, TIED, PACKED, True),
    "experts": ({**HIGH, "rules": [{"match": "layers.*.moe.experts.*", "recipe": "mxfp4_qat"}]}, {}, PACKED, True),
}
OTHERS = [  # name, family, changes
    ("biases, tied", "llama", {"mlp_bias": True, "attention_bias": "all", **TIED}),
    ("rope of Llama 3", "llama", {"rope_scaling": LLAMA3}),
    ("YaRN", "llama", {"rope_scaling": YARN}),
    ("YaRN with attention_factor", "llama", {"rope_scaling": {**YARN, "attention_factor": 1.4}}),
    ("YaRN, tied", "qwen3", {**TIED, "rope_scaling": YARN}),
    ("rope of Llama 3, wide heads", "mixtral", {"rope_scaling": LLAMA3, "num_attention_heads": 4, "num_key_value_heads": 2}),
    ("own output projection", "gpt2", {"tie_word_embeddings": False}),
]
REFUSED = [  # family, changes, the option that is told
    ("gpt_oss", {"swiglu_limit": 1.5}, "swiglu_limit"),
    ("gpt_oss", TIED, "tie_word_embeddings"),
    ("gpt_oss", {"sliding_layers": [1]}, "sliding_layers"),
    ("gpt_oss", {"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling.truncate"),
    ("llama", {"max_position_embeddings": 8192, "rope_scaling": {**YARN, "original_max_position_embeddings": 2048, "beta_fast": 8.0}}, "rope_scaling.beta_fast"),
    ("qwen3", {"rope_scaling": {**YARN, "beta_slow": 4.0}}, "rope_scaling.beta_slow"),
    ("qwen2", {"rope_scaling": LLAMA3}, "rope_scaling.type"),
    *((family, {"sliding_window": 8}, "sliding_window") for family in ("qwen2", "qwen3", "qwen3_moe", "mixtral")),
    ("qwen2", {"num_attention_heads": 4}, "head_dim"),
    ("qwen3", {"attention_bias": "all"}, "attention_bias"),
    ("qwen3_moe", {"attention_bias": "all"}, "attention_bias"),
    ("gpt2", {"activation": "gelu_erf"}, "activation"),
    ("qwen3_moe", {"moe": {**EXPERTS, "norm_topk_prob": False}}, "moe.norm_topk_prob"),
    ("qwen3_moe", {"moe": {**EXPERTS, "dense_layers": [0]}}, "moe.dense_layers"),
]


def trained(mantissa, family, precision, changes):
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, 4000).tolist()
    return mantissa.trained("run", tokens, {
        "model": {**SIZES, **FAMILIES[family], **changes},
        "training": {"steps": 3, "seq_len": LENGTH, "micro_batch_size": 2, "grad_accum": 1, "threads": 1},
        "precision": {"dtype": "bf16", **precision},
        "optimizer": {"lr": 1e-2}, "schedule": {"type": "constant", "warmup_steps": 0}}).folder


def prompts():
    generator = np.random.default_rng(3)
    return [generator.integers(0, VOCABULARY, length).tolist() for length in (3, 130, *([24] * 16))]


def bits(array):
    """fp32 bits, zeros without a sign."""
    return np.where(array == 0, np.float32(0), array).astype(np.float32).view(np.uint32)


def rotated(values, heads):
    """Rows of q or k as llama.cpp has them in the architecture llama: LlamaModel.permute() of convert_hf_to_gguf.py."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def converted(family, sizes, folder):
    """Tensors of a folder for transformers by the names that the package gguf has for them, as llama.cpp lays them out."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], sizes["num_layers"])
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


class Errors:
    """Differences of log-probabilities: of llama.cpp and of an emulation from those of eval, and of the two."""

    def __init__(self, found, emulated, ours):
        self.found, self.emulated, self.apart = np.abs(found - ours), np.abs(emulated - ours), np.abs(found - emulated)

    def __str__(self):
        return (f"largest {self.found.max():.1e}, mean {self.found.mean():.1e} (emulated {self.emulated.max():.1e}, {self.emulated.mean():.1e}), "
                f"{self.same():.0%} of {len(self.apart)} as emulated, median {np.median(self.apart):.1e}")

    def same(self):
        return (self.apart <= F32).mean()

    def check(self, what, largest=LARGEST):
        """The rounding of inputs has to explain the errors: in their size, and one by one. A sum in another order may round an input to the other
        side, which all later tokens of a text see, so that half of the tokens have to be as emulated."""
        for part, most in ((np.max, largest), (np.mean, MOST)):
            if not part(self.found) <= most * part(self.emulated) + F32:
                raise Failed(f"{what}: log-probabilities have other errors than rounded inputs: {self}")
        if self.same() < 0.5:
            raise Failed(f"{what}: log-probabilities are not those of rounded inputs: {self}")
        return str(self)


def served(program, file, texts=None):
    with Llama(program, file) as llama:
        return np.concatenate([llama.log_probabilities(tokens) for tokens in texts or prompts()])


def emulated(folder, narrow, texts=None):
    """Log-probabilities that llama.cpp should have of the GGUF file of a model, which `folder` holds for mlx_lm."""
    model, _ = rounded_model(folder, narrow)
    with GeluTable():
        return np.concatenate([log_probabilities(model, tokens) for tokens in texts or prompts()])


def held(mantissa, program, checkpoint, file, options, narrow):
    """How near llama.cpp is to what its roundings give."""
    mlx, hf = mantissa.work / "mlx", mantissa.work / "hf"
    mantissa.run("export", checkpoint, "--output", mlx, "--format", "mlx", *(options if options == PACKED else ()))
    ours = np.concatenate(mantissa.log_probabilities(hf, prompts(), "--dtype", "fp32"))
    return Errors(served(program, file), emulated(mlx, narrow), ours).check(file.stem)


def written(mantissa, family, precision, changes, options):
    """A GGUF export that verify and the package gguf have compared, its checkpoint, and the number of tensors and of those in MXFP4."""
    checkpoint, file = trained(mantissa, family, precision, changes), mantissa.work / "model.gguf"
    mantissa.run("export", checkpoint, "--output", mantissa.work / "hf")
    mantissa.run("export", checkpoint, "--output", file, "--format", "gguf", *options)
    mantissa.run("verify", file, "--against", checkpoint)
    found, codes = decoded(file)
    same_values(found, converted(family, {**SIZES, **FAMILIES[family], **changes}, Folder(mantissa.work / "hf")), "the file")
    return checkpoint, file, len(found), codes


def check_form(mantissa, program, family, precision, changes, options, narrow):
    checkpoint, file, tensors, codes = written(mantissa, family, precision, changes, options)
    outcome = f"{tensors} tensors bit for bit, {codes} in MXFP4"
    return f"{outcome}; {held(mantissa, program, checkpoint, file, options, narrow)}" if program else outcome


def check_other(mantissa, program, family, changes):
    """A model in F32, which needs no roundings to be explained."""
    checkpoint, file, tensors, _ = written(mantissa, family, MXFP4, changes, ("--dtype", "fp32"))
    mantissa.run("export", checkpoint, "--output", mantissa.work / "packed.gguf", "--format", "gguf", *PACKED)
    mantissa.run("verify", mantissa.work / "packed.gguf", "--against", checkpoint)
    if not program:
        return f"{tensors} tensors bit for bit"
    ours = np.concatenate(mantissa.log_probabilities(mantissa.work / "hf", prompts(), "--dtype", "fp32"))
    gap = np.abs(served(program, file) - ours).max()
    if not gap <= (GELU if family == "gpt2" else F32):
        raise Failed(f"log-probabilities differ by {gap:.1e}")
    return f"{tensors} tensors bit for bit; largest {gap:.1e}"


def check_refusal(mantissa, program, family, changes, option):
    """A model that export refuses is exported all the same, to see that llama.cpp computes it otherwise or cannot load it."""
    checkpoint, out = trained(mantissa, family, HIGH, changes), mantissa.work / "out.gguf"
    told = mantissa.run("export", checkpoint, "--output", out, "--format", "gguf", exit_code=2)
    if f" model.{option}: llama.cpp " not in told:
        raise Failed(f"export refuses another option: {told}")
    mantissa.run("export", checkpoint, "--output", out, "--format", "gguf", "--dtype", "fp32", "--allow-different")
    if not program:
        return f"refused by model.{option}"
    mantissa.run("export", checkpoint, "--output", mantissa.work / "hf")
    ours = np.concatenate(mantissa.log_probabilities(mantissa.work / "hf", prompts(), "--dtype", "fp32"))
    try:
        gap = np.abs(served(program, out) - ours).max()
    except Failed as failure:
        return f"refused by model.{option}; {failure}"
    if gap <= F32:
        raise Failed(f"llama.cpp computes it as training did: {gap:.1e}")
    return f"refused by model.{option}; llama.cpp differs by {gap:.1e}"


def check_blocks(llama):
    """Every scale with every pair of codes, by ggml's own code."""
    pairs = np.arange(256, dtype=np.uint8).reshape(16, 16)
    blocks = np.concatenate([np.concatenate([np.full((16, 1), scale, np.uint8), pairs], 1) for scale in range(256)])
    codes, scales = from_ggml(blocks)
    here, there = dequantize(codes, scales, "e2m1"), llama.decoded_mxfp4(blocks)
    numbers = blocks[:, 0] != 255
    if (bits(here[numbers]) != bits(there[numbers])).any():
        raise Failed("ggml decodes other values")
    signs = int((here[numbers].view(np.uint32) != there[numbers].view(np.uint32)).sum())
    last = there[~numbers].ravel()
    return (f"{here[numbers].size} values of scales 0 to 254 bit for bit, but for the sign of {signs} zeros; at scale 255, for NaN, ggml has "
            f"{np.unique(np.abs(last[np.isfinite(last)])).tolist()} and {int(np.isinf(last).sum())} infinities of {last.size} values")



def results(found):
    """The largest and mean error of log-probabilities by family and form, or what is refused."""
    refused = {(family, "tied"): option for family, changes, option in REFUSED if changes == TIED}

    def cell(family, form):
        if (family, form) in refused:
            return f"refused: `{refused[family, form]}`"
        if form == "experts" and "moe" not in FAMILIES[family]:
            return "no experts"
        told = found.get(f"{family}, {form}", "not run")
        numbers = re.search(r"largest (\S+), mean (\S+) ", told)
        return f"{numbers[1]}, {numbers[2]}" if numbers else told

    return table(FAMILIES, FORMS, cell)
