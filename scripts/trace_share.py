#!/usr/bin/env python3
"""Says where the time of each rank went in the steps that training.trace kept.

    scripts/trace_share.py RUN...        folders with trace-rank*.json, as runs/NAME

Of the thread that computes, between the beginning and the end of its forward and backward passes and of the optimizer, as shares: kernels;
exchanges, in which it sends, receives and adds up itself; waits for what travels beside it; the rest. `beside` is what another thread
exchanged meanwhile. Then the exchanges of activations among tensor ranks in a forward and in a backward pass of one micro batch, in all
and for each layer, those of embedding and loss among them.
"""
import json
import sys
from pathlib import Path

PASSES = ("forward", "backward", "optimizer")
KINDS = {"compute": "kernels", "communication": "exchanges", "wait": "waits"}
ROUNDING = 0.01  # rounding of begin and duration, in microseconds


def outermost(spans):
    """Spans that lie in no other: the kernels of a sum over ranks are part of its exchange."""
    end = float("-inf")
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        if span["ts"] >= end - ROUNDING:
            end = span["ts"] + span["dur"]
            yield span


def shares(events):
    """Figures of one rank: shares of its time by kind, milliseconds of a step, activations' exchanges by pass."""
    computing = {span["tid"] for span in events if span["name"] == "forward"}
    passes = sorted((span for span in events if span["name"] in PASSES), key=lambda span: span["ts"])
    total = sum(span["dur"] for span in passes)
    times = dict.fromkeys((*KINDS.values(), "beside"), 0.0)
    exchanges = dict.fromkeys(PASSES, 0)
    inner = [span for span in events if span["name"] not in PASSES]
    for span in inner:
        if span["tid"] not in computing and span["cat"] == "communication":
            times["beside"] += span["dur"]
    own = list(outermost(span for span in inner if span["tid"] in computing))
    at = 0
    for span in own:
        while at + 1 < len(passes) and passes[at + 1]["ts"] <= span["ts"] + ROUNDING:
            at += 1
        if not passes[at]["ts"] - ROUNDING <= span["ts"] < passes[at]["ts"] + passes[at]["dur"]:
            continue  # between steps
        times[KINDS[span["cat"]]] += span["dur"]
        exchanges[passes[at]["name"]] += span["cat"] == "communication" and span["name"] == "activations"
    count = {name: sum(span["name"] == name for span in passes) for name in PASSES}
    return {
        "ms": total / 1e3 / count["optimizer"],
        "shares": {kind: time / total for kind, time in times.items()},
        "exchanges": {name: exchanges[name] / count[name] for name in ("forward", "backward")},
    }


def report(run):
    traces = sorted(run.glob("trace-rank*.json"))
    if not traces:
        sys.exit(f"{run}: no trace-rank*.json; train with --set 'training.trace={{\"steps\":[10,12]}}'")
    config = json.loads((run / "config.json").read_text())
    layers, (first, last) = config["model"]["num_layers"], config["training"]["trace"]["steps"]
    print(f"{run} | steps {first} to {last} | shares of the time of the computing thread | exchanges of activations a micro batch")
    print("rank  ms/step  kernels  exchanges  waits   rest  beside | forward (a layer)  backward (a layer)")
    for rank, trace in enumerate(traces):
        found = shares(json.loads(trace.read_text())["traceEvents"])
        kernels, exchanges, waits, beside = (found["shares"][kind] for kind in ("kernels", "exchanges", "waits", "beside"))
        counts = "".join(f"{count:9g} ({count / layers:.2f})" for count in found["exchanges"].values())
        print(f"{rank:4} {found['ms']:8.1f} {kernels:8.3f} {exchanges:10.3f} {waits:6.3f} {1 - kernels - exchanges - waits:6.3f} {beside:7.3f} |{counts}")


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__.strip())
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    for run in sys.argv[1:]:
        report(Path(run))


if __name__ == "__main__":
    main()
