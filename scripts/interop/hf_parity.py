#!/usr/bin/env python3
"""Holds mantissa's reading and export of an architecture of models against transformers.

    .venv-interop/bin/python scripts/interop/hf_parity.py --mantissa build/release/bin/mantissa llama

Every case of hf_models.py: transformers writes a random model, mantissa tells the log-probabilities of some tokens, goes on after them, takes
one training step, and exports the model, which transformers reads again. Log-probabilities in fp32 agree to 1e-4, gradients to 1e-3
of their root mean square, tensors that were not trained to the byte. Then, for every kind of rotation, log-probabilities of 16,384 tokens, to 1e-4
as well; and, where output_router_logits asks for the balance loss of experts, both losses of the training step, to 1e-5, and the gradients of their
sum. Prints a line per case, and exits with 1 if something differs.
"""
import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save

from hf_gradients import as_mantissa, loss_gradients, losses
from hf_models import ARCHITECTURES, FIFTH, load, likeliest, log_probabilities, make, pairwise, prompts
from mantissa_program import Failed, Mantissa, first_step
from mx_numpy import Folder, packed_weights

LOG_PROBABILITY, GRADIENT, LOSS = 1e-4, 1e-3, 1e-5  # tolerances
CONTINUED = 12  # tokens
FAR = 16384  # tokens of the longest prompt
EDGES = ("qwen3_moe", "mixtral", "gpt_oss")  # rounding may decide which experts are chosen, or on which side of a clamp a value is
SIDE_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def require(holds, *what):
    if not holds:
        raise Failed(" ".join(map(str, what)))


def apart(ours, theirs, tolerance, what):
    """The largest difference of log-probabilities."""
    worst = max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True))
    require(worst <= tolerance, f"{what}: log-probabilities differ by {worst:.2e}, more than {tolerance:.0e}")
    return worst


def gradients_apart(ours, theirs):
    """The largest relative root mean square of a tensor's difference, and its name."""
    require(ours.keys() == theirs.keys(), "gradients of other tensors:", sorted(ours.keys() ^ theirs.keys()))
    worst = 0.0, ""
    for name, expected in theirs.items():
        found = ours[name]
        require(found.shape == expected.shape, f"gradient of {name} is {found.shape}, not {expected.shape}")
        size = np.sqrt(np.mean(np.square(expected, dtype=np.float64)))
        require(size > 0, f"gradient of {name} is zero and shows nothing")
        worst = max(worst, (float(np.sqrt(np.mean(np.square(found - expected, dtype=np.float64))) / size), name))
    return worst


def same_gradients(mantissa, made, checkpoint):
    """Says in words by how much gradients differ. A value on an edge changes all of them: then those of other tokens agree."""
    for seed in (2, 3) if made.architecture in EDGES else (2,):
        gradients, rows = mantissa.one_step(checkpoint, made.case["vocab_size"], seed)
        worst, name = gradients_apart(gradients, as_mantissa(loss_gradients(made.model, rows), made.architecture))
        if worst <= GRADIENT:
            return f"gradients {worst:.1e} ({name}" + (")" if seed == 2 else ", of other tokens after an edge)")
    raise Failed(f"gradient of {name} differs by {worst:.2e} of its size, more than {GRADIENT:.0e}")


def stored_names(made):
    """Tensors that an export has to hold, by their names there: with GPT-2's prefix, without its buffers and gpt-oss' blocks."""
    names = {}
    for name in Folder(made.folder).names():
        if made.architecture == "gpt2":
            if name.endswith((".attn.bias", ".attn.masked_bias")):
                continue
            names[name if name.startswith(("transformer.", "lm_head.")) else "transformer." + name] = name
        elif not name.endswith("_scales"):
            names[name.removesuffix("_blocks")] = name
    return names


def same_tensors(made, export):
    """A model that was not trained goes out as it came in."""
    before, after, names = Folder(made.folder), Folder(export), stored_names(made)
    packed = packed_weights(before)
    require(after.names() == names.keys(), "export has other tensors:", sorted(after.names() ^ names.keys()))
    for name, source in names.items():
        if before.dtype(source) == "F16":
            same = before.bytes(source)[1] == after.bytes(name)[1] and np.array_equal(before.values(source), after.values(name))
        elif name in packed:
            same = after.dtype(name) == "BF16" and np.array_equal(packed[name][0], after.values(name))
        else:
            same = before.bytes(source) == after.bytes(name)
        require(same, f"{name}: {before.dtype(source)} {before.bytes(source)[1]} went out as other {after.dtype(name)} {after.bytes(name)[1]}")
    same_side_files(made, export)


def same_side_files(made, export):
    for file in SIDE_FILES:
        source = made.folder / file
        require(not source.exists() or source.read_bytes() == (export / file).read_bytes(), f"{file} did not go along byte for byte")


def same_header(export):
    """safetensors takes the files, and heads them as they are headed."""
    for file in sorted(export.glob("*.safetensors")):
        raw = file.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        require(save(load_file(file), {"format": "pt"})[:end] == raw[:end], f"safetensors heads {file.name} otherwise")


def same_words(made, export):
    if made.case["vocab_size"] == 259:
        before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (made.folder, export))
        text = "Straße <|begin|> \n\t12 ⅔ 日本"
        require(before(text)["input_ids"] == after(text)["input_ids"], "the exported tokenizer has other ids")


