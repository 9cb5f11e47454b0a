#!/usr/bin/env python3
"""The loss of a checkpoint with experts on its validation data, by NumPy in fp64: every row routed, sorted by expert, multiplied and added up.

    .venv-interop/bin/python scripts/interop/numpy_moe.py runs/mine/checkpoints/step-00001000 [--windows 64]

Prints loss and number of targets, as `mantissa eval` does, which it shares no code with. For models in the shape of Qwen3-MoE and Mixtral: RMSNorm,
rotary positions, SwiGLU, no biases.
"""
import argparse

import numpy as np

from mantissa_files import Checkpoint, encode


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


class Model:
    def __init__(self, checkpoint):
        self.c, self.p = checkpoint.config["model"], {name: value.astype(np.float64) for name, value in checkpoint.masters().items()}
        self.biases = checkpoint.buffers()
        expected = {"norm": "rms", "position": "rope", "activation": "swiglu", "attention_bias": "none", "mlp_bias": False}
        other = [key for key, value in expected.items() if self.c[key] != value]
        if other or not self.c["moe"]:
            raise SystemExit(f"not supported by this comparison: {', '.join(f'model.{key}' for key in other) or 'a model without experts'}")
        self.heads = self.c["num_attention_heads"]
        self.kv_heads = self.c["num_key_value_heads"] or self.heads
        self.head_dim = self.c["head_dim"] or self.c["hidden_size"] // self.heads

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.c["norm_eps"]) * self.p[name + ".weight"]

    def linear(self, x, name):
        return x @ self.p[name + ".weight"].T

    def rotate(self, x):
        """Rotate-half on [T, heads, D]."""
        half = self.head_dim // 2
        angles = np.arange(len(x))[:, None] * self.c["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    def attention(self, x, name):
        rows = np.cumsum([self.heads * self.head_dim, self.kv_heads * self.head_dim])
        q, k, v = (part.reshape(len(x), -1, self.head_dim) for part in np.split(self.linear(x, name + ".qkv"), rows, -1))
        if self.c["qk_norm"]:
            q, k = self.norm(q, name + ".q_norm"), self.norm(k, name + ".k_norm")
        q, k = self.rotate(q), self.rotate(k)
        k, v = (np.repeat(part, self.heads // self.kv_heads, 1) for part in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(self.head_dim)
        later = np.triu(np.ones((len(x), len(x)), bool), 1)
        y = np.einsum("hts,shd->thd", softmax(np.where(later, -np.inf, scores)), v)
        return self.linear(y.reshape(len(x), -1), name + ".out")

    def swiglu(self, x, gate_up, down):
        gate, up = np.split(x @ gate_up.T, 2, -1)
        return silu(gate) * up @ down.T

    def route(self, logits, bias):
        """Experts [N, k] and their weights; the first of equal scores is taken. The bias counts for the choice only."""
        moe = self.c["moe"]
        if moe["n_group"] > 1 or moe["force_balance"]:
            raise SystemExit("this comparison routes without groups or forced balance")
        k, scores = moe["num_experts_per_tok"], softmax(logits) if moe["score"] == "softmax" else sigmoid(logits)
        experts = np.argsort(-(scores + bias), -1, kind="stable")[:, :k]
        weights = np.take_along_axis(scores, experts, -1)
        if moe["softmax_after_topk"] or (k > 1 if moe["norm_topk_prob"] is None else moe["norm_topk_prob"]):
            weights /= weights.sum(-1, keepdims=True)
        return experts, weights * moe["routed_scaling_factor"]

    def experts(self, x, name):
        experts, weights = self.route(self.linear(x, name + ".router"), self.biases.get(name + ".expert_bias", 0.0))
        count, k = self.c["moe"]["num_experts"], experts.shape[1]
        gate_up, down = (self.p[f"{name}.experts.{which}.weight"].reshape(count, -1, inner) for which, inner in
                         (("gate_up", x.shape[1]), ("down", self.c["moe"]["intermediate_size"])))
        # Choice n * k + j of row n goes to a place in the order of experts, of one expert in the order of rows.
        order = np.argsort(experts.ravel(), kind="stable")
        ends = np.cumsum(np.bincount(experts.ravel(), minlength=count))
        sorted_rows, y = x[order // k], np.empty((len(order), x.shape[1]))
        for expert, rows in enumerate(np.split(np.arange(len(order)), ends[:-1])):
            y[rows] = self.swiglu(sorted_rows[rows], gate_up[expert], down[expert])
        out = np.zeros_like(x)
        np.add.at(out, order // k, y * weights.ravel()[order, None])
        if self.c["moe"]["shared_intermediate_size"]:
            out += self.swiglu(x, self.p[name + ".shared.gate_up.weight"], self.p[name + ".shared.down.weight"])
        return out

    def loss(self, tokens):
        """The sum over the predictions of tokens [T + 1] from those before."""
        x = self.p["embed.weight"][tokens[:-1]]
        for i in range(self.c["num_layers"]):
            block = f"layers.{i}"
            x = x + self.attention(self.norm(x, block + ".attn_norm"), block + ".attn")
            normed = self.norm(x, block + ".mlp_norm")
            if i in self.c["moe"]["dense_layers"]:
                x = x + self.swiglu(normed, self.p[block + ".mlp.gate_up.weight"], self.p[block + ".mlp.down.weight"])
            else:
                x = x + self.experts(normed, block + ".moe")
        output = self.p["embed.weight" if self.c["tie_word_embeddings"] else "output.weight"]
        logits = self.norm(x, "final_norm") @ output.T
        logits -= logits.max(-1, keepdims=True)
        return (np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), tokens[1:]]).sum()


def validation_tokens(checkpoint):
    data = checkpoint.config["data"]
    if not data["path"] or data["path"].endswith(".bin"):
        raise SystemExit("this comparison evaluates on the last part of one text, data.path")
    ids = encode(open(data["path"], "rb").read(), checkpoint.manifest["tokenizer"]).astype(np.int64)
    return ids[int(len(ids) * (1 - data["valid_fraction"])) :]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder of one checkpoint")
    parser.add_argument("--windows", type=int, help="the first so many of seq_len tokens (`--iters` of eval times the micro batch); default: all")
    args = parser.parse_args()
    checkpoint = Checkpoint(args.checkpoint)
    model, ids, length = Model(checkpoint), validation_tokens(checkpoint), checkpoint.config["training"]["seq_len"]
    if args.windows:
        ids = ids[: args.windows * length + 1]
    total = sum(model.loss(ids[first : first + length + 1]) for first in range(0, len(ids) - 1, length))
    print(f"{args.checkpoint} | loss {total / (len(ids) - 1):.6g} | {len(ids) - 1} targets")


if __name__ == "__main__":
    main()
