"""mantissa's GPT written in PyTorch, over a dictionary of parameters with mantissa's names."""
import time

import torch
import torch.nn.functional as F
from torch.optim import _muon


class Gpt:
    def __init__(self, config, vocab_size):
        self.c, self.vocab = config, vocab_size
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"] or self.heads
        self.head_dim = config["head_dim"] or config["hidden_size"] // self.heads
        if config["position"] == "rope":
            steps = torch.arange(config["max_position_embeddings"], dtype=torch.float64)
            powers = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
            angles = torch.outer(steps, config["rope_theta"] ** -powers)
            self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def norm(self, x, p, path):
        weight, eps = p[path + ".weight"], self.c["norm_eps"]
        if self.c["norm"] == "layer":
            return F.layer_norm(x, weight.shape, weight, p.get(path + ".bias"), eps)
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def linear(x, p, path):
        return F.linear(x, p[path + ".weight"], p.get(path + ".bias"))

    def rotate(self, x):
        """Rotate-half on [B, H, T, D], in fp32."""
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def attention(self, x, p, path):
        batch, length, _ = x.shape
        rows = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (part.view(batch, length, -1, self.head_dim) for part in self.linear(x, p, path + ".qkv").split(rows, -1))
        if self.c["qk_norm"]:
            q, k = (F.rms_norm(part, (self.head_dim,), p[f"{path}.{name}.weight"], self.c["norm_eps"]) for part, name in ((q, "q_norm"), (k, "k_norm")))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.c["position"] == "rope":
            q, k = self.rotate(q), self.rotate(k)
        if self.kv_heads != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear(out.transpose(1, 2).reshape(batch, length, -1), p, path + ".out")

    def mlp(self, x, p, path):
        if self.c["activation"] == "swiglu":
            gate, up = self.linear(x, p, path + ".gate_up").chunk(2, -1)
            return self.linear(F.silu(gate) * up, p, path + ".down")
        form = "tanh" if self.c["activation"] == "gelu_tanh" else "none"
        return self.linear(F.gelu(self.linear(x, p, path + ".up"), approximate=form), p, path + ".down")

    def feed_forward(self, x, p, layer):
        return self.mlp(x, p, f"layers.{layer}.mlp")

    def logits(self, p, tokens):
        """[B, T, vocabulary]"""
        x = F.embedding(tokens, p["embed.weight"])
        if self.c["position"] == "learned":
            x = x + p["position.weight"][: tokens.shape[1]]
        for i in range(self.c["num_layers"]):
            x = x + self.attention(self.norm(x, p, f"layers.{i}.attn_norm"), p, f"layers.{i}.attn")
            x = x + self.feed_forward(self.norm(x, p, f"layers.{i}.mlp_norm"), p, i)
        x = self.norm(x, p, "final_norm")
        return F.linear(x, p["embed.weight" if self.c["tie_word_embeddings"] else "output.weight"])[..., : self.vocab]

    def loss(self, p, tokens, targets):
        """The sum over targets; logits are widened to fp32 first."""
        return F.cross_entropy(self.logits(p, tokens).flatten(0, 1).float(), targets.flatten(), reduction="sum")

    def value_dtype(self, _name):
        """The dtype of a parameter under fp32 masters."""
        return torch.bfloat16

    def auxiliary_loss(self):
        """The terms that training adds to the loss of a step for the micro batch of the last loss(), times the number of micro batches."""
        return 0.0

    def step_taken(self):
        """Called after each step of the optimizer."""


class TaughtGpt(Gpt):
    """Learns from a teacher, a Gpt with parameters of its own, whose share of the loss is the divergence at a temperature."""

    def __init__(self, config, vocab_size, teacher, parameters, share, temperature):
        super().__init__(config, vocab_size)
        self.teacher, self.share, self.temperature = teacher, share, temperature
        self.parameters = {name: torch.tensor(value) for name, value in parameters.items()}

    def loss(self, p, tokens, targets):
        logits = self.logits(p, tokens).flatten(0, 1).float()
        with torch.no_grad():
            parameters = {name: value.to(p["embed.weight"].dtype) for name, value in self.parameters.items()}
            of_teacher = self.teacher.logits(parameters, tokens).flatten(0, 1).float()
        student, teacher = (F.log_softmax(x / self.temperature, -1) for x in (logits, of_teacher))
        divergence = F.kl_div(student, teacher, reduction="sum", log_target=True) * self.temperature**2
        return self.share * divergence + (1 - self.share) * F.cross_entropy(logits, targets.flatten(), reduction="sum")