def check(mantissa, made):
    """Says what agreed, and by how much."""
    tokens = prompts(made.case["vocab_size"])
    theirs = [log_probabilities(made.model, ids) for ids in tokens]
    ours = mantissa.log_probabilities(made.folder, tokens, "--dtype", "fp32")
    outcome = f"eval {apart(ours, theirs, LOG_PROBABILITY, 'eval'):.1e}"
    same_continuation(mantissa, made, made.folder, tokens[1])
    outcome += f" export {exported(mantissa, made, made.folder, tokens, theirs):.1e}"
    return f"{outcome} {same_gradients(mantissa, made, made.folder)}"


def same_continuation(mantissa, made, checkpoint, tokens):
    """Compares generate, which keeps the keys and values of earlier tokens."""
    ours, theirs = mantissa.likeliest(checkpoint, tokens, CONTINUED, "--dtype", "fp32"), likeliest(made.model, tokens, CONTINUED)
    require(ours == theirs, f"generate goes on with {ours}, transformers with {theirs}")


def exported(mantissa, made, checkpoint, tokens, theirs):
    """Says how far log-probabilities of the export are from those of the model that was exported."""
    export = mantissa.work / "export"
    mantissa.run("export", checkpoint, "--output", export)
    mantissa.run("verify", export, "--against", checkpoint)
    same_tensors(made, export)
    same_header(export)
    same_words(made, export)
    model, complaints = load(export)
    require(not complaints, "from_pretrained:", complaints)
    require(type(model) is type(made.model), f"the export is a {type(model).__name__}")
    return apart([log_probabilities(model, ids) for ids in tokens], theirs, LOG_PROBABILITY, "export")


def far_cases(architecture):
    """One per kind of rotation, without an attention_factor: one of 1.3 enlarges scores, and with them the rounding of fp32 sums to 1.4e-4."""
    kinds = {"llama": ("default", "llama3", "yarn"), "qwen3": ("yarn mscale",)}
    return [{**pairwise(architecture)[0], "positions": FAR, "rope": kind} for kind in kinds.get(architecture, ())]


def check_far(mantissa, made):
    """Says what agreed, and by how much, far beyond the positions that other cases reach."""
    tokens = [np.random.default_rng(5).integers(0, made.case["vocab_size"], FAR).tolist()]
    made.model.set_attn_implementation("sdpa")  # without matrices of all pairs of tokens, which take gigabytes
    theirs = [log_probabilities(made.model, ids) for ids in tokens]
    ours = mantissa.log_probabilities(made.folder, tokens, "--dtype", "fp32")
    return f"{FAR} tokens {apart(ours, theirs, LOG_PROBABILITY, f'{FAR} tokens'):.1e}"


def balance_cases(architecture):
    """One layer with experts, whose balance loss is that of transformers, and several, of which mantissa has the mean."""
    ask = {**pairwise(architecture)[0], "balance": 0.5}
    one = {"mixtral": {"layers": 1}, "qwen3_moe": {"dense": "first"}}
    if FIFTH:
        one["gpt_oss"] = {"layers": 1}  # transformers 4 takes the weights of its chosen experts for logits
    return [{**ask, **one[architecture]}, ask] if architecture in one else []


def check_balance(mantissa, made):
    """Returns how well each thing agrees, and how far gradients are from those without the balance loss, which must show."""
    after = mantissa.one_step(made.folder, made.case["vocab_size"], 2, checkpoint=True)
    gradients, rows = first_step(after)
    events = [json.loads(line) for line in (after.folder.parent.parent / "metrics.jsonl").read_text().splitlines()]
    step = next(event for event in events if event["type"] == "step")
    loss, balance = (value.item() for value in losses(made.model, rows))
    own = after.config["model"]["moe"]["aux_loss_coef"] * sum(layer["balance_loss"] for layer in step["moe"])
    for what, ours, theirs in (("loss", step["loss"], loss), ("balance loss", own, balance)):
        require(abs(ours - theirs) <= LOSS * theirs, f"the {what} is {ours:.9f}, that of transformers {theirs:.9f}")
    worst, name = gradients_apart(gradients, as_mantissa(loss_gradients(made.model, rows), made.architecture))
    require(worst <= GRADIENT, f"gradient of {name} differs by {worst:.2e} of its size")
    made.model.config.output_router_logits = False
    without, name_without = gradients_apart(gradients, as_mantissa(loss_gradients(made.model, rows), made.architecture))
    require(without > 100 * GRADIENT, f"the balance loss changes no gradient by more than {without:.2e} ({name_without})")
    return (f"losses {abs(step['loss'] - loss) / loss:.1e} {abs(own - balance) / balance:.1e} (of {balance:.4f}) gradients {worst:.1e} ({name}), "
            f"without balance loss {without:.1e} ({name_without})")


def outcome_of(mantissa, made):
    if "positions" in made.case:
        return check_far(mantissa, made)
    return check_balance(mantissa, made) if "balance" in made.case else check(mantissa, made)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mantissa", required=True, help="the program")
    parser.add_argument("--case", type=int, action="append", help="only these, by number")
    parser.add_argument("architecture", choices=ARCHITECTURES)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    versions = f"{args.architecture} | transformers {transformers.__version__} torch {torch.__version__}"
    failures = 0
    for number, case in enumerate(pairwise(args.architecture) + far_cases(args.architecture) + balance_cases(args.architecture)):
        if args.case and number not in args.case:
            continue
        with tempfile.TemporaryDirectory(prefix="hf-parity-") as work:
            made = make(args.architecture, case, Path(work) / "model")
            try:
                outcome = outcome_of(Mantissa(args.mantissa, work), made)
            except Failed as failure:
                outcome, failures = f"FAILED: {failure}", failures + 1
        print(f"{versions} | {number}: {made.label()} | {outcome}", flush=True)
    print(f"hf_parity: {args.architecture}: {failures} cases failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
