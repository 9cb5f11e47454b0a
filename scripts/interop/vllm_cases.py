"""The cases of vllm_served.py: models that are trained, exported and served by vLLM."""
import multiprocessing
import os
import traceback

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1",
                  OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.model_executor.kernels.linear import register_linear_kernel  # noqa: E402
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel  # noqa: E402
from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel  # noqa: E402
from vllm.platforms import PlatformEnum  # noqa: E402

from mantissa_program import Failed, Mantissa, run_cases  # noqa: E402
from mx_numpy import Folder, packed_weights  # noqa: E402

LOG_PROBABILITY = 5e-5
LENGTH, NEW_TOKENS = 256, 20
WORDS = "the a small large red old cat dog bird house river sees finds likes near under and or".split()
PROMPT = "the old dog "
SIZES = {"hidden_size": 128, "intermediate_size": 96, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
         "norm_eps": 1e-5, "init_std": 0.1}  # attention of vLLM's on CPUs wants heads of 32 at least
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}  # vLLM has no rotations beyond the product
MODELS = {
    "llama": {"qk_norm": False},
    "llama, YaRN": {"qk_norm": False, "rope_scaling": YARN},
    "qwen2": {"qk_norm": False, "attention_bias": "qkv"},
    "qwen3": {"head_dim": 64},
    "qwen3, tied": {"tie_word_embeddings": True},
    "qwen3_moe": {"moe": {**EXPERTS, "dense_layers": [0]}},
    "mixtral": {"qk_norm": False, "moe": EXPERTS},
    "gpt_oss": {"qk_norm": False, "attention_bias": "all", "attention_sinks": True, "activation": "swiglu_clamped", "sliding_window": 16, "sliding_layers": [0],
                "rope_scaling": YARN, "moe": {**EXPERTS, "intermediate_size": 96, "router_bias": True, "expert_mlp_bias": True}},
}
LINEARS = [{"match": "layers.*.moe.*", "recipe": "high"}]  # experts are no codes
FORMS = {  # recipe, rules, convention, type
    "dequantized": ("mxfp8_weights", [], None, "float32"),
    "MXFP4": ("mxfp4_qat", [], "compressed-tensors", "float32"),
    "MXFP8": ("mxfp8_weights", [], "compressed-tensors", "float32"),
    "mixed": ("mxfp8_weights", [{"match": "layers.0.*", "recipe": "mxfp4_qat"}], "compressed-tensors", "float32"),
    "ModelOpt MXFP8": ("mxfp8", [], "modelopt", "bfloat16"),
    "MXFP4 but for experts": ("mxfp4_qat", LINEARS, "compressed-tensors", "float32"),
    "MXFP8 but for experts": ("mxfp8_weights", LINEARS, "compressed-tensors", "float32"),
    "ModelOpt MXFP8 but for experts": ("mxfp8", LINEARS, "modelopt", "bfloat16"),
    "SGLang MXFP8": ("mxfp8", [], "sglang", "bfloat16"),
    "MXFP4 experts": ("high", [{"match": "layers.*.moe.experts.*", "recipe": "mxfp4_qat"}], "compressed-tensors", "bfloat16"),
}
DENSE = ["dequantized", "MXFP4", "MXFP8", "mixed", "ModelOpt MXFP8"]
PACKED_EXPERTS = [*DENSE[1:], "MXFP4 experts"]  # which vLLM multiplies on GPUs, or on CPUs with AMX
REFUSED = {(model, form) for model in MODELS if "moe" in MODELS[model] for form in PACKED_EXPERTS} | {("qwen3", "SGLang MXFP8")}
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class DecodedMxfp4(MxFp4LinearKernel):
    """Multiplies by MXFP4 weights that it decodes once they are loaded. Inputs stay as they are."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        codes = layer.weight.data
        elements = E2M1[torch.stack([codes & 15, codes >> 4], -1).long()].reshape(codes.shape[0], -1, 32)
        scales = torch.exp2(layer.weight_scale.data.double() - 127).unsqueeze(-1)
        values = (elements.double() * scales).reshape(codes.shape[0], -1).to(layer.params_dtype)
        layer.weight = torch.nn.Parameter(values, requires_grad=False)

    def apply_weights(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


class Refused(Exception):
    """vLLM cannot serve a folder here, in its own words."""


def prompts():
    generator = np.random.default_rng(3)
    text = " ".join(np.random.default_rng(7).choice(WORDS, 50)).encode()
    return [generator.integers(0, 256, length).tolist() for length in (3, 33)] + [list(text[:130])]


def answers(folder, dtype):
    """Log-probabilities of prompts(), the likeliest text, and parameters by name; those of linears that vLLM rearranges are empty."""
    llm = vllm.LLM(str(folder), dtype=dtype, enforce_eager=True, max_model_len=LENGTH, max_num_seqs=4)
    tokens = [{"prompt_token_ids": each} for each in prompts()]
    told = llm.generate(tokens, vllm.SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    logs = [np.array([place[token].logprob for place, token in zip(each.prompt_logprobs[1:], each.prompt_token_ids[1:])]) for each in told]
    text = llm.generate([PROMPT], vllm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS), use_tqdm=False)[0].outputs[0].text
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    return logs, text, {name: value.detach().float().numpy() for name, value in model.named_parameters() if value.numel()}


def in_child(folder, dtype, log, pipe):
    """Registers the kernels, serves and sends what answers() returns, or what vLLM says."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    register_linear_kernel(DecodedMxfp4, PlatformEnum.CPU, "mxfp4")
    register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    try:
        pipe.send(answers(folder, dtype))
    except Exception as refused:
        traceback.print_exc()
        pipe.send(f"{type(refused).__name__}: {' '.join(str(refused).split())[:300]}")


