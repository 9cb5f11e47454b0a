"""Reads files of mantissa, by its documentation and not by its code: checkpoints, and the order in which samples are drawn.

The formats are described in src/checkpoint/checkpoint_manifest.h and src/data/batch.h.
"""
import json
from pathlib import Path

import numpy as np
from safetensors import safe_open

LLMC_MAGIC = 20240520  # then version and count, in a header of 1,024 bytes
DTYPES = {"fp32": np.float32, "i32": np.int32}


class Checkpoint:
    """manifest.json and shards of one checkpoint folder."""

    def __init__(self, folder):
        self.folder = Path(folder)
        text = (self.folder / "manifest.json").read_text()
        self.manifest = json.loads(text[: text.rstrip("\n").rindex("\n")])  # the last line is the hash
        self.config = self.manifest["config"]
        self.tensors = {entry["name"]: entry for entry in self.manifest["tensors"]}

    def read(self, name):
        entry = self.tensors[name]
        out = np.empty(entry["shape"], DTYPES[entry["dtype"]])
        for piece in entry["pieces"]:
            ranges = list(zip(piece["start"], piece["size"]))
            box = "" if piece["size"] == entry["shape"] else "[" + ",".join(f"{s}:{s + n}" for s, n in ranges) + "]"
            with safe_open(self.folder / self.manifest["shards"][piece["shard"]]["file"], "numpy") as shard:
                out[tuple(slice(s, s + n) for s, n in ranges)] = shard.get_tensor(name + box)
        return out

    def masters(self):
        """The fp32 weights by parameter name."""
        return {name.removeprefix("master."): self.read(name) for name in self.tensors if name.startswith("master.")}

    def buffers(self):
        """Buffers, which are not trained, by name: "layers.0.moe.expert_bias"."""
        return {name.removeprefix("buffer."): self.read(name) for name in self.tensors if name.startswith("buffer.")}

    def vocab_size(self):
        tokenizer = self.manifest["tokenizer"]
        return self.config["model"]["vocab_size"] or (256 if tokenizer["type"] == "byte" else len(tokenizer["characters"]))


def philox_4x32_10(counter, key):
    """Philox4x32-10 of Salmon et al., SC'11."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


class Permutation:
    """The keyed bijection of [0, size) that orders the samples of one epoch."""

    ROUNDS, DATA_STREAM = 8, 2

    def __init__(self, size, seed, dataset, epoch):
        self.size, self.dataset, self.epoch = size, dataset, epoch
        self.key = seed ^ (epoch >> 32)
        bits = (size - 1).bit_length()
        self.left_bits, self.right_bits = bits // 2, bits - bits // 2

    def shuffle(self, value):
        left, right = value >> self.right_bits, value & ((1 << self.right_bits) - 1)
        for r in range(self.ROUNDS):
            index = (left if r % 2 else right) | (r << 32) | (self.dataset << 36)
            counter = (index & 0xFFFFFFFF, index >> 32, self.epoch & 0xFFFFFFFF, self.DATA_STREAM)
            word = philox_4x32_10(counter, (self.key & 0xFFFFFFFF, self.key >> 32))[0]
            if r % 2:
                right ^= word & ((1 << self.right_bits) - 1)
            else:
                left ^= word & ((1 << self.left_bits) - 1)
        return left << self.right_bits | right

    def __getitem__(self, index):
        value = self.shuffle(index)
        while value >= self.size:
            value = self.shuffle(value)
        return value


class TrainingBatches:
    """The batches of a run with one training file (text, nanoGPT or llm.c ids) without document options."""

    def __init__(self, checkpoint):
        config = checkpoint.config
        data, training = config["data"], config["training"]
        self.ids = training_tokens(data, checkpoint.manifest["tokenizer"])
        for option in ("append_eod", "mask_eod_loss", "reset_position_ids", "document_mask"):
            if data[option]:
                raise SystemExit(f"data.{option} is not supported by this comparison")
        self.length, self.sequences, self.seed = training["seq_len"], training["global_batch_size"], training["seed"]
        self.samples = (len(self.ids) - 1) // self.length

    def step(self, step):
        """Tokens [global batch, T + 1] of a step, counted from 0."""
        rows = []
        for counter in range(step * self.sequences, (step + 1) * self.sequences):
            sample = Permutation(self.samples, self.seed, 0, counter // self.samples)[counter % self.samples]
            rows.append(self.ids[sample * self.length : sample * self.length + self.length + 1])
        return np.stack(rows).astype(np.int64)


def training_tokens(data, tokenizer):
    paths = [data["path"]] if data["path"] else [entry["path"] for entry in data["train"]]
    if len(paths) != 1 or not Path(paths[0]).is_file():
        raise SystemExit(f"this comparison reads one training file, not {paths}")
    path = Path(paths[0])
    if path.suffix == ".bin":
        llmc = np.fromfile(path, np.uint32, count=1)[0] == LLMC_MAGIC
        ids = np.fromfile(path, np.uint16 if llmc or data["dtype"] == "u16" else np.uint32, offset=1024 if llmc else 0)
    else:
        ids = encode(path.read_bytes(), tokenizer)
    return ids[: int(len(ids) * (1 - data["valid_fraction"]))] if data["path"] else ids


def encode(raw, tokenizer):
    if tokenizer["type"] == "byte":
        return np.frombuffer(raw, np.uint8)
    points = np.array([ord(c) for c in raw.decode()])
    return np.searchsorted(np.array(tokenizer["characters"]), points)
