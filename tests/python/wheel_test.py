"""The wheel of the program: packed of a build, installed by pip into a folder, and run there. wheel_test.py BUILD CMAKE. Exit code 77 without patchelf or pip."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD, CMAKE = Path(sys.argv[1]), sys.argv[2]
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable  # no environment whose packages are in the way
for needed, there in (("patchelf (package patchelf)", shutil.which("patchelf")),
                      ("pip", subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0)):
    if not there:
        print(f"SKIPPED: no {needed}")
        sys.exit(77)
if 'VERSION_CODENAME=bookworm' not in Path("/etc/os-release").read_text():
    print("SKIPPED: wheels are made on Debian 12, whose libraries scripts/program_wheel.py lists")
    sys.exit(77)

SHORT = ["--set", "training.steps=2", "--set", "training.micro_batch_size=2", "--set", "eval.iters=1", "--set", "eval.samples=null"]


def run(*command, **settings):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **settings)


class ProgramWheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        root = Path(cls.folder.name)
        run(CMAKE, "--install", BUILD, "--prefix", root / "prefix", "--component", "runtime", check=True)
        made = run(sys.executable, ROOT / "scripts/program_wheel.py", root / "prefix", root / "dist")
        assert made.returncode == 0, made.stderr
        cls.wheel = next((root / "dist").glob("*.whl"))
        cls.site = root / "site"
        run(PYTHON, "-m", "pip", "install", "--no-index", "--target", cls.site, cls.wheel, check=True)
        cls.data = cls.site / "share/mantissa"

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def start(self, *arguments, **environment):
        own = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(self.site), "HOME": self.folder.name, **environment}
        return run(PYTHON, "-m", "mantissa", *arguments, env=own, cwd=self.folder.name)

    def test_starts_with_its_own_libraries(self):
        """Every library but those of glibc is the wheel's or, for UCX, the system's."""
        program = self.site / "mantissa/bin/mantissa"
        found = dict(re.findall(r"^\s*(\S+) => (\S+)", run("ldd", program).stdout, re.M))
        for name, path in found.items():
            if not re.match(r"lib(c|m|dl|rt|pthread)\.so|libuc", name):
                self.assertTrue(str(Path(path).resolve()).startswith(str(self.site.resolve())), f"{name} => {path}")
        self.assertIn("mantissa ", self.start("--version").stdout)

    def test_promises_no_older_glibc_than_it_needs(self):
        promised = int(re.search(r"manylinux_2_(\d+)_", self.wheel.name)[1])
        for file in [self.site / "mantissa/bin/mantissa", *(self.site / "mantissa/lib").rglob("*.so*")]:
            for minor in re.findall(r"Name: GLIBC_2\.(\d+)", run("readelf", "-VW", file).stdout):
                self.assertLessEqual(int(minor), promised, file)

    def test_holds_licenses_and_their_hashes(self):
        with zipfile.ZipFile(self.wheel) as wheel:
            names = wheel.namelist()
            record = wheel.read(next(name for name in names if name.endswith("/RECORD"))).decode()
        for package in ("LICENSE", "libdnnl2.txt", "libssl3.txt", "libgomp1.txt"):
            self.assertTrue(any(name.endswith(f".dist-info/licenses/{package}") for name in names), package)
        self.assertEqual(len(names), len(record.splitlines()))

    def test_trains_with_what_it_holds(self):
        """The configuration of quickstart finds the sources beside it, and its exit codes are the program's."""
        short = [*SHORT, "--set", "eval.interval=0", "--set", f"logging.dir={self.folder.name}/run"]
        trained = run(PYTHON, "-m", "mantissa", "train", "configs/quickstart.json", *short, cwd=self.data,
                      env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(self.site)})
        self.assertEqual(trained.returncode, 0, trained.stdout + trained.stderr)
        self.assertIn("step     2/2", trained.stdout + trained.stderr)
        self.assertEqual(self.start("train", "absent.json").returncode, 2)

    def test_ranks_meet_over_its_own_ucx(self):
        """Where the system has no UCX, two ranks exchange over the wheel's: here its folder comes first."""
        short = [*SHORT, "--set", f"logging.dir={self.folder.name}/ranks"]
        own = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(self.site / "mantissa/lib/ucx")}
        program = self.site / "mantissa/bin/mantissa"
        self.assertIn(str(self.site), run("ldd", program, env=own).stdout.split("libucp.so.0 =>")[1].split("\n")[0])
        self.assertRegex(run(program, "doctor", env=own).stdout, r"UCX +1\.\d+\.\d+ of \S*/mantissa/lib/ucx/libucp\.so\.0, modules uct_cma\n")
        ranks = run(program, "launch", "--nproc-per-node", "2", "--", "train", "configs/quickstart.json", *short, cwd=self.data, env=own)
        self.assertEqual(ranks.returncode, 0, ranks.stdout + ranks.stderr)
        self.assertIn("step     2/2", ranks.stdout + ranks.stderr)

    def test_looks_for_what_the_system_lacks(self):
        sys.path.insert(0, str(self.site))
        from mantissa.__main__ import library_folders
        self.assertTrue(library_folders(system_ucx=False)[-1].endswith("mantissa/lib/ucx"))
        self.assertNotIn("ucx", "".join(library_folders(system_ucx=True)))
        beside = self.site / "nvidia/cu13/lib"
        beside.mkdir(parents=True)
        try:
            self.assertIn(str(beside), self.start_python("from mantissa.__main__ import library_folders; print(library_folders(True))"))
        finally:
            shutil.rmtree(self.site / "nvidia")

    def start_python(self, text):
        return run(PYTHON, "-c", text, env={"PYTHONPATH": str(self.site)}).stdout


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
