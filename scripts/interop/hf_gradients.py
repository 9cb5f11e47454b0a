"""Gradients of a model of transformers under the names and in the layouts of mantissa's parameters.

mantissa keeps in one matrix each: q, k and v; gate and up; the experts of a layer, one below the other. GPT-2's matrices are transposed,
and the columns of gpt-oss' gate_up are taken apart, as they alternate between gate and up.
"""
import torch
import torch.nn.functional as F


def losses(model, rows):
    """The mean loss over the targets of tokens [B, T + 1], and what else the config asks for."""
    tokens = torch.from_numpy(rows)
    out = model(tokens[:, :-1])
    loss = F.cross_entropy(out.logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    asked = getattr(model.config, "output_router_logits", False)
    return loss, model.config.router_aux_loss_coef * balance_loss(model, out) if asked else torch.zeros(())


def balance_loss(model, out):
    """Equals transformers' for one layer with experts. It takes several layers as one; mantissa has the mean over layers."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
    layers = [logits for logits in out.router_logits if logits is not None]
    if len(layers) == 1:
        return out.aux_loss
    return sum(load_balancing_loss_func((logits,), model.num_experts, model.num_experts_per_tok) for logits in layers) / len(layers)


def loss_gradients(model, rows):
    """Gradients of the sum of losses(), by the model's own names."""
    model.zero_grad()
    sum(losses(model, rows)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def as_mantissa(gradients, architecture):
    """NumPy arrays by mantissa's names; every gradient goes somewhere."""
    left = dict(gradients)
    named = gpt2_names(left) if architecture == "gpt2" else rms_names(left)
    if left:
        raise ValueError(f"gradients without a place: {sorted(left)}")
    return {name: tensor.contiguous().numpy() for name, tensor in named.items()}


def gpt2_names(left):
    named, layers = {}, 1 + max(int(name.split(".")[2]) for name in left if ".h." in name)
    places = [("transformer.wte", "embed"), ("transformer.wpe", "position"), ("transformer.ln_f", "final_norm"), ("lm_head", "output")]
    for i in range(layers):
        inner = {"ln_1": "attn_norm", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.out", "ln_2": "mlp_norm", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
        places += [(f"transformer.h.{i}.{theirs}", f"layers.{i}.{ours}") for theirs, ours in inner.items()]
    for theirs, ours in places:
        for part in (".weight", ".bias"):
            if theirs + part in left:
                tensor = left.pop(theirs + part)
                named[ours + part] = tensor.T if ".c_" in theirs and part == ".weight" else tensor
    return named


def rms_names(left):
    named, layers = {}, 1 + max(int(name.split(".")[2]) for name in left if ".layers." in name)

    def move(ours, *theirs):
        for part in (".weight", ".bias"):
            if theirs[0] + part in left:
                named[ours + part] = torch.cat([left.pop(name + part) for name in theirs])

    move("embed", "model.embed_tokens")
    move("final_norm", "model.norm")
    move("output", "lm_head")
    for i in range(layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        move(ours + "attn_norm", theirs + "input_layernorm")
        move(ours + "mlp_norm", theirs + "post_attention_layernorm")
        move(ours + "attn.qkv", *(f"{theirs}self_attn.{part}_proj" for part in "qkv"))
        move(ours + "attn.out", theirs + "self_attn.o_proj")
        move(ours + "attn.q_norm", theirs + "self_attn.q_norm")
        move(ours + "attn.k_norm", theirs + "self_attn.k_norm")
        move(ours + "mlp.gate_up", theirs + "mlp.gate_proj", theirs + "mlp.up_proj")
        move(ours + "mlp.down", theirs + "mlp.down_proj")
        for router in ("mlp.gate", "mlp.router", "block_sparse_moe.gate"):
            move(ours + "moe.router", theirs + router)
        if theirs + "self_attn.sinks" in left:
            named[ours + "attn.sinks"] = left.pop(theirs + "self_attn.sinks")
        move_experts(left, named, theirs, ours + "moe.experts.")
    return named


def move_experts(left, named, theirs, ours):
    stacked = theirs + "mlp.experts."
    if stacked + "gate_up_proj_bias" in left:  # gpt-oss: [E, in, out], gate and up in turn
        weight, bias = left.pop(stacked + "gate_up_proj").mT, left.pop(stacked + "gate_up_proj_bias")
        named[ours + "gate_up.weight"] = torch.cat((weight[:, 0::2], weight[:, 1::2]), 1).flatten(0, 1)
        named[ours + "gate_up.bias"] = torch.cat((bias[:, 0::2], bias[:, 1::2]), 1).flatten()
        named[ours + "down.weight"] = left.pop(stacked + "down_proj").mT.flatten(0, 1)
        named[ours + "down.bias"] = left.pop(stacked + "down_proj_bias").flatten()
    elif stacked + "gate_up_proj" in left:  # transformers 5: [E, out, in]
        named[ours + "gate_up.weight"] = left.pop(stacked + "gate_up_proj").flatten(0, 1)
        named[ours + "down.weight"] = left.pop(stacked + "down_proj").flatten(0, 1)
    else:  # transformers 4: one by one
        for place, parts in (("mlp.experts", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe.experts", ("w1", "w3", "w2"))):
            experts = len({name for name in left if name.startswith(f"{theirs}{place}.") and name.endswith(parts[0] + ".weight")})
            gate, up, down = ([left.pop(f"{theirs}{place}.{e}.{part}.weight") for e in range(experts)] for part in parts)
            if experts:
                named[ours + "gate_up.weight"] = torch.cat([matrix for pair in zip(gate, up) for matrix in pair])
                named[ours + "down.weight"] = torch.cat(down)
