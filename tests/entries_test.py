"""Holds the list of ctest to the needs of its readers: names of entries and of cases have at most 100 characters, the parameter of a case
prints as its name, and a limit of time ends a hang, not a slow test.

    entries_test.py CTEST BUILD
"""
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import watch_tests

MOST_CHARACTERS = 100
LEAST_SECONDS = 1200  # seconds of a limit
LEAST_TIMES = 20  # times that an entry takes on a quiet machine


def cases(listing):
    """(name, printed parameter) of each case that --gtest_list_tests lists."""
    suite = ""
    for line in listing.splitlines():
        words, _, comment = line.partition("#")
        if not line.startswith(" "):
            suite = words.strip()
        elif suite.endswith("."):
            yield suite + words.strip(), comment.strip()


def bad_cases(listing):
    for name, parameter in cases(listing):
        if len(name) > MOST_CHARACTERS:
            yield f"{name}: has {len(name)} characters"
        if "-byte object <" in parameter:
            yield f"{name}: its parameter prints as bytes; give its type a PrintTo() that prints its name"


def bad_entries(entries, known):
    """Faults of entries in the list of ctest, as it writes it in JSON; known: seconds of entries that were recorded."""
    for entry in entries:
        name = entry["name"]
        limit = next((each["value"] for each in entry.get("properties", []) if each["name"] == "TIMEOUT"), None)
        least = max(LEAST_SECONDS, LEAST_TIMES * watch_tests.seconds_of(name, known))
        if len(name) > MOST_CHARACTERS:
            yield f"{name}: has {len(name)} characters"
        if limit is None or limit < least:
            yield f"{name}: is ended after {limit} s, which has to be {least:.0f} s or more (hang in tests/CMakeLists.txt)"


def executables(entries):
    """The executables of GoogleTest that were built."""
    commands = [entry.get("command", []) for entry in entries]
    return sorted({words[0] for words in commands if any(word.startswith("--gtest_filter=") for word in words[1:2])})


class Rules(unittest.TestCase):
    def test_bytes_and_long_names_are_found(self):
        listing = ('Running main() from gmock_main.cc\nA/Suite.  # TypeParam = int\n  Is/small  # GetParam() = small\n  Is/0  # GetParam() = 96-byte object <00-B2 9F>\n'
                   'Plain.\n  ' + "x" * 95 + "\n")
        self.assertEqual([name for name, _ in cases(listing)], ["A/Suite.Is/small", "A/Suite.Is/0", "Plain." + "x" * 95])
        bad = list(bad_cases(listing))
        self.assertEqual([line.split(":")[0] for line in bad], ["A/Suite.Is/0", "Plain." + "x" * 95])

    def test_limits_of_seconds_and_none_are_found(self):
        def entry(name, *limit):
            return {"name": name, "command": ["tests", "--gtest_filter=*"], "properties": [{"name": "TIMEOUT", "value": each} for each in limit]}

        entries = [entry("quick", 1200.0), entry("short", 1199.0), entry("long.1of2", 2000.0), entry("long", 2000.0), entry("none"), entry("x" * 101, 1200.0)]
        self.assertEqual([line.split(":")[0] for line in bad_entries(entries, {"long": 101.0})], ["short", "long", "none", "x" * 101])
        self.assertEqual(executables(entries + [{"name": "under", "command": ["under.sh", "tests", "--gtest_filter=*"]}]), ["tests"])


class Here(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        # From a folder of its own: ctest begins its log anew even to list, and the log of this run is that of BUILD.
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "CTestTestfile.cmake").write_text(f'subdirs("{Path(BUILD).resolve()}")\n')
            listed = subprocess.run([CTEST, "--test-dir", folder, "--show-only=json-v1"], capture_output=True, text=True, check=True).stdout
        cls.entries = json.loads(listed)["tests"]

    def test_entries_have_short_names_and_long_limits(self):
        self.assertEqual(list(bad_entries(self.entries, watch_tests.known_seconds(watch_tests.TIMES.read_text()))), [])

    def test_cases_have_short_names_and_parameters_print_as_theirs(self):
        found = executables(self.entries)
        self.assertNotEqual(found, [])
        for executable in found:
            with self.subTest(executable=executable):
                listing = subprocess.run([executable, "--gtest_list_tests"], capture_output=True, text=True, errors="replace", check=True).stdout
                self.assertNotEqual(list(cases(listing)), [])
                self.assertEqual(list(bad_cases(listing)), [])


if __name__ == "__main__":
    CTEST, BUILD = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
