"""Texts in which scripts/check.py must find a fault, and texts that it must leave alone."""
import sys
import unittest
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import check
import check_documents as documents


def findings_of(rule, path, *arguments):
    findings = check.Findings()
    rule(Path(path), *arguments, findings=findings)
    return findings.lines


def layers(path, include):
    return findings_of(check.check_layers, path, f"#include {include}\n")


class Layers(unittest.TestCase):
    def test_an_include_points_downwards(self):
        self.assertEqual(layers("src/ops/a.cpp", '"mantissa/tensor/tensor.h"'), [])
        self.assertEqual(len(layers("src/tensor/a.cpp", '"ops/ops.h"')), 1)
        self.assertEqual(len(layers("include/mantissa/base/a.h", '"mantissa/tensor/tensor.h"')), 1)
        self.assertEqual(len(layers("src/base/a.cpp", '"mantissa/backend/backend.h"')), 1)

    def test_public_headers_include_public_ones(self):
        self.assertEqual(layers("include/mantissa/train/a.h", '"mantissa/backend/backend.h"'), [])
        self.assertEqual(len(layers("include/mantissa/train/a.h", '"base/file.h"')), 1)

    def test_some_headers_are_private_to_their_layer(self):
        self.assertEqual(layers("src/train/a.cpp", '"comm/mesh.h"'), [])
        self.assertEqual(len(layers("src/train/a.cpp", '"comm/nccl/calls.h"')), 1)
        self.assertEqual(layers("src/comm/a.cpp", '"comm/collective.h"'), [])
        self.assertEqual(len(layers("src/train/a.cpp", '"comm/collective.h"')), 1)
        self.assertEqual(layers("tools/a.cpp", '"tools/command.h"'), [])

    def test_siblings_do_not_include_each_other(self):
        self.assertEqual(len(layers("src/io/a.cpp", '"data/batch.h"')), 1)
        self.assertEqual(layers("src/train/a.cpp", '"data/batch.h"'), [])
        self.assertEqual(len(layers("src/metrics/a.cpp", '"hf/export.h"')), 1)

    def test_formats_includes_next_to_nothing(self):
        self.assertEqual(layers("include/mantissa/formats/a.h", "<cstdint>"), [])
        self.assertEqual(len(layers("include/mantissa/formats/a.h", "<cmath>")), 1)


def lengths(path, text, findings):
    check.check_lengths(path, text, findings, [])


class Lengths(unittest.TestCase):
    SOURCE = """namespace a {
struct Point {
  int x = 0;
  explicit Point(int v) : x{v}, y_{v} {
    x += 1;
  }
  bool operator==(const Point& o) const { return x == o.x; }
};
const std::vector<int> kTable = {
  1, 2,
};
template <class T, int N = 3>
int f(const char* s = "{(") {
  if (s) { return '{'; }
  auto g = [](int v) { return v; };
  return g(1);
}  // }
}
"""

    def test_functions_are_found_with_their_lines(self):
        self.assertEqual(list(check.cpp_functions(self.SOURCE)), [(4, 3), (7, 1), (12, 6)])

    def test_long_functions_and_files_are_found(self):
        long = "void f() {\n" + "  g();\n" * 60 + "}\n"
        self.assertEqual(len(findings_of(lengths, "src/io/a.cpp", long)), 1)
        self.assertEqual(len(findings_of(lengths, "src/io/a.cpp", "int x;\n" * 601)), 1)
        self.assertEqual(len(findings_of(lengths, "src/backend/cpu/a.cpp", long)), 0)
        longer = "void f() {\n" + "  g();\n" * 100 + "}\n"
        self.assertEqual(len(findings_of(lengths, "src/backend/cuda/a.cu", longer)), 1)


