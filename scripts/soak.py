#!/usr/bin/env python3
"""Trains on 4 ranks under `mantissa launch --max-restarts` while faults come, and compares every bit with a run that had none.

    scripts/soak.sh [--hours H] [--seed S] [--layout tensor|experts] [--first I --last J]

A round is a whole run of some hundred steps. Its faults are numbered across rounds, and the seed and its number make a fault, so that
--first and --last replay a range alone. They come in decks, first every harmless kind, under which no rank may fail, then those that may end
an attempt, each with the exit codes that docs/reliability.md allows. What the launcher no longer restarts is started again with --resume. A
finding ends the soak with code 1, keeps the run in build/soak/failed-* and prints the faults before it and a command that replays them.
"""
import argparse
import collections
import ctypes
import fcntl
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from soak_faults import DISK, HANG_S, HEARTBEAT_S, RANKS, STEPS, Faults, Finding, attempt

REPOSITORY = Path(__file__).resolve().parent.parent
LEAVE_S = 12  # for processes whose launcher has ended
LAYOUTS = {
    "tensor": {"model": {"intermediate_size": 128}, "parallel": {"data": 2, "tensor": 2, "sequence_parallel": True}},
    "experts": {"model": {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}}, "parallel": {"data": 4, "expert": 2}},
}


class Control(ctypes.Structure):  # the first fields of the memory that soak_shim.c reads
    _fields_ = [("mode", ctypes.c_int64), ("clock_offset_ns", ctypes.c_int64), ("hits", ctypes.c_uint64), ("violations", ctypes.c_uint64),
                ("name", ctypes.c_char * 4064)]


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return met


