"""The checks of scripts/check.py in README.md, CONTRIBUTING.md and docs/: commands, options, configuration keys, links and anchors, the
length of the README, pictures, and that docs/cli.md names exactly the options of the program. Also runs the blocks marked "sh runnable".
"""
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pictures

ROOT = Path(__file__).resolve().parent.parent

MAX_README_LINES = 150


def fenced_blocks(text):
    """(info string, first line number, lines) of every fenced block."""
    info, first, block = None, 0, []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            if info is None:
                info, first, block = line[3:].strip(), number + 1, []
            else:
                yield info, first, block
                info = None
        elif info is not None:
            block.append(line)


def simple_commands(lines, first):
    """(line number, words) of each simple command; continuations are joined, pipes and && split."""
    joined, start = "", first
    for number, line in enumerate(lines, first):
        if not joined:
            start = number
        joined += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        lexer = shlex.shlex(joined, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words = []
        for token in [*lexer, ";"]:
            if set(token) <= set("|&;"):
                if words:
                    yield start, words
                words = []
            else:
                words.append(token)
        joined = ""


def known_config_key(key, schema):
    node = schema
    for part in key.split("."):
        while "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
        choices = [node, *node.get("anyOf", []), *node.get("oneOf", [])]
        found = [c["properties"][part] for c in choices if part in c.get("properties", {})] or [c["items"] for c in choices if part.isdigit() and "items" in c]
        if not found:
            return False
        node = found[0]
    return True


class CommandChecker:
    SYSTEM = {"git", "cd", "cmake", "ctest", "cpack", "pip", "sudo", "apt-get", "echo", "cat", "cp", "mkdir", "tail", "head", "kill", "ls", "read", "awk",
              "curl", "llama-server", "mlx_lm.generate"}

    def __init__(self, binary, findings):
        self.binary, self.findings, self.help = binary, findings, {}
        schema = ROOT / "configs/config.schema.json"
        self.schema = json.loads(schema.read_text()) if schema.exists() else None
        self.presets = {p["name"] for p in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"] if not p.get("hidden")}

    def help_of(self, subcommand):
        """The help text, or None if there is no such subcommand."""
        if subcommand not in self.help:
            run = subprocess.run([self.binary, *subcommand, "--help"], capture_output=True, text=True)
            self.help[subcommand] = run.stdout if run.returncode == 0 else None
        return self.help[subcommand]

    def check(self, path, line, words):
        while words and re.match(r"\w+=", words[0]):
            words = words[1:]
        if not words:
            return
        program = words[0]
        if os.path.basename(program) == "mantissa":
            self.check_mantissa(path, line, words[1:])
        elif program.startswith(("./", "scripts/", ".venv")):
            self.check_script(path, line, program)
        elif program not in self.SYSTEM:
            self.findings.add(path, line, f"'{program}' is not a command of this project")
        for before, word in zip(words, words[1:]):
            if re.match(r"(\./)?(configs|scripts|tests|tools)/", word) and not (ROOT / word).exists():
                self.findings.add(path, line, f"{word} does not exist")
            if before == "--preset" and word not in self.presets:
                self.findings.add(path, line, f"preset '{word}' does not exist")

    def check_script(self, path, line, program):
        if program.startswith(".venv"):
            return
        if not os.access(ROOT / program, os.X_OK):
            self.findings.add(path, line, f"{program} does not exist or is not executable")

    def check_mantissa(self, path, line, words):
        if "--" in words:  # mantissa launch: the words behind it are a command of their own
            end = words.index("--")
            self.check_mantissa(path, line, words[end + 1:])
            words = words[:end]
        for before, word in zip(words, words[1:]):
            key = word.split("=")[0]
            if before == "--set" and self.schema and not known_config_key(key, self.schema):
                self.findings.add(path, line, f"config has no key '{key}'")
        if not self.binary or not words or words[0].startswith("-"):
            return
        subcommand = (words[0],)
        if self.help_of(subcommand) is None:
            self.findings.add(path, line, f"mantissa has no subcommand '{words[0]}'")
            return
        if len(words) > 1 and re.search(rf"^\s+{re.escape(words[1])}\s", self.help_of(subcommand).partition("ubcommands:")[2], re.M):
            subcommand = (words[0], words[1])
        for option in (w.split("=")[0] for w in words if w.startswith("--")):
            if not re.search(rf"(?<![\w-]){option}(?![\w-])", self.help_of(subcommand)):
                self.findings.add(path, line, f"mantissa {' '.join(subcommand)} has no option {option}")


def without_code(text):
    """The text with fenced blocks and code spans blanked, every newline kept."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", lambda m: re.sub(r"[^\n]", " ", m.group(0)), text, flags=re.M | re.S)


def anchors(text):
    """The anchors that GitHub gives the headings of a page."""
    found, uses = set(), {}
    unfenced = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for heading in re.findall(r"^#+ +(.*?) *$", unfenced, re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        uses[slug] = uses.get(slug, -1) + 1
        found.add(f"{slug}-{uses[slug]}" if uses[slug] else slug)
    return found


def check_links(path, texts, findings):
    """Relative links of a document lead to files that exist and to anchors that those have; texts holds all documents by path."""
    for number, line in enumerate(without_code(texts[path]).splitlines(), 1):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if re.match(r"\w+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = Path(os.path.normpath(path.parent / name)) if name else path
            if not (ROOT / file).exists() and file not in texts:
                findings.add(path, number, f"{target}: {file} does not exist")
            elif anchor and anchor not in anchors(texts.get(file, "")):
                findings.add(path, number, f"{target}: {file} has no heading for #{anchor}")


def check_paths(path, text, findings):
    """A path of the project in a code span exists; <...>, * and {...} stand for anything."""
    for number, line in enumerate(text.splitlines(), 1):
        for named in re.findall(r"`((?:src|include|tests|tools|scripts|cmake)/[\w./<>*{},-]+)`", line):
            pattern = re.sub(r"<[^>]*>|\{[^}]*\}|LAYER|LABEL", "*", named).rstrip("/")
            if not any(ROOT.glob(pattern)):
                findings.add(path, number, f"{named} does not exist")


def check_drawing(page, layers, findings):
    """The drawing in docs/architecture.md has every layer of check.py, the highest first, and a bar beside siblings. layers: lowest first."""
    drawing = next((lines for _, _, lines in fenced_blocks(page.partition("## Layers\n")[2])), [])
    drawn = [line.split()[:2] for line in drawing]
    real = [(name, len(of_rank) > 1) for of_rank in reversed(layers) for name in of_rank]
    if [(words[0], words[1] == "|") for words in drawn] != real:
        names = " ".join(name + (" |" if sibling else "") for name, sibling in real)
        findings.add("docs/architecture.md", 1, f"the drawing of the layers is not that of check.py: {names}")


def check_pictures(layers, findings):
    """Every picture in docs/pictures is what scripts/pictures.py draws. layers: lowest first, a list for each rank."""
    try:
        drawn = pictures.pictures(layers)
    except KeyError as error:
        findings.add("scripts/pictures.py", 1, f"{error} has no note")
        return
    committed = {path.name: path.read_text() for path in sorted(pictures.FOLDER.glob("*.svg"))}
    for name in sorted(drawn.keys() | committed.keys()):
        if drawn.get(name) != committed.get(name):
            findings.add(f"docs/pictures/{name}", 1, "is not what scripts/pictures.py draws: run it")


def check_readme(texts, findings):
    readme = texts[Path("README.md")]
    if (lines := readme.count("\n")) > MAX_README_LINES:
        findings.add("README.md", 1, f"{lines} lines; at most {MAX_README_LINES}, the rest belongs to docs/")
    for path in texts:
        if path.parts[0] == "docs" and f"]({path})" not in readme:
            findings.add("README.md", 1, f"has no link to {path}")


def options_in(text):
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def check_cli_page(page, help_of, findings):
    """The section of every subcommand in docs/cli.md lists the options of its --help: those at the start of a row of its table."""
    sections = dict(re.findall(r"^## ([\w-]+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    for name in subcommands(help_of(())):
        if name not in sections:
            findings.add("docs/cli.md", 1, f"has no section for mantissa {name}")
            continue
        helps = [help_of((name,)), *(help_of((name, nested)) for nested in subcommands(help_of((name,))))]
        # An option is at the start of a line; an alias with _ is torchrun's spelling of the same.
        lines = [line for text in helps for line in re.findall(r"^ +(?:-\w,)?--\S.*$", text, re.M)]
        real = {option for line in lines for option in re.findall(r"^ +(?:-\w,)?(--[\w-]+)", line)} - {"--help"}
        listed = options_in(" ".join(re.findall(r"^\| (.*?) \|", sections[name].replace("\\|", "/"), re.M)))
        for option in sorted(real - listed):
            findings.add("docs/cli.md", 1, f"mantissa {name} has {option}, which its section does not list")
        for option in sorted(listed - real):
            findings.add("docs/cli.md", 1, f"mantissa {name} has no option {option}")


def subcommands(help_text):
    return re.findall(r"^  ([a-z]+) ", help_text.partition("ubcommands:\n")[2].partition("\n\n")[0], re.M)


def documents():
    paths = [Path("README.md"), Path("CONTRIBUTING.md"), *sorted(p.relative_to(ROOT) for p in ROOT.glob("docs/*.md"))]
    return {path: (ROOT / path).read_text() for path in paths}


def check_documents(binary, findings):
    texts = documents()
    checker = CommandChecker(binary, findings)
    for path, text in texts.items():
        check_links(path, texts, findings)
        check_paths(path, text, findings)
        for info, first, lines in fenced_blocks(text):
            if info.split()[:1] == ["sh"]:
                for line, words in simple_commands(lines, first):
                    checker.check(path, line, words)
    check_readme(texts, findings)
    if binary:
        check_cli_page(texts[Path("docs/cli.md")], checker.help_of, findings)


def runnable_blocks(texts):
    """Lines of the blocks marked "sh runnable", by page; pages without one are left out."""
    blocks = {path: [line for info, _, block in fenced_blocks(text) if info == "sh runnable" for line in block] for path, text in texts.items()}
    if not blocks[Path("README.md")]:
        sys.exit("README.md has no block marked 'sh runnable'")
    return {path: lines for path, lines in blocks.items() if lines}


# In place of the program: the same, but that it trains on one sequence a step, for seconds.
SMALL_STEPS = """#!/bin/sh
[ "$1" != train ] || set -- "$@" --set training.micro_batch_size=1 --set eval.iters=2
exec "{binary}" "$@"
"""


def run_page(lines, binary, files):
    """Runs the lines in one shell, in a folder of links to the project's files, so that nothing stays behind. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="mantissa-readme-") as folder:
        for top in {path.parts[0] for path in files}:
            (Path(folder) / top).symlink_to(ROOT / top)
        bin_folder = Path(folder) / "build/release/bin"
        bin_folder.mkdir(parents=True)
        program = bin_folder / "mantissa"
        program.write_text(SMALL_STEPS.format(binary=Path(binary).resolve()))
        program.chmod(0o755)
        return subprocess.run(["bash", "-euxo", "pipefail", "-c", "\n".join(lines)], cwd=folder).returncode


def run_documents(binary, files):
    """Runs the blocks of each page in a folder of its own: every page stands alone. Returns 1 if a page fails."""
    failed = [str(path) for path, lines in runnable_blocks(documents()).items() if run_page(lines, binary, files)]
    for path in failed:
        print(f"{path}: a block marked 'sh runnable' fails")
    return 1 if failed else 0