def muon_weights(masters):
    """The weights that mantissa trains by Muon: those of linears."""
    linears = (".attn.qkv.", ".attn.out.", ".gate_up.", ".up.", ".down.")
    return {name: m for name, m in masters.items() if m.dim() >= 2 and any(linear in name for linear in linears)}


class Fp32InPlaceOfBf16:
    """The module torch for torch.optim.Muon, which computes in bf16 whatever it is given."""

    def __getattr__(self, name):
        return getattr(torch, "float32" if name == "bfloat16" else name)


class MuonOfParts:
    """torch.optim.Muon over the parts of fused weights, as a Hugging Face checkpoint has them, and over each expert."""

    def __init__(self, weights, config, bf16):
        model, o = config["model"], config["optimizer"]
        head = model["head_dim"] or model["hidden_size"] // model["num_attention_heads"]
        kv_heads = model["num_key_value_heads"] or model["num_attention_heads"]
        self.parts, self.bf16 = [], bf16  # the weight, its rows and the parameter that shares its memory
        for name, weight in weights.items():
            matrix = weight.detach().view(-1, weight.shape[-1])
            experts = model["moe"]["num_experts"] if ".experts." in name else 1
            each, begin = matrix.shape[0] // experts, 0
            rows = [model["num_attention_heads"] * head, kv_heads * head, kv_heads * head] if ".qkv." in name else [each // 2] * 2 * experts if ".gate_up." in name else [each] * experts
            for count in rows:
                self.parts.append((weight, slice(begin, begin + count), torch.nn.Parameter(matrix[begin : begin + count])))
                begin += count
        m = o["muon"]
        self.optimizer = torch.optim.Muon([part for *_, part in self.parts], lr=o["lr"], weight_decay=o["weight_decay"], momentum=m["momentum"],
                                          nesterov=m["nesterov"], ns_steps=m["ns_steps"], adjust_lr_fn=m["scale"])

    def step(self, lr):
        for weight, rows, part in self.parts:
            part.grad = weight.grad.view(-1, weight.shape[-1])[rows]
        self.optimizer.param_groups[0]["lr"] = lr
        _muon.torch = torch if self.bf16 else Fp32InPlaceOfBf16()
        self.optimizer.step()
        _muon.torch = torch


class Trainer:
    """fp32, or bf16 parameters and activations under fp32 masters."""

    def __init__(self, model, weights, config, bf16):
        self.model, self.bf16 = model, bf16
        self.micro, self.clip = config["training"]["micro_batch_size"], config["optimizer"]["grad_clip"]
        self.device = torch.get_default_device()
        self.masters = {name: torch.tensor(value, device=self.device).requires_grad_() for name, value in weights.items()}
        self.values = {name: m.detach().to(model.value_dtype(name)).requires_grad_() for name, m in self.masters.items()} if bf16 else self.masters
        o = config["optimizer"]
        by_muon = muon_weights(self.masters) if o["type"] == "muon" else {}
        self.muon = MuonOfParts(by_muon, config, bf16) if by_muon else None
        by_adamw = [m for name, m in self.masters.items() if name not in by_muon]
        groups = [{"params": [m for m in by_adamw if m.dim() >= 2], "weight_decay": o["weight_decay"]}, {"params": [m for m in by_adamw if m.dim() < 2], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=o["lr"], betas=(o["beta1"], o["beta2"]), eps=o["eps"], fused=True)

    def step(self, rows, lr):
        """One optimizer step on tokens [global batch, T + 1]: loss and milliseconds."""
        start = time.perf_counter()
        tokens, loss = torch.from_numpy(rows).to(self.device), 0.0
        micro_batches = tokens.split(self.micro)
        for micro in micro_batches:
            part = self.model.loss(self.values, micro[:, :-1], micro[:, 1:]) / tokens[:, 1:].numel()
            (part + self.model.auxiliary_loss() / len(micro_batches)).backward()
            loss += part.item()
        if self.bf16:
            for name, value in self.values.items():
                self.masters[name].grad, value.grad = value.grad.float(), None
        if self.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.masters.values(), self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if self.muon:
            self.muon.step(lr)
        self.model.step_taken()
        for master in self.masters.values():
            master.grad = None
        if self.bf16:
            with torch.no_grad():
                torch._foreach_copy_(list(self.values.values()), list(self.masters.values()))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return loss, (time.perf_counter() - start) * 1e3