def config(layout):
    return {
        "model": {"hidden_size": 64, "num_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32, **LAYOUTS[layout]["model"]},
        "precision": {"recipe": "mxfp8", "fp8_param_gather": True},
        "training": {"steps": STEPS, "seq_len": 32, "micro_batch_size": 1, "grad_accum": None, "global_batch_size": 4, "accumulation": "tree",
                     "threads": 1, "replica_check_interval": 20},
        "parallel": {**LAYOUTS[layout]["parallel"], "heartbeat_timeout_s": HEARTBEAT_S, "init_timeout_s": 60},
        "data": {"path": "text.txt", "tokenizer": "byte"},
        "eval": {"interval": 50, "iters": 2},
        "checkpoint": {"interval": 20, "keep_best": True, "export": {}},
        "logging": {"tensorboard": False},
    }


class Run:
    """A run folder, and the launcher that trains in it now."""

    def __init__(self, soak, name):
        self.soak, self.name, self.folder = soak, name, soak.work / name
        self.lines, self.stalled, self.starts = [], threading.Event(), 0
        self.events, self.offset, self.port, self.trainers, self.done = [], 0, 0, {}, False

    def start(self):
        resume = ["--resume"] if list(self.folder.glob("checkpoints/step-*/manifest.json")) else ["--set", "checkpoint.resume=auto"]
        words = [self.soak.program, "launch", "--nproc-per-node", str(RANKS), "--max-restarts", "5", "--", "train", "run.json", "--set", f"logging.dir={self.name}", *resume]
        self.process = subprocess.Popen(words, cwd=self.soak.work, env=self.soak.shimmed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                                        preexec_fn=self.soak.enter_group)
        fcntl.fcntl(self.process.stdout, 1031, 4096)  # F_SETPIPE_SZ: a reader that stalls is soon waited for
        self.starts += 1
        self.lines.append(f"soak: start {self.starts}: {' '.join(words[1:])}")
        self.reader = threading.Thread(target=self.read, args=(self.process.stdout,), daemon=True)
        self.reader.start()

    def read(self, pipe):
        for line in pipe:
            while self.stalled.is_set():
                time.sleep(0.05)
            self.lines.append(line.decode(errors="replace").rstrip("\n"))

    def ranks(self):
        """Process numbers by rank, of those that live."""
        out = {}
        for pid in (attempt(lambda: Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()) or []):
            words = attempt(lambda: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")) or []
            variables = dict(word.split(b"=", 1) for word in words if b"=" in word)
            if b"RANK" in variables:
                out[int(variables[b"RANK"])] = int(pid)
                self.port = int(variables[b"MASTER_PORT"])
        return out

    def look(self):
        """Reads the lines that metrics.jsonl has gained. Returns these events."""
        text = attempt(lambda: (self.folder / "metrics.jsonl").read_bytes()[self.offset:]) or b""
        whole = text[:text.rfind(b"\n") + 1]
        self.offset += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.events += new
        if any(event["type"] == "start" for event in new):
            self.trainers = self.ranks()
        return new

    def last_step(self):
        return next((event["step"] for event in reversed(self.events) if event["type"] == "step"), 0)

    def is_training(self):
        """True once a step has followed the newest start, and its ranks live."""
        newest = next((event["type"] for event in reversed(self.events) if event["type"] in ("step", "start")), "")
        return newest == "step" and len(self.trainers) == RANKS and self.ranks() == self.trainers


class Soak(Faults):
    def __init__(self, arguments):
        self.given = arguments
        self.program = str(Path(arguments.mantissa).resolve())
        self.work = Path(tempfile.mkdtemp(prefix="soak-"))
        if arguments.isolated:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "soak", self.work], check=True)
        (self.work / "tmp").mkdir()
        (self.work / "text.txt").write_text("".join(path.read_text() for path in sorted(REPOSITORY.glob("src/job/*.*"))))
        (self.work / "run.json").write_text(json.dumps(config(arguments.layout)))
        (self.work / "control").write_bytes(bytes(ctypes.sizeof(Control) + (1 << 16)))
        with open(self.work / "control", "r+b") as file:
            self.control = Control.from_buffer(mmap.mmap(file.fileno(), 0))
        self.plain = {**os.environ, "TMPDIR": str(self.work / "tmp"), "OMP_NUM_THREADS": "1"}
        self.plain.pop("XDG_RUNTIME_DIR", None)
        if arguments.layout == "experts":
            self.plain["UCX_TLS"] = "tcp,self"  # the other layout has shared memory
        self.shimmed = {**self.plain, "LD_PRELOAD": str(Path(arguments.shim).resolve()), "SOAK_CONTROL": str(self.work / "control"), "SOAK_FOLDER": str(self.work)}
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self.group = Path(f"/sys/fs/cgroup/memory/soak-{arguments.layout}-{arguments.seed}")
        attempt(lambda: self.group.mkdir(exist_ok=True))
        self.number = arguments.first
        self.history = []  # (time, number, kind, codes, text)
        self.damaged = set()  # checkpoints
        self.forgotten = -1  # the latest deck before which a run ended without a fault
        self.trials, self.pauses, self.codes = collections.Counter(), collections.defaultdict(float), collections.Counter()
        self.totals = collections.Counter()
        self.windows = []  # steps during which lines of metrics.jsonl may be dropped
        self.samples = collections.defaultdict(list)  # by process
        self.began = time.monotonic()

    # The training.

    def enter_group(self):
        # A program that has just begun has no handlers: a wish for a save waits until the launcher takes signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        attempt(lambda: (self.group / "cgroup.procs").write_text(str(os.getpid())))

    def mantissa(self, *words, env=None):
        return subprocess.run([self.program, *words], cwd=self.work, env=env or self.plain, capture_output=True, text=True, check=False, timeout=HANG_S)

    def allowed(self, seconds):
        """Exit codes that the faults of these last seconds excuse."""
        now = time.monotonic()
        return set().union(*(codes for at, _, _, codes, _ in self.history if now - at < seconds))

    def note_attempts(self, run):
        """Looks at what the launcher said since the last look: the cause of each failed attempt, and checkpoints that were passed over."""
        while self.seen < len(run.lines):
            line = run.lines[self.seen]
            self.seen += 1
            if found := re.match(r"mantissa launch: rank \d+ failed first: (?:exit code (\d+)|SIG(\w+))", line):
                code = int(found[1]) if found[1] else 128 + getattr(signal, "SIG" + found[2]).value
                self.totals["failed attempts"] += 1
                self.codes[code] += 1
                if code not in self.allowed(60):
                    raise Finding(f"an attempt ended with {code}, which no fault of the last minute explains: {line}")
            if found := re.search(r"checkpoint passed over: .*(step-\d+)", line):
                self.totals["checkpoints passed over"] += 1
                if found[1] not in self.damaged:
                    raise Finding(f"a checkpoint is damaged that no fault damaged: {line}")

    def note_events(self, run):
        """No start may be from before the newest save that was reported, unless that was damaged since."""
        now = time.monotonic()
        for event in run.look():
            if event["type"] == "step":
                for at, _, name, _, _ in self.history[-1:]:  # the longest time without a step since the latest fault, or across it
                    if self.stepped > at - 1:
                        self.pauses[name] = max(self.pauses[name], now - self.stepped)
                self.stepped = now
                if self.windows and self.windows[-1][1] == STEPS:
                    self.windows[-1][1] = event["step"]
            if event["type"] == "checkpoint" and event["path"]:
                self.kept.append(event["step"])
                self.damaged.discard(f"step-{event['step']:08}")
                self.kept = [step for step in self.kept if f"step-{step:08}" not in self.damaged][-3:]  # checkpoint.keep_latest
            if event["type"] == "start":
                self.totals["starts"] += 1
                whole = max((step for step in self.kept if f"step-{step:08}" not in self.damaged), default=0)
                if event["step"] < whole:
                    raise Finding(f"a save was lost: start at step {event['step']}, although step {whole} had been reported")
                self.kept = [step for step in self.kept if step < event["step"]] + [event["step"]] * bool(event["resumed"])  # a kill may come before the report

    def after_end(self, run, code):
        """Checks how a launcher ended, and that everything it started ends."""
        ranks = self.known_ranks
        run.stalled.clear()  # nobody is left whom a reader that stalls could disturb
        run.reader.join(HANG_S)
        self.note_attempts(run)
        self.note_events(run)
        self.codes[code] += 1
        if code != 0 and code not in self.allowed(60):
            raise Finding(f"the launcher ended with {code}, which no fault of the last minute explains")
        alive = lambda: [pid for pid in ranks.values() if (attempt(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]) or "Z") != "Z"]
        if not wait_until(lambda: not alive(), LEAVE_S):
            raise Finding(f"processes {alive()} go on {LEAVE_S} s after the launcher ended with {code}")
        made = next((event["step"] for event in reversed(run.events) if event["type"] in ("step", "start")), 0)
        if code == 75 and self.known_ranks.items() <= run.trainers.items() and max(self.kept, default=0) < made:  # training had begun
            raise Finding(f"a stop ended with 75, but step {made} was made and only step {max(self.kept, default=0)} saved")

    def sample(self, run):
        """Memory and open files of every process, and descriptors that a rank should not have inherited."""
        ranks = run.ranks()
        links = {}
        for name, pid in [("launcher", run.process.pid), *((f"rank {rank}", pid) for rank, pid in ranks.items())]:
            held = [attempt(lambda: (int(fd.name), os.readlink(fd))) for fd in (attempt(lambda: list(Path(f"/proc/{pid}/fd").iterdir())) or [])]
            links[name] = [link for link in held if link]
            memory = attempt(lambda: int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024)
            if memory and links[name]:
                self.samples[name, pid].append((time.monotonic(), len(links[name]), memory))
        pipes = {link for _, link in links["launcher"] if link.startswith("pipe:")}
        for name, held in links.items():
            own = {link for fd, link in held if fd <= 2}
            foreign = [fd for fd, link in held if link in pipes - own]
            if name != "launcher" and foreign:
                raise Finding(f"{name} has inherited descriptor {foreign[0]} of the launcher")

    def check_growth(self):
        """The median of the second half of a life may be hardly above that of the first: a leak raises it, a save or a restart does not."""
        for (name, pid), samples in self.samples.items():
            samples = [sample for sample in samples if sample[0] > samples[0][0] + 4]
            if len(samples) < 16:
                continue
            half = len(samples) // 2
            for what, index, slack in (("open files", 1, 2), ("MiB of memory", 2, 8)):
                before, after = (statistics.median(sample[index] for sample in part) for part in (samples[:half], samples[half:]))
                self.totals[f"most growth of {what}"] = max(self.totals[f"most growth of {what}"], round(after - before, 1))
                if after > before + slack:
                    raise Finding(f"{name} (process {pid}) grows from {before} to {after} {what}")
        self.samples.clear()

    def rest(self, run, seconds):
        """Lets time pass, and keeps the training alive. Returns False once it is done."""
        end = time.monotonic() + seconds
        while not run.done:
            if run.process.poll() is not None:
                code = run.process.returncode
                self.after_end(run, code if code >= 0 else 128 - code)
                if code == 0:
                    run.done = True
                    break
                run.start()
                self.totals["starts by hand"] += 1
            self.known_ranks = run.ranks() or self.known_ranks
            self.note_attempts(run)
            self.note_events(run)
            if self.control.violations:
                raise Finding(f"{self.control.name.decode()}")
            now, lines = time.monotonic(), len(run.lines)
            if lines != self.progress[1] or run.stalled.is_set():
                self.progress = now, lines
            if now - self.progress[0] > HANG_S:
                raise Finding(f"nothing was printed for {HANG_S} s")
            if now - self.sampled > 1:
                self.sample(run)
                self.sampled = now
            if now >= end:
                return True
            time.sleep(min(0.1, end - now))
        return False

    def train(self, name, faults):
        """A whole run; faults(run) is called until it is done."""
        run = self.run = Run(self, name)
        self.seen, self.kept, self.known_ranks, self.progress, self.sampled, self.stepped = 0, [], {}, (time.monotonic(), 0), 0, time.monotonic()
        self.windows.clear()
        self.damaged.clear()
        run.start()
        while self.rest(run, 0.2):
            faults(run)
        self.check_growth()
        return run

    def fault(self, run):
        harmless, harmful = self.kinds()
        deck, place = divmod(self.number, len(harmless) + len(harmful))
        order = random.Random(f"{self.given.seed} {deck}")
        name, act, codes = (order.sample(harmless, len(harmless)) + order.sample(harmful, len(harmful)))[place]
        rng = random.Random(f"{self.given.seed} {self.number} fault")
        is_harmless = place < len(harmless)
        forget = place == 0 and self.forgotten < deck
        if not (self.settle(run, forget) if is_harmless else self.rest(run, rng.choice([0.1, 1, 2.5]))):
            if forget:  # the run ended in peace, so the next one has nothing to wait for
                self.forgotten = deck
            return
        self.history.append((time.monotonic(), self.number, name, codes, f"step {run.last_step()}"))
        for _ in range(60):  # until it can be done
            if act(run, rng) is not False:
                self.trials[name] += 1
                break
            if not self.rest(run, 0.5):
                return
        self.number += 1
        self.rest(run, rng.uniform(0.2, 1.5))

    def settle(self, run, forget):
        """Waits until all ranks train. Then what came before may excuse nothing any more."""
        end = time.monotonic() + HANG_S
        while forget or not run.is_training():
            if time.monotonic() > end:
                raise Finding(f"no step within {HANG_S} s")
            if not self.rest(run, HEARTBEAT_S + 3 if forget else 0.3):
                return False
            forget = forget and not run.is_training()
            if not forget and run.is_training():
                self.history = [(at if codes <= DISK else at - 60, *rest, codes, text) for at, *rest, codes, text in self.history]
        return True

    # The end of a round.

    def course(self, run):
        """Every step and evaluation by (type, step), as often as it was done, without times."""
        out = collections.defaultdict(list)
        for event in run.events:
            if event["type"] in ("step", "eval"):
                out[event["type"], event["step"]].append({key: value for key, value in event.items() if key in (
                    "loss", "grad_norm", "lr", "tokens", "skipped", "targets", "sets", "routing", "moe", "aux_loss", "padding")})
        return out

    def compare(self, run, quiet):
        courses = [self.course(one) for one in (quiet, run)]
        for (what, step), wanted in courses[0].items():
            got = courses[1].get((what, step), [])
            if not got and any(begin <= step <= end for begin, end in self.windows):
                self.totals["lines that a faulty disk dropped"] += 1
            elif not got or any(each != wanted[0] for each in got):
                raise Finding(f"{what} {step} is not that of the quiet run: {got or 'not in metrics.jsonl'}, {wanted[0]}")
        diff = self.mantissa("inspect", f"{quiet.name}/checkpoints", "--diff", f"{run.name}/checkpoints")
        if diff.returncode != 0 or f"step {STEPS} and step {STEPS}: all" not in diff.stdout:
            raise Finding(f"the weights are not those of the quiet run: {diff.stdout}{diff.stderr}")
        for name in ("latest", "best"):
            names = [(one.folder / "checkpoints" / name).read_text().split()[0] for one in (quiet, run)]
            step = int(names[0].removeprefix("step-"))  # a best one that the disk did not take leaves its place to others
            refused = any(event["type"] == "checkpoint" and event["step"] == step and "problem" in event for event in run.events)
            if names[0] != names[1] and not (name == "best" and (refused or any(begin <= step <= end for begin, end in self.windows))):
                raise Finding(f"{name} names {names[1]}, and {names[0]} in the quiet run")
        files = [(one.folder / f"exports/step-{STEPS:08}/model.safetensors").read_bytes() for one in (quiet, run)]
        if files[0] != files[1]:
            raise Finding("the last export is not that of the quiet run")
        if not any("done | step" in line for line in run.lines[-12:]):
            raise Finding("the launcher lost the last lines of rank 0")

    def require_clean(self, run):
        shutil.rmtree(self.work / "exported", ignore_errors=True)
        last = self.mantissa("export", run.name, "--output", "exported")  # it sweeps what a killed one left
        shutil.rmtree(self.work / "exported", ignore_errors=True)
        left = [str(path) for folder in (self.work, run.folder, run.folder / "checkpoints", run.folder / "exports") for path in folder.glob(".*") if not path.name.startswith(".bad-")]
        left += [str(path) for path in [*(self.work / "tmp").iterdir(), *(Path("/dev/shm").iterdir() if self.given.isolated else [])]]
        left += [pid for pid in os.listdir("/proc") if pid.isdigit() and attempt(lambda: os.readlink(f"/proc/{pid}/exe")) == self.program and self.given.isolated]
        if left or last.returncode != 0:
            raise Finding(f"left behind: {', '.join(left) or last.stderr}")

    def results(self, finding=""):
        return {"layout": self.given.layout, "seed": self.given.seed, "faults": self.number - self.given.first, "hours": round((time.monotonic() - self.began) / 3600, 3),
                "trials": dict(self.trials), "longest_pause_s": {name: round(pause, 1) for name, pause in self.pauses.items()},
                "exit_codes": {str(code): count for code, count in sorted(self.codes.items())}, "totals": dict(self.totals), "finding": finding}

    def soak(self):
        quiet = self.train("quiet", lambda run: self.rest(run, 1))
        self.require_clean(quiet)
        self.began = time.monotonic()
        end, rounds = self.began + self.given.hours * 3600, 0
        while time.monotonic() < end and (self.given.last is None or self.number <= self.given.last):
            name = f"round{rounds}"
            self.compare(self.train(name, lambda run: self.fault(run) if self.given.last is None or self.number <= self.given.last else self.rest(run, 1)), quiet)
            self.require_clean(self.run)
            shutil.rmtree(self.work / name)
            rounds += 1
            self.totals["rounds"] = rounds
            print(f"round {rounds}: equal after {self.run.starts} starts by hand | {sum(self.trials.values())} faults | {self.totals['failed attempts']} failed attempts | "
                  f"{(time.monotonic() - self.began) / 60:.1f} min", flush=True)
            self.save_results()

    def save_results(self, finding=""):
        path = REPOSITORY / f"build/soak/{self.given.layout}-{self.given.seed}.json"
        path.write_text(json.dumps(self.results(finding), indent=1) + "\n")
        return path

    def report(self, finding):
        kept = REPOSITORY / f"build/soak/failed-{self.given.layout}-{self.given.seed}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self.work, kept, ignore=shutil.ignore_patterns("ballast", "control"), symlinks=True)
        (kept / "output.txt").write_text("\n".join(self.run.lines) + "\n")
        print(f"FINDING, layout {self.given.layout}, seed {self.given.seed}: {finding}\nThe last faults:")
        for at, number, name, _, text in self.history[-20:]:
            print(f"  {number:5}  {name}, {text}")
        print(f"The run and the launcher's output: {kept}")
        first = self.history[-20:][0][1] if self.history else 0
        print(f"To replay them alone: scripts/soak.sh --layout {self.given.layout} --seed {self.given.seed} --first {first} --last {self.number}", flush=True)

    def close(self):
        for pid in [self.run.process.pid, *self.known_ranks.values()]:
            self.signal(pid, signal.SIGCONT)
            self.signal(pid, signal.SIGKILL)
        self.run.process.wait()
        if self.given.isolated:
            subprocess.run(["umount", "-l", self.work], check=False)
        attempt(self.group.rmdir)
        shutil.rmtree(self.work, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", choices=LAYOUTS, default="tensor")
    parser.add_argument("--first", type=int, default=0, help="number of the first fault")
    parser.add_argument("--last", type=int, help="number of the last fault, after which the run ends in peace")
    parser.add_argument("--mantissa", default=REPOSITORY / "build/release/bin/mantissa")
    parser.add_argument("--shim", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    soak = Soak(parser.parse_args())
    try:
        soak.soak()
        print(f"soak: no finding\n{json.dumps(soak.results())}")
        return 0
    except Finding as finding:
        soak.report(finding)
        soak.save_results(str(finding))
        return 1
    finally:
        soak.close()


if __name__ == "__main__":
    sys.exit(main())
