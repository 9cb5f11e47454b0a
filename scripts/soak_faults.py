"""The faults of scripts/soak.py, and what they share with it."""
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

RANKS, STEPS = 4, 1200
HEARTBEAT_S, HANG_S = 5, 100
DISK = {3, 7}  # exit codes of runs whose disk takes nothing when they begin or end
MODES = {"full": 1, "error": 2, "read-only": 3, "slow": 4, "short": 5}  # as in soak_shim.c


class Finding(Exception):
    pass


def attempt(action):
    """The result of action(), or None if the process or file has gone."""
    try:
        return action()
    except (OSError, ValueError, IndexError, TypeError):
        return None


class Faults:
    """Each fault is a method act(run, rng), or a method that makes one. It returns False if it cannot be done now. A Soak has them: `rest` lets time
    pass while it looks after the training."""

    def signal(self, pid, number):
        attempt(lambda: os.kill(pid, number)) if pid else None

    def pick(self, run, rng):
        ranks = run.ranks()
        return ranks.get(rng.randrange(RANKS))

    def of_rank(self, number):
        def act(run, rng):
            pid = self.pick(run, rng)
            self.signal(pid, number)
            return pid is not None
        return act

    def of_launcher(self, *numbers):
        def act(run, rng):
            for number in numbers:
                self.signal(run.process.pid, number)
                time.sleep(rng.choice([0.0, 0.1]))
        return act

    def pause(self, whom, least, most):
        def act(run, rng):
            pid = run.process.pid if whom == "launcher" else self.pick(run, rng)
            training, failed = run.is_training(), self.totals["failed attempts"]
            self.signal(pid, signal.SIGSTOP)
            time.sleep(rng.uniform(least, most))
            self.signal(pid, signal.SIGCONT)
            self.rest(run, 2)
            if training and not run.done and least > HEARTBEAT_S and self.totals["failed attempts"] == failed:
                raise Finding(f"a rank was stopped for {least} s or more, and nobody noticed")
            return pid is not None
        return act

    def disk(self, mode):
        def act(run, rng):
            begin = run.last_step()
            self.control.mode = MODES[mode]
            self.signal(run.process.pid, signal.SIGUSR2)
            going = self.rest(run, rng.uniform(1, 4))
            self.control.mode = 0
            if mode in ("full", "error"):
                self.windows.append([begin, STEPS])  # until the next line
            newest = f"step-{max(self.kept, default=0):08}"
            if going and self.kept and newest not in self.damaged:
                verified = self.mantissa("verify", f"{run.name}/checkpoints/{newest}")
                if verified.returncode != 0:
                    raise Finding(f"a save was damaged: {verified.stdout}{verified.stderr}")
            return going
        return act

    def kill_on_disk(self, mode):
        """While a save meets the fault. A killed launcher takes all ranks with it, so that nobody tidies up."""
        def act(run, rng):
            begin = run.last_step()
            self.control.mode = MODES[mode]
            self.signal(run.process.pid, signal.SIGUSR2)
            end = time.monotonic() + 2
            while not any(run.folder.glob("checkpoints/.tmp-*")) and time.monotonic() < end:
                time.sleep(0.002)
            time.sleep(rng.choice([0, rng.uniform(0, 0.2)]))
            self.signal(rng.choice([run.process.pid, self.pick(run, rng)]), signal.SIGKILL)
            self.rest(run, rng.uniform(0, 1))
            self.control.mode = 0
            self.windows.append([begin, STEPS])
        return act

    def fill_disk(self, run, rng):
        begin, ballast = run.last_step(), self.work / "ballast"
        with open(ballast, "wb") as file:
            for spare in range(0, 1 << 22, 1 << 14):  # the run writes meanwhile
                space = os.statvfs(self.work)
                if attempt(lambda: os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - spare) is None):
                    break
        self.rest(run, rng.uniform(1, 4))
        ballast.unlink()
        self.windows.append([begin, STEPS])

    def damage(self, how):
        def act(run, rng):
            folders = sorted(run.folder.glob("checkpoints/step-*"))
            whole = [folder for folder in folders if folder.name not in self.damaged]
            newest = attempt(lambda: run.folder / "checkpoints" / (run.folder / "checkpoints/latest").read_text().split()[0])
            last = run.process.poll() is not None or newest is None or newest.name == f"step-{STEPS:08}"  # nothing would read it again
            if last or len(whole) < 2 or newest != whole[-1] or f"step-{max(self.kept, default=0):08}" != newest.name:
                return False
            file = rng.choice(sorted(newest.iterdir()) or [newest])
            self.damaged.add(newest.name)
            size = attempt(lambda: file.stat().st_size) or 1
            if how == "missing":
                attempt(file.unlink)
            elif how == "truncated":
                attempt(lambda: os.truncate(file, rng.randrange(size)))
            else:
                with open(file, "r+b") as bits:
                    at = rng.randrange(size)
                    bits.seek(at)
                    byte = bits.read(1)[0]
                    bits.seek(at)
                    bits.write(bytes([byte ^ 1 << rng.randrange(8)]))
            self.signal(self.pick(run, rng), signal.SIGKILL)
            return True
        return act

    def export(self, run, rng):
        """Beside the training; every other one is killed. What it leaves, the next one sweeps."""
        target = self.work / "exported"
        shutil.rmtree(target, ignore_errors=True)
        with subprocess.Popen([self.program, "export", run.name, "--output", "exported"], cwd=self.work, env=self.shimmed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as export:
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 0.4))
                export.kill()
            said = export.communicate(timeout=HANG_S)[0]
        if export.returncode == 0:
            self.totals["exports"] += 1
            verified = self.mantissa("verify", "exported")
            if verified.returncode != 0:
                raise Finding(f"an export is damaged: {verified.stdout}{verified.stderr}")
        elif export.returncode > 0 and not self.damaged and self.kept:
            raise Finding(f"an export of a whole checkpoint failed with {export.returncode}: {said}")
        return True

    def flood(self, run, rng):
        end = time.monotonic() + rng.uniform(1, 3)
        held = []
        while time.monotonic() < end:
            client = attempt(lambda: socket.create_connection(("127.0.0.1", run.port), 0.5))
            if client:
                self.totals["unauthenticated connections"] += 1
                attempt(lambda: client.send(rng.choice([b"", b"\0" * 40, b"GET / HTTP/1.1\r\n\r\n", b"MTSA\x02\0\0\0" + rng.randbytes(24), rng.randbytes(200)])))
                held.append(client)
            if len(held) > 200:
                held.pop(0).close()
            time.sleep(0.002)
        for client in held:
            client.close()

    def stall(self, run, rng):
        run.stalled.set()
        self.rest(run, rng.uniform(1, 8))
        run.stalled.clear()

    def jump_clock(self, run, rng):
        self.control.clock_offset_ns += rng.choice([-1, 1]) * rng.randrange(1, 86400) * 10**9

    def limit(self, what, share):
        def act(run, rng):
            pid = self.pick(run, rng)
            sizes = attempt(lambda: Path(f"/proc/{pid}/statm").read_text().split())
            if not sizes:
                return False
            least = int(int(sizes[0]) * resource.getpagesize() * share) if what == resource.RLIMIT_AS else len(os.listdir(f"/proc/{pid}/fd"))
            old = attempt(lambda: resource.prlimit(pid, what, (least, resource.prlimit(pid, what)[1])))
            self.rest(run, rng.uniform(1, 3))
            attempt(lambda: resource.prlimit(pid, what, old)) if old else None
            return old is not None
        return act

    def squeeze_group(self, run, rng):
        used = int((self.group / "memory.usage_in_bytes").read_text())
        attempt(lambda: (self.group / "memory.limit_in_bytes").write_text(str(used + (1 << 18))))
        self.rest(run, rng.uniform(1, 3))
        (self.group / "memory.limit_in_bytes").write_text("-1")

    def cut(self, run, rng):
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
        time.sleep(rng.choice([rng.uniform(0.1, 2), HEARTBEAT_S + 3]))
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def kinds(self):
        """(name, what it does, exit codes that it excuses), the harmless ones first."""
        gone = {6, 137}  # where no memory can be mapped, UCX ends its process by a signal, and libnuma, before main, with 1
        harmless = [
            ("SIGUSR2 of a rank", self.of_rank(signal.SIGUSR2), set()), ("SIGUSR2 of the launcher", self.of_launcher(signal.SIGUSR2), set()),
            ("a rank stopped for a moment", self.pause("rank", 0.05, 2), set()), ("the launcher stopped for a moment", self.pause("launcher", 0.05, 3), set()),
            ("disk full", self.disk("full"), DISK), ("disk errors", self.disk("error"), DISK), ("disk read-only", self.disk("read-only"), DISK),
            ("disk slow", self.disk("slow"), set()), ("writes cut short", self.disk("short"), set()), ("export under way", self.export, set()), ("flood of handshakes", self.flood, set()),
            ("reader stalls", self.stall, set()), ("clock jumps", self.jump_clock, set()), ("no more open files", self.limit(resource.RLIMIT_NOFILE, 1), DISK),
        ]
        harmful = [
            ("SIGKILL of a rank", self.of_rank(signal.SIGKILL), gone), ("SIGKILL of the launcher", self.of_launcher(signal.SIGKILL), gone),
            ("SIGSEGV of a rank", self.of_rank(signal.SIGSEGV), gone | {139}), ("SIGTERM of a rank", self.of_rank(signal.SIGTERM), gone | {75, 143}),
            ("SIGTERM of the launcher", self.of_launcher(signal.SIGTERM), gone | {75, 143}),
            ("SIGINT twice", self.of_launcher(signal.SIGINT, signal.SIGINT), gone | {75, 130}),
            ("a rank stopped for long", self.pause("rank", HEARTBEAT_S + 2, HEARTBEAT_S + 4), gone),
            ("bit flip in the newest checkpoint", self.damage("flip"), gone), ("newest checkpoint truncated", self.damage("truncated"), gone),
            ("file of the newest checkpoint missing", self.damage("missing"), gone),
            ("SIGKILL on a full disk", self.kill_on_disk("full"), gone | DISK), ("SIGKILL on a slow disk", self.kill_on_disk("slow"), gone),
            ("address space at its limit", self.limit(resource.RLIMIT_AS, 1.0), gone | {1, 3, 70, 134, 139}),
        ]
        if self.given.isolated:
            harmless.append(("disk full without a shim", self.fill_disk, DISK))
            harmful.append(("network cut", self.cut, gone))
        if os.access(self.group / "cgroup.procs", os.W_OK):
            harmful.append(("memory of the group at its limit", self.squeeze_group, gone | {70}))
        return harmless, harmful
