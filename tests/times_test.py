"""Tests how scripts/watch_tests.py reads ctest, and the limits to which scripts/record_times.py holds a tree."""
import contextlib
import io
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import check
import record_times
import watch_tests

LOG = """Start testing: Nov 29 03:35 UTC
----------------------------------------------------------
1/3 Testing: Suite.1of2
1/3 Test: Suite.1of2
Command: "layer_tests" "--gtest_filter=Suite.*"
"Suite.1of2" start time: Nov 29 03:35 UTC
Output:
----------------------------------------------------------
[==========] Running 4 tests from 1 test suite.
[       OK ] Suite.A (1 ms)
a_test.cpp:7: Skipped
needs a GPU

[  SKIPPED ] Suite.B (0 ms)
[  FAILED  ] Suite.C (2 ms)
[  FAILED  ] Suite.D/1, where GetParam() = 3 (2 ms)
[  FAILED  ] 2 tests, listed below:
[  FAILED  ] Suite.C
<end of output>
Test time =   1.50 sec
----------------------------------------------------------
2/3 Testing: other_under_qemu
2/3 Test: other_under_qemu
Command: "under.sh"
Output:
----------------------------------------------------------
SKIPPED: no qemu-x86_64
<end of output>
Test time =   0.02 sec
----------------------------------------------------------
3/5 Testing: silent.sh
3/5 Test: silent.sh
Command: "silent.sh"
Output:
----------------------------------------------------------
<end of output>
Test time =   0.02 sec
----------------------------------------------------------
4/5 Testing: absent
4/5 Test: absent
Unable to find executable: absent
5/5 Testing: crashes
5/5 Test: crashes
Command: "crashes"
Output:
----------------------------------------------------------
[==========] Running 40 tests from 1 test suite.
[       OK ] Crashes.A (1 ms)
<end of output>
Test time =   0.10 sec
"""


class Watching(unittest.TestCase):
    def test_cases_are_counted_and_skipped_ones_have_reasons(self):
        entries = watch_tests.entries(LOG)
        self.assertEqual([(name, seconds) for name, _, seconds in entries], [("Suite.1of2", 1.5), ("other_under_qemu", 0.02), ("silent.sh", 0.02), ("crashes", 0.1)])
        endings = {"Suite.1of2": "Failed", "other_under_qemu": "Skipped", "silent.sh": "Skipped", "absent": "Not Run", "crashes": "Exception"}
        counts, reasons = watch_tests.count_cases(entries, endings)
        self.assertEqual((counts["passed"], counts["failed"], counts["skipped"], counts["unrun"]), (2, 4, 3, 38))
        self.assertEqual(dict(reasons), {"needs a GPU": 1, "no qemu-x86_64": 1, "silent.sh does not say why": 1})
        self.assertEqual(watch_tests.summary(counts, reasons, 5, 1.0)[-1], "2 passed, 4 failed, 3 skipped")

    def shown(self, lines, known, listed):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.endings = watch_tests.watch(lines, known, listed)
        return out.getvalue().splitlines()

    def test_what_fails_is_shown_and_what_passes_is_not(self):
        lines = ["      Start  1: A\n", "1/5 Test  #1: A ........   Passed    1.00 sec\n", "2/5 Test  #2: B .......***Failed    1.00 sec\n", "what B said\n",
                 "3/5 Test  #3: C .......***Skipped   0.10 sec\n", "4/5 Test  #4: D .......***Not Run   0.00 sec\n",
                 "5/5 Test  #5: E ...Subprocess aborted***Exception:   0.10 sec\n", "40% tests passed\n"]
        shown = [line for line in self.shown(lines, {}, []) if not line.startswith("test: ")]
        self.assertEqual(shown, [lines[i].rstrip() for i in (2, 3, 5, 6, 7)])
        self.assertEqual(self.endings, {"A": "Passed", "B": "Failed", "C": "Skipped", "D": "Not Run", "E": "Exception"})

    def test_what_is_left_goes_by_seconds_and_not_by_number(self):
        known, long = {"Long": 16.0, "B": 1.0, "C": 1.0, "Other": 1000.0}, ["1/4 Test #1: Long.1of2 .....   Passed   1.00 sec\n"]
        self.assertEqual(self.shown(long, known, ["Long.1of2", "Long.2of2", "B", "C"])[0].split(",")[0], "test: 44%")
        self.assertEqual(self.shown(long, known, ["Long.1of2", "B"])[0].split(",")[0], "test: 89%", "of some entries")
        self.assertEqual(self.shown(["1/100 Test #1: New .....   Passed   0.10 sec\n"], {"B": 99.0}, ["New", "B"]), [])

    def test_a_list_of_ctest_has_the_names_of_its_entries(self):
        listed = "Test project /b\n  Test    #1: Suite.1of2\nLabels: unit\n\n  Test #1210: A/Other\n\nTotal Tests: 2\n"
        self.assertEqual(watch_tests.LISTED.findall(listed), ["Suite.1of2", "A/Other"])


