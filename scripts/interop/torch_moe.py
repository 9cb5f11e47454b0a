"""mantissa's mixture of experts written in PyTorch: the GPT of torch_gpt.py with routers and experts in place of MLPs."""
import torch
import torch.nn.functional as F

from torch_gpt import Gpt


class Routing:
    """The results of a router from its logits [N, E], of so many sequences: the experts of each token, and the auxiliary losses before
    their coefficients. The bias [E] is added to the scores for the choice only."""

    def __init__(self, logits, sequences, moe, bias):
        self.k, self.of = moe["num_experts_per_tok"], logits.shape[1]
        sigmoid = moe["score"] == "sigmoid"
        tiny = 1e-20 if sigmoid else 0.0
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        self.ranked = logits if bias is None else scores + bias
        self.experts = self.ranked.topk(self.k).indices
        weights = logits.gather(1, self.experts).softmax(-1) if moe["softmax_after_topk"] else scores.gather(1, self.experts)
        renormalize = self.k > 1 if moe["norm_topk_prob"] is None else moe["norm_topk_prob"]
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + tiny)
        self.weights = weights * moe["routed_scaling_factor"]
        probabilities = scores / (scores.sum(-1, keepdim=True) + tiny) if sigmoid else scores
        self.counts = F.one_hot(self.experts, self.of).sum(1).view(sequences, -1, self.of)
        self.logits, self.probabilities = logits, probabilities.view(sequences, -1, self.of)

    def balance(self):
        """E / (k T^2) * sum over experts of assignments times summed probabilities; T: all tokens."""
        return self.product(self.counts.sum((0, 1)), self.probabilities.sum((0, 1)), self.logits.shape[0])

    def sequence_balance(self):
        """Like balance(), but of each sequence, averaged."""
        return self.product(self.counts.sum(1), self.probabilities.sum(1), self.counts.shape[1]) / self.counts.shape[0]

    def product(self, counts, probabilities, tokens):
        return (counts * probabilities).sum() * (self.of / (self.k * tokens**2))

    def z(self):
        return self.logits.logsumexp(-1).square().mean()

    def margin(self):
        """The least margin by which the logit (the biased score) of the last expert chosen exceeds that of the first one that was not."""
        if self.k == self.of:
            return float("inf")
        best = self.ranked.topk(self.k + 1).values
        return (best[:, -2] - best[:, -1]).min().item()


class MoeGpt(Gpt):
    """experts: "loop" over them, or "grouped", by the grouped product of PyTorch. buffers: of the checkpoint, by name."""

    def __init__(self, config, vocab_size, buffers, experts="loop"):
        super().__init__(config, vocab_size)
        self.biases = {int(name.split(".")[1]): torch.tensor(value) for name, value in buffers.items()}
        self.moe, self.multiply = config["moe"], self.grouped if experts == "grouped" else self.loop
        self.routing, self.statistics = {}, []  # by layer: of the last loss(), and of each since the last take_statistics()
        if self.moe["n_group"] > 1 or self.moe["capacity_factor"] or self.moe["force_balance"]:
            raise SystemExit("groups of experts, capacities and forced balance are not supported by this comparison")

    def loss(self, p, tokens, targets):
        self.routing = {}
        self.statistics.append(self.routing)
        return super().loss(p, tokens, targets)

    def value_dtype(self, name):
        return torch.float32 if name.endswith(".moe.router.weight") else super().value_dtype(name)

    def auxiliary_loss(self):
        terms = (("aux_loss_coef", Routing.balance), ("seq_aux_loss_coef", Routing.sequence_balance), ("z_loss_coef", Routing.z))
        return sum(self.moe[key] * term(routing) for routing in self.routing.values() for key, term in terms if self.moe[key] > 0)

    def feed_forward(self, x, p, layer):
        if layer in self.moe["dense_layers"]:
            return super().feed_forward(x, p, layer)
        path, rows = f"layers.{layer}.moe", x.flatten(0, 1)
        routing = Routing(F.linear(rows.float(), p[path + ".router.weight"].float()), x.shape[0], self.moe, self.biases.get(layer))
        self.routing[layer] = routing
        stacks = (p[f"{path}.experts.{name}.weight"].unflatten(0, (routing.of, -1)) for name in ("gate_up", "down"))
        y = self.multiply(rows, routing, *stacks)
        if self.moe["shared_intermediate_size"] > 0:
            y = y + self.mlp(rows, p, path + ".shared")
        return y.view_as(x)

    @staticmethod
    def loop(rows, routing, gate_up, down):
        out = torch.zeros_like(rows)
        for expert, (first, second) in enumerate(zip(gate_up.unbind(), down.unbind())):
            token, choice = (routing.experts == expert).nonzero(as_tuple=True)
            gate, up = F.linear(rows[token], first).chunk(2, -1)
            inner = F.silu(gate) * up * routing.weights[token, choice].to(rows.dtype).unsqueeze(1)
            out = out.index_add(0, token, F.linear(inner, second))
        return out

    @staticmethod
    def grouped(rows, routing, gate_up, down):
        order = routing.experts.flatten().argsort(stable=True)
        token, ends = order // routing.k, routing.counts.sum((0, 1)).cumsum(0).int()
        gate, up = F.grouped_mm(rows[token], gate_up.mT, offs=ends).chunk(2, -1)
        inner = F.silu(gate) * up * routing.weights.flatten()[order].to(rows.dtype).unsqueeze(1)
        return torch.zeros_like(rows).index_add(0, token, F.grouped_mm(inner, down.mT, offs=ends))

    @torch.no_grad()
    def step_taken(self):
        for layer, bias in self.biases.items():
            load = sum(batch[layer].counts.sum((0, 1)) for batch in self.statistics)
            bias -= self.moe["bias_update_rate"] * (load * len(bias) - load.sum()).sign()

    @torch.no_grad()
    def take_statistics(self):
        """The statistics of the micro batches of a step, by layer, as in metrics.jsonl; and the smallest margin of any choice."""
        batches, self.statistics = self.statistics, []
        layers = [{"layer": layer, "load": sum(b[layer].counts.sum((0, 1)) for b in batches).tolist(),
                   "balance_loss": sum(b[layer].balance().item() for b in batches) / len(batches),
                   "sequence_balance_loss": sum(b[layer].sequence_balance().item() for b in batches) / len(batches),
                   "z_loss": sum(b[layer].z().item() for b in batches) / len(batches)} for layer in batches[0]]
        return layers, min(routing.margin() for b in batches for routing in b.values())


class RoutingComparison:
    """Differences of the statistics of routers of mantissa and PyTorch, step by step."""

    LOSSES = ("balance_loss", "sequence_balance_loss", "z_loss")

    def __init__(self):
        self.other_loads, self.largest, self.margin = 0, 0.0, float("inf")

    def add(self, ours, layers, margin):
        self.margin = min(self.margin, margin)
        for a, b in zip(ours, layers, strict=True):
            self.other_loads += a["layer"] != b["layer"] or a["load"] != b["load"]
            self.largest = max([self.largest, *(abs(a[name] - b[name]) / abs(b[name]) for name in self.LOSSES)])

    def summary(self):
        return {"layers_with_other_loads": self.other_loads, "largest_relative_auxiliary_loss_difference": self.largest, "smallest_margin": self.margin}

    def agrees(self, tolerance):
        return self.other_loads == 0 and self.largest <= tolerance