class Words(unittest.TestCase):
    def words(self, path, line):
        return findings_of(check.check_words, path, line + "\n")

    def test_conditional_compilation_and_promises_are_found(self):
        self.assertEqual(len(self.words("src/io/a.cpp", "#ifdef X")), 1)
        self.assertEqual(self.words("include/mantissa/base/host_device.h", "#ifdef X"), [])
        self.assertEqual(len(self.words("src/io/a.cpp", "// TO" + "DO later")), 1)

    def test_the_library_neither_prints_nor_exits(self):
        self.assertEqual(len(self.words("src/io/a.cpp", 'printf("x");')), 1)
        self.assertEqual(len(self.words("src/io/a.cpp", "std::exit(1);")), 1)
        self.assertEqual(self.words("src/io/a.cpp", 'std::snprintf(b, 3, "x");  // printf("x") would print'), [])
        self.assertEqual(self.words("tools/a.cpp", 'printf("x");'), [])

    def test_libraries_stay_where_they_belong(self):
        self.assertEqual(len(self.words("src/ops/a.cpp", "#include <omp.h>")), 1)
        self.assertEqual(len(self.words("src/ops/a.cpp", "x.device_data<float>()[0] = 1; y.device_bytes();")), 1)
        self.assertEqual(self.words("src/backend/cpu/a.cpp", "x.device_data<float>()[0] = 1;"), [])
        self.assertEqual(len(self.words("src/ops/a.cpp", "#include <oneapi/dnnl/dnnl.hpp>")), 1)
        self.assertEqual(len(self.words("src/ops/a.cpp", "std::normal_distribution<float> d;")), 1)
        self.assertEqual(len(self.words("src/backend/cpu/fast/a.cpp", 'asm("vpermps");')), 1)
        self.assertEqual(len(self.words("src/backend/cuda/a.cu", '__asm__ volatile("bar.sync 0;");')), 1)
        self.assertEqual(len(self.words("include/mantissa/base/a.h", '__asm("nop");')), 1)
        self.assertEqual(self.words("src/backend/cpu/fast/gemm/weight_steps.h", 'asm("vpermps");'), [])

    def test_retired_words_are_found_with_their_line(self):
        def found(path, text):
            return findings_of(check.check_retired, path, text)

        self.assertEqual(found("src/io/a.cpp", "int quantized = 1;\n"), [])
        self.assertEqual(found("src/io/a.cpp", "\n// what is quantised\n"), ["src/io/a.cpp:2: 'quantised': say it with z"])
        self.assertEqual(len(found("README.md", "A band of rows and its neighbours, two slabs.\n")), 3)
        self.assertEqual(len(found("src/comm/a.cpp", "Patience patience; void write_texts();\n")), 3)
        self.assertEqual(len(found("src/comm/a.cpp", "void tell_step(); told_ = 1; void A::tell(); const bool tells = 1; const auto odd = 1;\n")), 5)
        self.assertEqual(len(found("scripts/check.py", "# A braced initialiser\n")), 1)
        self.assertEqual(check.files_with_retired_words([Path("LICENSE"), Path("scripts/retired_words.py")]), {Path("scripts/retired_words.py")})
        self.assertEqual(found("tests/a_test.cpp", "TEST(Store, EndsTheMeeting) { set(Split::column_parallel, bandwidth, otherwise); }\n"), [])

    def test_comments_that_begin_without_a_noun_or_a_verb_are_found(self):
        def lines(text, path="src/io/a.cpp"):
            return [int(line.split(":")[1]) for line in findings_of(check.check_openings, path, text)]

        self.assertEqual(lines("// What it is.\nint a;  // Of b.\n\n  // Whether c,\n  // of d.\n"), [1, 2, 4])
        self.assertEqual(lines("// As f() does.\n\n// As File::read() does.\n\n// The same of b.\n\n// Those of c.\n"), [1, 3, 5, 7])
        self.assertEqual(lines("// Bytes, and\n// Of course those.\n//\n// What follows is of the same block.\nint a;  // as of b\n"), [])
        self.assertEqual(lines("// Offsets.\n\n// Whatever.\n\n// As Megatron has it.\nint a;  /* Of b. */\n"), [])
        self.assertEqual(lines('auto a = "// Of b", b = R"(\n// Of c\n)";  // bytes of c\nint d;  // What e is\n'), [4])
        self.assertEqual(lines("int a;  // of b\nint c;  // as d() has it\nint e;  // bytes of f\nint g;  // the same as h\n"), [1, 2, 4])
        python = '#!/bin/python3\n"""What a is.\n\nOf course."""\n# Of b,\n# of c.\nd = "# Of e"  # whether f\ng = 1  # bytes of h\n\ndef i():\n    """As j() does."""\n'
        self.assertEqual(lines(python, "scripts/a.py"), [2, 5, 7, 11])
        self.assertEqual(lines("# What a is.\nset(b 1)  #" " of c\n# Finds d,\n# of which e\n", "cmake/a.cmake"), [1, 2])

    def test_old_keys_may_stand_where_they_are_refused(self):
        line = '{"quantised_dispatch", "precision.quantized_dispatch"},\n'
        self.assertEqual(findings_of(check.check_retired, "src/train/load_config.cpp", line), [])
        self.assertEqual(len(findings_of(check.check_retired, "src/train/train.cpp", line)), 1)

    def test_files_that_no_header_names_are_found(self):
        def found(**texts):
            findings = check.Findings()
            names = {"io": "src/io/a.cpp", "header": "include/mantissa/io/b.h", "other": "include/mantissa/data/a.h", "tool": "tools/a.cpp",
                     "commands": "tools/command.h", "op": "src/ops/a.cpp"}
            check.check_implementations({Path(names[name]): text for name, text in texts.items()}, findings)
            return len(findings.lines)

        self.assertEqual(found(io="", header="", other="// In a.cpp."), 1)
        self.assertEqual(found(io="", header="// In a.cpp."), 0)
        self.assertEqual(found(io="", header="// In aa.cpp."), 1)
        self.assertEqual(found(tool="", commands="Command b_command();"), 1)
        self.assertEqual(found(tool="", commands="Command a_command();"), 0)
        self.assertEqual(found(op=""), 0)

    def test_types_of_kernels_have_names_of_their_own(self):
        texts = {Path("src/backend/cuda/a.h"): "struct Sums {\n};\nstruct Other;\n", Path("src/backend/cuda/b.h"): "\nstruct alignas(16) Sums {\n};\nstruct Other {\n};\n"}
        findings = check.Findings()
        check.check_types(texts, findings)
        self.assertEqual(findings.lines, ["src/backend/cuda/b.h:2: struct Sums is in src/backend/cuda/a.h, too"])

    def test_faults_quote_what_a_file_has_once(self):
        sources = {Path("src/io/a.cpp"): "int a = 1;\nint b = 1;\n"}

        def found(text):
            findings = check.Findings()
            check.check_faults(Path("tests/faults/a.txt"), text, sources, findings)
            return [line.split(":")[1] for line in findings.lines]

        self.assertEqual(found("# Of a.\n\n# One.\nsrc/io/a.cpp\n- a = 1;\n+ a = 2;\n- int b\n+ \n? io_tests\n"), [])
        self.assertEqual(found("src/io/a.cpp\n- c = 1;\n+ \n\nsrc/io/a.cpp\n- = 1;\n+ \n"), ["2", "6"])
        self.assertEqual(found("src/io/a.cpp\n- a = 1;\n+ \n\nsrc/io/b.cpp\n- a = 1;\n+ \n"), ["6"])
        self.assertEqual(found("src/io/a.cpp\n- a = 1;\n+ \n\n- a = 1;\n+ \n"), ["5"])

    def test_names_that_say_nothing_are_found(self):
        self.assertEqual(len(findings_of(check.check_names, "src/io/string_utils.h")), 1)
        self.assertEqual(findings_of(check.check_names, "src/io/safetensors.h"), [])


