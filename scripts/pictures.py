#!/usr/bin/env python3
"""Draws the pictures of the documents, docs/pictures/*.svg: the layers, from the list in check.py; the life of a weight; and the losses of
the recipes, from docs/pictures/losses.csv.

    scripts/pictures.py    writes all of them; check.py fails where a committed picture is not what this script draws
"""
import csv
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent.parent / "docs/pictures"

INK, FAINT, LINE = "#1f2328", "#57606a", "#8c959f"
PROGRAM, MODEL, NUMBERS, MACHINES, FILES = "#ddf4ff", "#dafbe1", "#fff1c2", "#ffe2d9", "#eaeef2"

# Color and a few words for every layer.
NOTES = {
    "tools": (PROGRAM, "the command line"),
    "train": (PROGRAM, "the loop: steps, evaluation, saves"),
    "plan": (PROGRAM, "memory, bytes and time of a run"),
    "hf": (FILES, "Hugging Face folders, export, verify"),
    "metrics": (FILES, "metrics, traces, the run folder"),
    "checkpoint": (FILES, "complete or invisible folders"),
    "optim": (MODEL, "AdamW on sharded fp32 masters"),
    "config": (PROGRAM, "the configuration of a run"),
    "models": (MODEL, "the GPT, dense or with experts"),
    "nn": (MODEL, "modules, parameters, shards"),
    "ops": (MODEL, "forward and gradient side by side"),
    "autograd": (MODEL, "the tape"),
    "precision": (NUMBERS, "the plan"),
    "io": (FILES, "files, locks"),
    "data": (FILES, "token files"),
    "job": (MACHINES, "how processes find and watch each other"),
    "comm": (MACHINES, "collectives over UCX, threads and NCCL"),
    "backend": (MACHINES, "kernels: reference, fast CPU, CUDA"),
    "tensor": (NUMBERS, "tensors and quantized tensors"),
    "text": (FILES, "tokenizers"),
    "json": (FILES, "JSON, fields of configurations"),
    "formats": (NUMBERS, "element and scale codes, in integers"),
    "base": (FILES, "errors, log, threads, random numbers"),
}
LEGEND = [(PROGRAM, "program"), (MODEL, "model and training"), (NUMBERS, "number formats"), (MACHINES, "devices and ranks"), (FILES, "files and text")]


class Drawing:
    """An SVG on a white ground, which pages with a dark background show, too."""

    def __init__(self, width, height, title):
        self.size, self.title, self.parts = (width, height), title, []

    def box(self, x, y, width, height, fill):
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{LINE}"/>')

    def text(self, x, y, words, size=13, color=INK, anchor="start", bold=False):
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>{escape(words)}</text>')

    def line(self, points, color=LINE, width=1.5, dashed=False, arrow=False):
        """A line through points, with a head at the last one if it is an arrow."""
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dash}/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
            left, right = (x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx)
            self.parts.append(f'<polygon points="{x:g},{y:g} {left[0]:g},{left[1]:g} {right[0]:g},{right[1]:g}" fill="{color}"/>')

    def dot(self, x, y, fill):
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="4.5" fill="{fill}" fill-opacity="0.55"/>')

    def svg(self):
        width, height = self.size
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
                f'font-family="Helvetica, Arial, sans-serif">')
        ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", ground, *self.parts, "</svg>"]) + "\n"


def layers_picture(layers):
    """Draws the layers, highest first. layers: lowest first, each a list of the siblings of a rank."""
    left, top, width, step = 20, 56, 720, 32
    drawing = Drawing(width + 2 * left, top + step * len(layers) + 16, "The layers of mantissa: a file includes its own layer and those below")
    x = left
    for fill, words in LEGEND:
        drawing.box(x, 16, 16, 16, fill)
        drawing.text(x + 22, 29, words)
        x += 48 + 7 * len(words)
    for row, siblings in enumerate(reversed(layers)):
        y, share = top + step * row, width / len(siblings)
        for column, name in enumerate(siblings):
            fill, note = NOTES[name]
            x = left + column * share
            drawing.box(round(x), y, round(share) - (4 if column + 1 < len(siblings) else 0), step - 4, fill)
            drawing.text(round(x) + 10, y + 19, name, bold=True)
            drawing.text(round(x) + (110 if len(siblings) < 3 else 86), y + 19, note, size=13 if len(siblings) < 3 else 11, color=FAINT)
    return drawing.svg()


