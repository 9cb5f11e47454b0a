"""Computes in MLX what llama.cpp computes on a CPU: an export for mlx_lm in fp32 whose linears round their inputs as ggml rounds them.

ggml multiplies MXFP4 weights by inputs in Q8_0 (int8, with a scale in fp16 for 32 of them: the largest magnitude is 127), BF16 weights by inputs in
bf16, and F32 weights by inputs as they are; sums are fp32. In GPT-2 it takes GELU from a table, whose index and value are fp16.
"""
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model

ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "mlp.router")
BLOCK = 32


def to_q8_0(x):
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    largest = mx.abs(blocks).max(-1, keepdims=True)
    codes = mx.round(blocks * mx.where(largest > 0, 127 / largest, 0))  # ties to even
    return (codes * (largest / 127).astype(mx.float16).astype(mx.float32)).reshape(x.shape)


def to_bf16(x):
    return x.astype(mx.bfloat16).astype(mx.float32)


def gelu_of_table(x):
    def gelu(y):
        return 0.5 * y * (1 + mx.tanh(0.79788456080286535587989211986876 * y * (1 + 0.044715 * y * y)))

    index = mx.clip(x, -10, 10).astype(mx.float16).astype(mx.float32)
    return mx.where(x >= 10, x, mx.where(x <= -10, 0, gelu(index).astype(mx.float16).astype(mx.float32)))


class RoundedLinear(nn.Module):
    """A linear, or one of each expert."""

    def __init__(self, module, rounding):
        super().__init__()
        self.module, self.rounding = module, rounding

    def __call__(self, x, *rest, **options):
        return self.module(self.rounding(x), *rest, **options)


class RoundedEmbedding(nn.Module):
    """An embedding that may also be the output projection."""

    def __init__(self, module, rounding):
        super().__init__()
        self.module, self.rounding = module, rounding

    def __call__(self, ids):
        return self.module(ids)

    def as_linear(self, x):
        return self.module.as_linear(self.rounding(x))


def rounded_model(folder, narrow):
    """The model of a packed or dequantized export for mlx_lm. narrow: GGUF has as BF16, not as F32, the matrices that are no MXFP4."""
    model, _ = load_model(folder, model_config={"quantize_activations": False})
    model.set_dtype(mx.float32)
    changed = []
    for name, module in model.named_modules():
        codes = "scales" in module
        embedding = isinstance(module, nn.Embedding)
        if name.endswith(ROUTERS) or not (codes or embedding or isinstance(module, (nn.Linear, SwitchLinear))):
            continue
        if codes and module.mode == "mxfp4":
            changed.append((name, RoundedLinear(module, to_q8_0)))
        elif narrow:
            changed.append((name, (RoundedEmbedding if embedding else RoundedLinear)(module, to_bf16)))
    model.update_modules(tree_unflatten(changed))
    return model, len(changed)


class GeluTable:
    """Lets GPT-2 take GELU from ggml's table."""

    def __enter__(self):
        self.exact, nn.gelu_approx = nn.gelu_approx, gelu_of_table

    def __exit__(self, *_):
        nn.gelu_approx = self.exact