class Documents(unittest.TestCase):
    def commands(self, text):
        findings = check.Findings()
        checker = documents.CommandChecker(None, findings)
        for line, words in documents.simple_commands(text.splitlines(), 1):
            checker.check("README.md", line, words)
        return findings.lines

    def test_commands_must_exist(self):
        self.assertEqual(self.commands("./scripts/test.sh --preset asan   # sanitizers"), [])
        self.assertEqual(len(self.commands("./scripts/absent.sh")), 1)
        self.assertEqual(len(self.commands("./scripts/test.sh --preset absent")), 1)
        self.assertEqual(len(self.commands("cd x && \\\n  frobnicate")), 1)
        self.assertEqual(len(self.commands("mantissa train configs/absent.json")), 1)

    def links(self, text, path="docs/a.md", **others):
        texts = {Path(path): text, **{Path(f"docs/{name}.md"): other for name, other in others.items()}}
        findings = check.Findings()
        documents.check_links(Path(path), texts, findings)
        return findings.lines

    def test_links_lead_to_files(self):
        self.assertEqual(self.links("[a](../LICENSE) [b](b.md) [c](https://example.org/absent)", b=""), [])
        self.assertEqual(len(self.links("[a](LICENSE)")), 1)
        self.assertEqual(self.links("[a](LICENSE) [b](docs/b.md)", path="README.md", b=""), [])
        self.assertEqual(self.links("text\n[a](absent.md)"), ["docs/a.md:2: absent.md: docs/absent.md does not exist"])

    def test_links_in_code_are_none(self):
        self.assertEqual(self.links("`[a](absent.md)`\n```\n[a](absent.md)\n```\n"), [])

    def test_links_lead_to_headings(self):
        page = "## What `explain` shows, and why\n## One\n## One\n```sh\n# a comment\n```\n"
        self.assertEqual(self.links("[a](b.md#what-explain-shows-and-why) [b](b.md#one) [c](b.md#one-1)", b=page), [])
        self.assertEqual(self.links("# Own\n[a](#own)"), [])
        for anchor in ("b.md#two", "b.md#one-2", "b.md#a-comment", "#own"):
            self.assertEqual(len(self.links(f"[a]({anchor})", b=page)), 1, anchor)

    def test_paths_in_code_spans_exist(self):
        self.assertEqual(self.with_page("`scripts/check.py` `src/backend/cpu/reference/<family>.cpp` `tests/LAYER/` `src/absent` is said `without src/absent`"),
                         ["docs/more.md:1: src/absent does not exist"])

    def drawing(self, text):
        findings = check.Findings()
        documents.check_drawing(f"# A\n## Layers\nwords\n```\n{text}```\n", [["base"], ["io", "data"], ["tools"]], findings)
        return len(findings.lines)

    def test_the_drawing_is_that_of_the_layers(self):
        self.assertEqual(self.drawing("tools  commands\nio   |  files\ndata |  tokens\nbase   errors\n"), 0)
        self.assertEqual(self.drawing("tools  commands\nio   |  files\nbase   errors\n"), 1)
        self.assertEqual(self.drawing("tools  commands\nio     files\ndata |  tokens\nbase   errors\n"), 1)
        self.assertEqual(self.drawing("base   errors\nio   |  files\ndata |  tokens\ntools  commands\n"), 1)
        self.assertEqual(self.drawing(""), 1)

    def test_pictures_are_those_that_the_script_draws(self):
        findings = check.Findings()
        documents.check_pictures(check.layer_ranks(), findings)
        self.assertEqual(findings.lines, [])
        documents.check_pictures(check.layer_ranks()[1:], findings)
        self.assertEqual(findings.lines, ["docs/pictures/layers.svg:1: is not what scripts/pictures.py draws: run it"])
        documents.check_pictures([["unknown"]], findings)
        self.assertEqual(len(findings.lines), 2)

    def readme(self, text):
        findings = check.Findings()
        documents.check_readme({Path("README.md"): text, Path("CONTRIBUTING.md"): "", Path("docs/a.md"): ""}, findings)
        return findings.lines

    def test_the_readme_is_short_and_has_every_page(self):
        self.assertEqual(self.readme("[a](docs/a.md)\n" + "\n" * 149), [])
        self.assertEqual(len(self.readme("[a](docs/a.md)\n" + "\n" * 150)), 1)
        self.assertEqual(len(self.readme("[a](docs/b.md)\n")), 1)

    def cli(self, page):
        run = "Usage: run [OPTIONS]\n\nOptions:\n  -h,--help    help\n  --fast       quick, as --slow is not\n  --node-rank,--node_rank INT\n\n"
        helps = {(): "Subcommands:\n  run          runs\n  bench        measures\n\n", ("run",): run,
                 ("bench",): "Subcommands:\n  all   everything\n\n", ("bench", "all"): "Options:\n  --json TEXT   file\n"}
        findings = check.Findings()
        documents.check_cli_page(page, helps.get, findings)
        return findings.lines

    def test_the_page_of_the_command_line_has_the_options_of_the_program(self):
        run = "## run\n| `--fast` | quick, as `--slow` is not |\n| `--node-rank N` | |\n"
        bench = "## bench\n| `--json a\\|b` | a file |\n"
        self.assertEqual(self.cli(run + bench), [])
        self.assertEqual(self.cli(run), ["docs/cli.md:1: has no section for mantissa bench"])
        self.assertEqual(self.cli(run + "## bench\n"), ["docs/cli.md:1: mantissa bench has --json, which its section does not list"])
        self.assertEqual(self.cli(run + "| `--slow` | |\n" + bench), ["docs/cli.md:1: mantissa run has no option --slow"])

    def test_every_document_is_checked(self):
        self.assertLessEqual({Path("README.md"), Path("CONTRIBUTING.md"), Path("docs/cli.md")}, set(documents.documents()))
        self.assertEqual(self.with_page(""), [])
        self.assertEqual(len(self.with_page("```sh\n./scripts/absent.sh\n```\n")), 1)
        self.assertEqual(len(self.with_page("[a](absent.md)")), 1)

    def with_page(self, text):
        """The findings of check_documents() in the project's documents when one page more has this text."""
        texts = documents.documents()
        texts[Path("README.md")] = "[more](docs/more.md)" + "".join(f"[page]({path})" for path in texts if path.parts[0] == "docs")
        texts[Path("docs/more.md")] = text
        findings = check.Findings()
        with unittest.mock.patch.object(documents, "documents", lambda: texts):
            documents.check_documents(None, findings)
        return [line for line in findings.lines if line.startswith("docs/more.md")]

    def test_runnable_blocks_are_gathered_by_page(self):
        def block(text):
            return f"```sh runnable\n{text}\n```\n```sh\nleft out\n```\n"

        readme, page, other = Path("README.md"), Path("docs/a.md"), Path("docs/b.md")
        self.assertEqual(documents.runnable_blocks({readme: block("a"), page: block("b") + block("c"), other: "words\n"}), {readme: ["a"], page: ["b", "c"]})
        with self.assertRaises(SystemExit):
            documents.runnable_blocks({readme: "", page: block("b")})


if __name__ == "__main__":
    unittest.main()