def served(folder, dtype):
    """answers() of a process of its own, as vLLM keeps much for a process."""
    log = folder.parent / f"{folder.name}.log"
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=in_child, args=(folder, dtype, str(log), there))
    child.start()
    there.close()
    try:
        told = here.recv()
    except EOFError:
        told = f"ends: {' '.join(log.read_text().split())[-160:]}"
    child.join()
    if isinstance(told, str):
        raise Refused(told)
    return told


def bits(values):
    """fp32 bits, zeros without a sign."""
    return np.where(values == 0, np.float32(0), values).view(np.uint32)


def same_weights(found, values, dtype):
    """Names in the dequantized export of what vLLM holds; Failed if a value, in its type, differs. Rows that only fill up a vocabulary are no values."""
    compared = set()
    for name, weight in found.items():
        name = name.replace(".attn.", ".self_attn.")
        module, part = name.split(".")[-2:]
        names = [name.replace(f".{module}.", f".{one}.") for one in PARTS.get(module, (module,))] if name.count(".") > 1 else [name]
        if not all(each in values.names() for each in names):
            continue
        expected = np.concatenate([values.values(each) for each in names])
        expected = torch.from_numpy(expected).to(getattr(torch, dtype)).float().numpy()  # as vLLM loads fp32, which the bias of a router has
        if weight.shape[1:] != expected.shape[1:] or len(weight) < len(expected) or (bits(weight[: len(expected)]) != bits(expected)).any():
            raise Failed(f"{name} differs from the dequantized export")
        compared.update(names)
    return compared


def gap(found, expected):
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected))


def trained(mantissa, model, recipe, rules):
    text = " ".join(np.random.default_rng(5).choice(WORDS, 8000)) + "\n"
    (mantissa.work / "text.txt").write_text(text)
    return mantissa.trained("run", [], {
        "data": {"path": str(mantissa.work / "text.txt"), "tokenizer": "byte", "valid_fraction": 0.1},
        "model": {**SIZES, **MODELS[model]},
        "training": {"steps": 30, "seq_len": 64, "micro_batch_size": 4, "grad_accum": 1, "threads": 1},
        "precision": {"dtype": "bf16", "recipe": recipe, "rules": rules},
        "optimizer": {"lr": 5e-3}, "schedule": {"type": "constant", "warmup_steps": 0}}).folder


def check(mantissa, model, form):
    recipe, rules, convention, dtype = FORMS[form]
    checkpoint, values, codes = trained(mantissa, model, recipe, rules), mantissa.work / "values", mantissa.work / "codes"
    mantissa.run("export", checkpoint, "--output", values)
    if convention:
        mantissa.run("export", checkpoint, "--output", codes, "--weights", "packed", "--convention", convention)
    packed = packed_weights(Folder(codes)).keys() if convention else set()
    try:
        logs, text, weights = served(codes if convention else values, dtype)
    except Refused as refused:
        if (model, form) in REFUSED:
            return f"vLLM cannot serve it: {refused}"
        raise Failed(f"vLLM cannot serve it: {refused}") from None
    compared = same_weights(weights, Folder(values), dtype)
    hidden = {name for name in packed - compared if (model, form) in REFUSED and ".experts." in name}  # in the order of a CPU's AMX kernel
    if not packed <= compared | hidden:
        raise Failed(f"vLLM does not hold {sorted(packed - compared)[:3]} decoded")
    outcome = f"{len(compared)} of {len(Folder(values).names())} tensors bit for bit, {len(packed)} of them codes"
    if dtype == "bfloat16":
        others, told, _ = served(values, dtype)
        apart = gap(logs, others)
        if hidden:
            exact = mantissa.log_probabilities(values, prompts(), "--dtype", "fp32")
            found, expected = gap(logs, exact), gap(others, exact)
            if not found <= 1.5 * expected:
                raise Failed(f"log-probabilities in bf16 differ by {found:.1e} from those in fp32, with the dequantized export by {expected:.1e}")
            return f"{outcome}; of {len(hidden)} tensors of experts vLLM shows no values; in bf16 {found:.1e} from fp32, {expected:.1e} with the dequantized export"
        if apart > 0 or text != told:
            raise Failed(f"log-probabilities differ from those with the dequantized export by {apart:.1e}, and it writes {text!r} and {told!r}")
        return f"{outcome}, in bf16 the same log-probabilities and text as with the dequantized export"
    apart = gap(logs, mantissa.log_probabilities(values, prompts(), "--dtype", "fp32"))
    if not apart <= LOG_PROBABILITY:
        raise Failed(f"log-probabilities differ by {apart:.1e}")
    told = mantissa.run("generate", values, "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, "--temperature", 0, "--dtype", "fp32")
    if not told.strip().endswith((PROMPT + text).strip()):
        raise Failed(f"vLLM writes {text!r}, generate {told!r}")
    return f"{outcome}, {apart:.1e}, {NEW_TOKENS} greedy tokens"


def all_cases():
    for model, options in MODELS.items():
        forms = DENSE if "moe" not in options else [*DENSE, *(each for each in FORMS if each.endswith("but for experts"))]
        forms = {"gpt_oss": ["dequantized", "MXFP4 experts"], "qwen3": [*DENSE, "SGLang MXFP8"]}.get(model, forms)
        for form in forms:
            yield f"{model}, {form}", (model, form)


def run(binary, only):
    cases = [(name, lambda work, one=one: check(Mantissa(binary, work), *one)) for name, one in all_cases() if name.startswith(only)]
    return run_cases(f"vllm {vllm.__version__} torch {torch.__version__}", cases)
