#!/usr/bin/env python3
"""Checks the house rules that a compiler does not: layers, names of files, lengths, the #if budget, forbidden and retired words; quotations
in the lists of faults in tests/faults; names of tests in docs/reliability.md (fault_table.py); the budget of building and testing
(record_times.py); and the documents: commands, options, links, the length of the README, pictures (check_documents.py).

    scripts/check.py [--binary BIN]              everything; with a built mantissa also subcommands and options in the documents
    scripts/check.py --run-readme --binary BIN   runs the blocks of README and docs/ marked "sh runnable", each page in a temporary folder

Prints one line per finding, as file:line: text; exit 1 if there is any.
"""
import argparse
import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import fault_table
import record_times
from check_documents import check_documents, check_drawing, check_pictures, run_documents
from retired_words import RETIRED, SPEAK_OF_RETIRED_WORDS

ROOT = Path(__file__).resolve().parent.parent

# Lowest first. A file may include its own layer and those before it; siblings, in brackets, include none of each other.
LAYERS = ["base", "formats", "json", "text", "tensor", "backend", "comm", "job", ("autograd", "precision", "io", "data"), "ops", "nn", "models", "config", "optim",
          "checkpoint", ("hf", "metrics"), "plan", "train", "tools"]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in ([names] if isinstance(names, str) else names)}


def layer_ranks():
    """LAYERS with a list for every rank, also of a single layer."""
    return [[names] if isinstance(names, str) else list(names) for names in LAYERS]


MAX_FILE_LINES = 600
LONG_FILES = {"include/mantissa/backend/backend.h"}  # the table of contents
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100  # below src/backend/cpu and src/backend/cuda
# Files of ops and of kernels, by family: ops.h and the headers of the backends say so.
FAMILIES = {"src/ops", "src/backend/cpu/reference", "src/backend/cuda"} | {
    f"src/backend/{folder}/{room}" for folder in ("cpu/fast", "cuda") for room in ("gemm", "attention", "codes", "rows", "moe")}
# Headers for their layer alone; so are those of its subfolders.
PRIVATE = {f"{layer}/{name}.h" for layer, names in {
    "backend": "activation_rule adamw_rule balance_rule caching_allocator index_rule shared_loss",
    "checkpoint": "checkpoint_manifest",
    "comm": "collective",
    "data": "example token_file",
    "hf": "architecture_table export_weights packing",
    "job": "frames rendezvous store_server",
    "json": "config_merge",
    "ops": "exchange experts linear",
    "optim": "step_control",
    "plan": "dry_pass",
    "text": "characters jinja_syntax normalizer pattern_syntax pretokenizer split_pattern",
    "train": "gemm_rate run run_exports",
}.items() for name in names.split()}
CONDITIONAL_FILES = {"include/mantissa/base/host_device.h", "src/backend/cuda/chip/gpu/device.h"}  # macros that nvcc alone defines

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
OPENINGS = re.compile(r"([Ww]hat|[Ww]hether|[Oo]f|[Tt]hose|[Tt]he same)\b|[Aa]s [\w:]+\(")
PROMISES = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b")
# Pattern, the part of the tree it is allowed in, the thing to do instead.
CONFINED = [
    (re.compile(r"#\s*include\s*<omp\.h>|#\s*pragma\s+omp"), r"src/base/\w*thread|tests/", "threads come from base/parallel.h"),
    (re.compile(r"#\s*include\s*[<\"](oneapi/dnnl|dnnl)"), r"src/backend/cpu/", "oneDNN is known to the CPU backend only"),
    (re.compile(r"#\s*include\s*<CLI/"), r"tools/", "the command line is known to tools only"),
    (re.compile(r"std::(cout|cerr|clog|exit|abort|_Exit|quick_exit)\b|(?<![\w:.>])(f?printf|puts|perror)\s*\(|(?<![\w.>])(exit|_exit|abort)\s*\("),
     r"tools/|tests/", "the library neither prints nor exits"),
    (re.compile(r"\bdevice_(data|bytes)\b"), r"src/backend/|(src|include/mantissa)/tensor/|tests/", "memory of a device belongs to its backend: upload, download or HostBytes"),
    (re.compile(r"__shared__|__(sync|shfl|ballot|activemask)\w*|\batomic(Add|Or|Max|CAS|Exch)\b|<<<|#\s*include\s*<cuda"),
     r"src/backend/cuda/chip/|src/base/|tests/gpu/", "what only CUDA knows is in src/backend/cuda/chip"),
    (re.compile(r"\b(asm|__asm(__)?)\b"), r"src/backend/(cuda/chip/|cpu/fast/gemm/weight_steps\.h)|src/base/generated_call\.h|tests/",
     "assembly is in backend/cuda/chip, or a template of backend/cpu/fast/gemm/weight_steps.h"),
    (re.compile(r"std::(\w+_distribution|shuffle|mt19937\w*|random_device|default_random_engine)\b"), r"tests/|src/base/", "random numbers come from base/rng.h"),
]


