"""Plants faults in a GGUF file, to see which of verify, the package gguf and llama.cpp notice them."""
import gguf
import numpy as np

from gguf_cases import FAMILIES, MXFP4, PACKED, SIZES, Errors, converted, decoded, emulated, same_values, served
from gguf_text import ROOT, learned, own_tokenizer
from llama_cpp import Llama
from mantissa_program import Failed
from mx_numpy import Folder

Q, DOWN = "blk.0.attn_q.weight", "blk.0.ffn_down_exps.weight"
EXTRA_NAMES, FOUR_BITS, OWN_HASH, TOKENS = "general.tensor_extra.name", "general.tensor_extra.prec_a4", "mantissa.xxh64", "tokenizer.ggml.tokens"
BLOCK = 17


class File:
    """The bytes of a GGUF file, and where tensors and keys are."""

    def __init__(self, path):
        self.reader, self.bytes = gguf.GGUFReader(path), np.fromfile(path, np.uint8)

    def tensor(self, name):
        found = next(tensor for tensor in self.reader.tensors if tensor.name == name)
        shape = [int(size) for size in reversed(found.shape)]
        return self.bytes[found.data_offset : found.data_offset + found.n_bytes].reshape(*shape[:-1], -1)

    def key(self, name):
        """The bytes of the key's name and of its value."""
        field = self.reader.fields[name]
        first = int(field.offset)
        return self.bytes[first : first + sum(part.nbytes for part in field.parts)]

    def rename(self, name):
        raw = self.key(name)
        raw[8 + len(name) - 1] ^= 1  # behind the length


def nibbles(file):
    blocks = file.tensor(Q).reshape(-1, BLOCK)
    blocks[:, 1:] = blocks[:, 1:] << 4 | blocks[:, 1:] >> 4


def permutation(file):
    """Rows of q as folders have them."""
    rows = file.tensor(Q)
    half = SIZES["head_dim"] // 2
    rows[:] = rows.reshape(-1, half, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape).copy()


def scale(file):
    """One block has the scale of the next, which is another."""
    scales = file.tensor(Q).reshape(-1, BLOCK)[:, 0]
    at = int(np.flatnonzero(scales[1:] != scales[:-1])[0])
    scales[at] = scales[at + 1]


def scales(file):
    column = file.tensor(Q).reshape(-1, BLOCK)[:, 0]
    column[:] = np.roll(column, 1)


def expert(file):
    experts = file.tensor(DOWN)
    experts[[0, 1]] = experts[[1, 0]]


def tokens(file):
    """Every token has the id of the one before it."""
    parts = [bytes(part) for part in file.reader.fields[TOKENS].parts]
    front = len(parts) - 2 * len(file.reader.fields[TOKENS].data)
    file.key(TOKENS)[:] = np.frombuffer(b"".join(parts[:front] + parts[front + 2 :] + parts[front : front + 2]), np.uint8)


def four_bits(file):
    """Inputs of all tensors may have 4 bits, as in a file that says nothing of them."""
    file.rename(FOUR_BITS)
    file.rename(EXTRA_NAMES)


def half_a_pair(file):
    file.rename(FOUR_BITS)


PLANTS = {  # faults, and who does not notice: the package gguf, or llama.cpp on a CPU
    "nibbles exchanged": (nibbles, ()),
    "permutation of q left out": (permutation, ()),
    "one scale of a neighbor": (scale, ()),
    "scales of neighbors": (scales, ()),
    "two experts exchanged": (expert, ()),
    "tokens shifted by one": (tokens, ("gguf",)),
    "prec_a4 left out": (four_bits, ("llama.cpp",)),  # on a CPU nothing is rounded to 4 bits
    "prec_a4 left out, the names of its tensors not": (half_a_pair, ()),
}


class Good:
    """A model with all that can go wrong, its file, and what is expected of it."""

    def __init__(self, mantissa, program):
        work, self.mantissa, self.program = mantissa.work, mantissa, program
        tokenizer, text = own_tokenizer(mantissa), (ROOT / "README.md").read_text()
        (work / "text.txt").write_text(text)
        model = {**SIZES, **FAMILIES["mixtral"], "init_std": 0.1}
        self.run = learned(mantissa, {"path": str(work / "text.txt"), "tokenizer": str(tokenizer)}, 20, model | {"vocab_size": None}, MXFP4)
        self.file, self.hf, self.text = work / "good.gguf", work / "hf", text[:2000]
        mantissa.run("export", self.run, "--output", self.file, "--format", "gguf", *PACKED)
        mantissa.run("export", self.run, "--output", self.hf)
        mantissa.run("export", self.run, "--output", work / "mlx", "--format", "mlx", *PACKED)
        self.values = converted("mixtral", model, Folder(self.hf))
        self.ids = mantissa.token_ids(tokenizer, [self.text])[0]
        self.windows = [self.ids[first : first + 16] for first in range(0, 256, 16)]  # an input rounded to the other side is seen by all later tokens of a window
        if program:
            self.ours = np.concatenate(mantissa.log_probabilities(self.hf, self.windows, "--dtype", "fp32"))
            self.emulated = emulated(work / "mlx", True, self.windows)

    def package(self, file):
        same_values(decoded(file)[0], self.values, "the package gguf")

    def llama(self, file):
        with Llama(self.program, file) as llama:
            if llama.tokens(self.text) != self.ids:
                raise Failed("other ids of a text")
        Errors(served(self.program, file, self.windows), self.emulated, self.ours).check("llama.cpp")

    def readers(self):
        return {"gguf": self.package, **({"llama.cpp": self.llama} if self.program else {})}


def complaint(check, file):
    """Returns the failure of a check of a file; None: it passes."""
    try:
        check(file)
    except Failed as failure:
        return str(failure)
    return None


def check_plants(mantissa, program):
    good, lines = Good(mantissa, program), []
    for name, check in good.readers().items():
        if complaint(check, good.file):
            raise Failed(f"{name} complains of a file without a fault: {complaint(check, good.file)}")
    for fault, (plant, blind) in PLANTS.items():
        file, bad = File(good.file), mantissa.work / "bad.gguf"
        plant(file)
        file.bytes.tofile(bad)
        mantissa.run("verify", bad, exit_code=4)
        mantissa.run("verify", bad, "--against", good.run, exit_code=4)
        file.rename(OWN_HASH)  # so that only the contents can tell
        file.bytes.tofile(bad)
        told = mantissa.run("verify", bad, "--against", good.run, exit_code=1)
        row = {"verify": told.strip().splitlines()[-1].partition(": ")[2].partition(f" ({mantissa.work}")[0]}
        for name, check in good.readers().items():
            row[name] = complaint(check, bad)
            if (row[name] is None) != (name in blind):
                raise Failed(f"{fault}: {name} says {row[name]}")
        lines.append(f"  {fault} | " + " | ".join(f"{name}: {said or 'nothing'}" for name, said in row.items()))
    return f"{len(PLANTS)} faults noticed by verify with and without --against\n" + "\n".join(lines)