class Recording(unittest.TestCase):
    TIMES = "reference 2.00\nbudget 100\nlines product 1000\nlines tests 500\nbuild product 120\ntest A 60.0\ntest B 20.5\n"

    def findings(self, text, product=1000, tests=500):
        found = check.Findings()
        record_times.check_times(text, {"product": product, "tests": tests}, found)
        return found.lines

    def test_a_tree_within_the_budget_is_left_alone(self):
        self.assertEqual(self.findings(self.TIMES), [])
        self.assertEqual(self.findings(self.TIMES, product=1020), [])

    def test_more_than_two_hundredths_above_the_budget_are_found(self):
        self.assertEqual(self.findings(self.TIMES.replace("B 20.5", "B 23.9")), [])
        self.assertEqual(len(self.findings(self.TIMES.replace("B 20.5", "B 24.1"))), 1)
        self.assertEqual(len(self.findings(self.TIMES.replace("reference 2.00", "reference 1.90"))), 1)

    def test_a_tree_that_has_grown_since_is_found(self):
        self.assertEqual(len(self.findings(self.TIMES, product=1021)), 1)
        self.assertEqual(len(self.findings(self.TIMES, product=1021, tests=511)), 2)

    def test_a_commit_that_raises_the_budget_says_so(self):
        with tempfile.TemporaryDirectory() as root:
            def git(*words):
                subprocess.run(["git", "-C", root, "-c", "user.name=a", "-c", "user.email=a@b.invalid", *words], check=True, capture_output=True)

            def commit(text, message):
                (Path(root) / "tests/times.txt").write_text(text)
                git("add", "-A")
                git("commit", "-m", message)
                found = check.Findings()
                record_times.check_raised_budget(text, found, root)
                return len(found.lines)

            git("init", "-q")
            (Path(root) / "tests").mkdir()
            raised = self.TIMES.replace("budget 100", "budget 101")
            self.assertEqual(commit(self.TIMES, "Record"), 0)
            self.assertEqual(commit(raised, "Record"), 1)
            self.assertEqual(commit(raised.replace("60.0", "59.0"), "Record again"), 1)
            self.assertEqual(commit(raised.replace("101", "99"), "Take less"), 0)
            self.assertEqual(commit(raised, "Raise the budget for more tests"), 0)

    def test_seconds_of_a_build_are_those_of_its_last_commands(self):
        log = "# ninja log v5\n0\t9000\t0\ttests/CMakeFiles/a.dir/x.o\taa\n0\t2000\t0\tcuda/q.o\tbb\n0\t2000\t0\t/b/cuda/q.o\tbb\n10\t1010\t0\ttests/CMakeFiles/a.dir/x.o\tcc\n"
        log += "0\t500\t0\tbin/mantissa\tdd\n0\t3000\t0\tCMakeFiles/mantissa_backend.dir/y.o\tee\n0\t100\t0\ttests/simt/CMakeFiles/simt_backend.dir/k.o\tff\n"
        self.assertEqual(dict(record_times.build_seconds(log)), {"tests": 1.0, "cuda": 2.0, "link": 0.5, "kernels": 3.0, "executor": 0.1})

    def test_the_recorded_file_is_read(self):
        text = record_times.TIMES.read_text()
        self.assertGreater(record_times.total(text, ("build",)), 0)
        self.assertGreater(record_times.total(text, ("test",)), 0)
        self.assertGreater(record_times.value(text, "budget"), 0)
        self.assertGreater(len(watch_tests.known_seconds(text)), 100)


if __name__ == "__main__":
    unittest.main()