class Findings:
    def __init__(self):
        self.lines = []

    def add(self, path, line, text):
        self.lines.append(f"{path}:{line}: {text}")


def project_files():
    git = subprocess.run(["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"], capture_output=True, text=True)
    if git.returncode == 0:
        paths = [Path(name) for name in git.stdout.splitlines()]
    else:
        paths = [p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file()]
        paths = [p for p in paths if p.parts[0] not in ("build", "runs") and not p.parts[0].startswith(".venv")]
    return sorted(p for p in paths if (ROOT / p).is_file())


# Comments, strings and character literals of C++.
LITERALS = re.compile(r'//(?:[^\n\\]|\\.|\\\n)*|/\*.*?\*/|R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'', re.S)


def blank_literals(text):
    """The text with comments, strings and character literals blanked, every newline kept."""
    return LITERALS.sub(lambda m: re.sub(r"[^\n]", " ", m.group(0)), text)


def cpp_comments(text):
    """(line, content) of every block of lines that are comments and of every comment behind code. The content is that of the first line."""
    line, end, block = 1, 0, None  # block: the line of the latest comment that stands alone
    for match in LITERALS.finditer(text):
        line, end = line + text.count("\n", end, match.start()), match.start()
        if not match.group(0).startswith("//"):
            continue
        alone = not text[text.rfind("\n", 0, end) + 1:end].strip()
        if not alone or block != line - 1:
            yield line, match.group(0)[2:].strip()
        block = line if alone else None


def hash_comments(text):
    """Like cpp_comments(), but of Python, shell and CMake, with the first lines of docstrings."""
    block = None
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*(?:#(?!!) ?|""")(.*)|.*\S\s+# (.*)', line)
        if not match:
            continue
        if match[1] is None:
            yield number, match[2]
        elif block != number - 1:
            yield number, match[1]
        block = number if match[1] is not None else None


def layer_of(path):
    parts = path.parts
    if parts[0] == "tools":
        return "tools"
    if parts[0] == "src" and len(parts) > 2:
        return parts[1]
    return parts[2] if parts[:2] == ("include", "mantissa") and len(parts) > 3 else None


def check_layers(path, text, findings):
    layer = layer_of(path)
    if layer is None:
        return
    if layer not in RANK:
        findings.add(path, 1, f"'{layer}' is not a layer")
        return
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line)
        if not match:
            continue
        target = match.group(2)
        parts = target.removeprefix("mantissa/").split("/")
        other = parts[0] if len(parts) > 1 and parts[0] in RANK and match.group(1) == '"' else None
        if other and other != layer and RANK[other] >= RANK[layer]:
            findings.add(path, number, f"layer {layer} includes {target} of layer {other}, which does not stand below it")
        if other and other != layer and other != "tools" and (target in PRIVATE or (target.count("/") > 1 and not target.startswith("mantissa/"))):
            findings.add(path, number, f"{target} is private to layer {other}")
        if other and path.parts[0] == "include" and not target.startswith("mantissa/"):
            findings.add(path, number, f"{target} is not public: a program that includes {path.name} does not have it")
        if layer == "formats" and target not in ("cstdint", "mantissa/base/host_device.h") and other != "formats":
            findings.add(path, number, f"formats includes only <cstdint> and base/host_device.h, not {target}")


def check_implementations(texts, findings):
    """A header is implemented in the file of its name; a header of its layer names any other file."""
    headers = {path: text for path, text in texts.items() if path.suffix == ".h" and layer_of(path)}
    for path in texts:
        if path.suffix not in (".cpp", ".cu") or not layer_of(path) or str(path.parent) in FAMILIES:
            continue
        of_layer = {header: text for header, text in headers.items() if layer_of(header) == layer_of(path)}
        named = rf"\b{re.escape(path.name)}\b|\bCommand {path.stem}_command\("
        if not any(header.stem == path.stem or re.search(named, text) for header, text in of_layer.items()):
            findings.add(path, 1, "implements no header of its name, and no header of its layer names it")


def cpp_functions(text):
    """(first line, lines) of every function at namespace or class scope. A heuristic over braces: enough for code that clang-format lays out."""
    code = re.sub(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", lambda m: re.sub(r"[^\n]", " ", m.group(0)), blank_literals(text), flags=re.M)
    line, start, head, stack = 1, None, "", []  # stack: (kind, first line, head before it)
    outside = True
    for char in re.findall(r"[{};\n]|[^{};\n]+", code):  # or text without any of these
        line += char == "\n"
        if char == "{":
            stack.append((block_kind(head) if outside else "block", start or line, head))
            head, start = ("", None) if outside else (head, start)
        elif char == "}" and stack:
            kind, first, before = stack.pop()
            if kind == "function":
                yield first, line - first + 1
            if all(k == "scope" for k, _, _ in stack):
                # A braced initializer continues its declaration: Foo(int x) : x_{x} { … }
                head, start = (before + "{}", first) if kind == "block" else ("", None)
        elif outside:
            if char == ";":
                head, start = "", None
            elif head or not char.isspace():
                head, start = head + (char if head else char.lstrip()), start or line
        if char in "{}":
            outside = all(kind == "scope" for kind, _, _ in stack)


def block_kind(head):
    head = re.sub(r"template\s*<[^{}()]*>|operator\s*[^\s\w(]+|\[\[.*?\]\]|\b(public|private|protected)\s*:", " ", head).strip()
    if re.match(r"(inline\s+)?(namespace|class|struct|union|enum|extern)\b", head):
        return "scope"
    tail = head.rpartition(")")[2].replace("::", "")
    if re.search(r"[:,]", tail) and re.search(r"[\w>]$", tail) and "->" not in tail:
        return "block"  # a braced member initializer of a constructor
    assigned = re.sub(r"\([^()]*\)", "", re.sub(r"\([^()]*\)", "", head))
    return "function" if "(" in head and "=" not in assigned else "block"


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.end_lineno - node.lineno + 1


def check_lengths(path, text, findings, product_lengths):
    lines = text.count("\n")
    if lines > MAX_FILE_LINES and str(path) not in LONG_FILES:
        findings.add(path, 1, f"{lines} lines; at most {MAX_FILE_LINES}")
    for first, length in python_functions(text) if path.suffix == ".py" else cpp_functions(text):
        most = MAX_KERNEL_LINES if re.match(r"src/backend/(cpu|cuda)/", str(path)) else MAX_FUNCTION_LINES
        if length > most:
            findings.add(path, first, f"function of {length} lines; at most {most}")
        if path.parts[0] in ("include", "src", "tools"):
            product_lengths.append(length)


def check_words(path, text, findings):
    is_cpp = path.suffix in (".h", ".cpp", ".cu")
    code = blank_literals(text).splitlines() if is_cpp else []
    for number, line in enumerate(text.splitlines(), 1):
        if PROMISES.search(line):
            findings.add(path, number, f"a promise instead of the work: {line.strip()}")
        if is_cpp and re.match(r"\s*#\s*if", line) and str(path) not in CONDITIONAL_FILES:
            findings.add(path, number, "conditional compilation; absence is a file chosen by CMake")
    for number, (line, raw) in enumerate(zip(code, text.splitlines()), 1):
        subject = raw if raw.lstrip().startswith("#") else line
        for pattern, allowed, advice in CONFINED:
            if pattern.search(subject) and not re.match(allowed, str(path)):
                findings.add(path, number, f"{pattern.search(subject).group(0).strip()}: {advice}")


def check_openings(path, text, findings):
    comments = cpp_comments if path.suffix in (".h", ".cpp", ".cu") else hash_comments
    for number, comment in comments(text):
        if opening := OPENINGS.match(comment):
            findings.add(path, number, f"a comment begins with '{opening.group(0)}': name what the thing is (\"Bytes of ...\"), or what it does (\"Returns ...\")")


# Two types of one name in a namespace are one to the linker: the functions of templates that have them, too.
def check_types(texts, findings):
    first = {}
    for path in sorted(path for path in texts if Path("src/backend/cuda") in path.parents and path.suffix == ".h"):
        for match in re.finditer(r"^struct (?:alignas\(\d+\) )?(\w+)[^;]*\{", texts[path], re.M):
            if (other := first.setdefault(match[1], path)) != path:
                findings.add(path, texts[path].count("\n", 0, match.start()) + 1, f"struct {match[1]} is in {other}, too")


def files_with_retired_words(paths):
    """Returns what grep finds, in a tenth of the time that Python's expressions take, or all paths where no grep knows such expressions."""
    pattern = "|".join(f"(?:{pattern.pattern})" for pattern, _, _ in RETIRED)
    grep = subprocess.run(["grep", "-alP", "-e", pattern, "--", *map(str, paths)], cwd=ROOT, env=os.environ | {"LC_ALL": "C.UTF-8"}, capture_output=True, text=True)
    return set(map(Path, grep.stdout.splitlines())) if grep.returncode < 2 else set(paths)


def check_retired(path, text, findings):
    if path.name in SPEAK_OF_RETIRED_WORDS:
        return
    for pattern, advice, allowed in RETIRED:
        for found in pattern.finditer(text) if not (allowed and allowed.search(path.name)) else ():
            findings.add(path, text.count("\n", 0, found.start()) + 1, f"'{found.group(0)}': say {advice}")


def check_faults(path, text, sources, findings):
    """Every line that a list of faults quotes, "- …", stands once in the file that its block names, or the fault cannot be planted."""
    named = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line:
            named = None
        elif line.startswith("- "):
            times = sources.get(named, "").count(line[2:])
            if times != 1:
                findings.add(path, number, f"{named} has {times} times: {line[2:]}")
        elif named is None and line[0] != "#":
            named = Path(line)


def check_names(path, findings):
    for part in path.parts:
        if set(re.split(r"[_.\-]", part.lower())) & FORBIDDEN_NAMES:
            findings.add(path, 1, f"'{part}' says nothing about what is inside")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", help="a built mantissa")
    parser.add_argument("--run-readme", action="store_true")
    args = parser.parse_args()
    if args.run_readme:
        if not args.binary:
            parser.error("--run-readme needs --binary")
        sys.exit(run_documents(args.binary, project_files()))

    findings, product_lengths, texts, sources = Findings(), [], {}, {}
    files = project_files()
    retired = files_with_retired_words(files)
    for path in files:
        check_names(path, findings)
        if path.suffix not in (".h", ".cpp", ".cu", ".py", ".sh", ".md", ".cmake", ".in") and path.name not in ("CMakeLists.txt", "run"):
            continue
        text = sources[path] = (ROOT / path).read_text()
        check_words(path, text, findings)
        if path in retired:
            check_retired(path, text, findings)
        if path.suffix in (".h", ".cpp", ".cu", ".py"):
            check_lengths(path, text, findings, product_lengths)
        if path.suffix in (".h", ".cpp", ".cu"):
            check_layers(path, text, findings)
            texts[path] = text
        if path.suffix in (".h", ".cpp", ".cu", ".py", ".sh", ".cmake") or path.name == "CMakeLists.txt":
            check_openings(path, text, findings)
    for path in sorted((ROOT / "tests/faults").glob("*.txt")):
        check_faults(path.relative_to(ROOT), path.read_text(), sources, findings)
    times = (ROOT / "tests/times.txt").read_text()
    record_times.check_times(times, record_times.count_lines(files), findings)
    record_times.check_raised_budget(times, findings)
    for name in fault_table.missing_tests(fault_table.PAGE.read_text()):
        findings.add(fault_table.PAGE.relative_to(ROOT), 1, f"no test is called {name}")
    check_implementations(texts, findings)
    check_types(texts, findings)
    check_documents(args.binary, findings)
    drawing = (ROOT / "docs/architecture.md").read_text()
    check_drawing(drawing, layer_ranks(), findings)
    check_pictures(layer_ranks(), findings)
    for line in findings.lines:
        print(line)
    print(f"{len(findings.lines)} findings; {len(product_lengths)} functions in the product")
    sys.exit(1 if findings.lines else 0)


if __name__ == "__main__":
    main()