STAGES = [  # title, lines, color; the first four are the upper row
    ("1  fp32 master", ["in the optimizer shard of its", "rank, beside both moments:", "12 bytes per weight"], MODEL),
    ("2  bf16", ["the rounded master, which", "every recipe quantizes:", "2 bytes"], NUMBERS),
    ("3  codes and scales", ["MXFP8: E4M3 in 32x32 tiles", "MXFP4: E2M1 in 1x32 blocks", "8.008 or 4.25 bits"], NUMBERS),
    ("4  all-gather", ["fp8_param_gather: codes", "and scales, 1.001 bytes;", "otherwise bf16, 2 bytes"], MACHINES),
    ("5  GEMM operands", ["fprop and dgrad multiply", "by the codes; wgrad makes", "an fp32 gradient"], MODEL),
    ("6  packed export", ["the same codes and scales,", "named as the server's", "convention names them"], FILES),
    ("7  server", ["multiplies by the weights", "that training multiplied by"], PROGRAM),
]


def weight_picture():
    """Draws the stages of a weight in two rows, and the update that leads from the GEMMs back to the master."""
    width, height, gap, left, rows = 206, 92, 32, 56, (24, 172)
    drawing = Drawing(996, 324, "The life of a weight, from the fp32 master to the server")
    places = [(left + (width + gap) * (i % 4), rows[i // 4]) for i in range(len(STAGES))]
    for (x, y), (title, lines, fill) in zip(places, STAGES):
        drawing.box(x, y, width, height, fill)
        drawing.text(x + 12, y + 24, title, size=15, bold=True)
        for number, words in enumerate(lines):
            drawing.text(x + 12, y + 45 + 17 * number, words)
    for i in (0, 1, 2, 4, 5):
        x, y = places[i]
        drawing.line([(x + width, y + height / 2), (x + width + gap - 2, y + height / 2)], color=INK, arrow=True)
    right, middle = places[3][0] + width / 2, (rows[0] + height + rows[1]) / 2
    drawing.line([(right, rows[0] + height), (right, middle), (left + width / 2, middle), (left + width / 2, rows[1] - 2)], color=INK, arrow=True)
    drawing.line([(left, rows[1] + 46), (28, rows[1] + 46), (28, rows[0] + 46), (left - 2, rows[0] + 46)], color=INK, arrow=True)
    drawing.text(34, middle + 4, "AdamW", color=FAINT)
    from_x, to_x, below = places[4][0] + width - 20, places[5][0] + 20, rows[1] + height
    drawing.line([(from_x, below), (from_x, below + 16), (to_x, below + 16), (to_x, below)], dashed=True)
    drawing.text((from_x + to_x) / 2, below + 38, "mantissa verify compares both, bit for bit", anchor="middle", bold=True)
    return drawing.svg()


def losses_picture(table):
    """Draws the loss of each seed as a dot and the mean of a recipe as a bar. table: lines of losses.csv."""
    rows = list(csv.reader(line for line in table.splitlines() if not line.startswith("#")))[1:]
    losses = {recipe: [float(loss) for loss in seeds] for recipe, *seeds in rows}
    left, right, top, step, low, high = 200, 700, 62, 30, 1.65, 1.69
    bottom = top + step * len(losses)
    drawing = Drawing(800, bottom + 44, "Validation loss of the recipes over five seeds")

    def place(loss):
        return round(left + (right - left) * (loss - low) / (high - low), 1)

    drawing.text(20, 26, "Validation loss after 1,000 steps: five seeds (dots) and their mean (bar)", size=15, bold=True)
    drawing.text(right + 20, top - 12, "mean", color=FAINT)
    for tick in range(5):
        x = place(low + tick / 100)
        drawing.line([(x, top - 4), (x, bottom)], color="#d0d7de", width=1)
        drawing.text(x, bottom + 20, f"{low + tick / 100:.2f}", color=FAINT, anchor="middle")
    base = place(sum(losses["high"]) / len(losses["high"]))
    drawing.line([(base, top - 4), (base, bottom)], dashed=True)
    for row, (recipe, seeds) in enumerate(losses.items()):
        y, mean = top + step * row + step // 2, sum(seeds) / len(seeds)
        drawing.text(20, y + 4, recipe)
        for loss in seeds:
            drawing.dot(place(loss), y, "#0969da")
        drawing.line([(place(mean), y - 9), (place(mean), y + 9)], color=INK, width=3)
        drawing.text(right + 20, y + 4, f"{mean:.4f}")
    return drawing.svg()


def pictures(layers):
    """The text of every picture, by the name of its file."""
    return {
        "layers.svg": layers_picture(layers),
        "weight.svg": weight_picture(),
        "losses.svg": losses_picture((FOLDER / "losses.csv").read_text()),
    }


def main():
    from check import layer_ranks  # check.py imports this module

    for name, svg in pictures(layer_ranks()).items():
        (FOLDER / name).write_text(svg)


if __name__ == "__main__":
    main()
