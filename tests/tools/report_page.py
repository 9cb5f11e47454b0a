#!/usr/bin/env python3
"""Opens pages of `mantissa report` in a browser without a screen, and looks at what their script draws.

    report_page.py MANTISSA

Exit code 77 (skipped) without chromium.
"""
import html.parser
import json
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = "b<i>&\"'"  # the name of a run
END = "</script><script>document.title = 'taken'</script><!--"
WIDTH, DIGIT = 1280, 6.2  # pixels of a window, and of a digit in a label of a chart


def line(**event):
    return json.dumps(event) + "\n"


def start(step=0):
    return line(type="start", step=step, steps=400, resumed="", parameters=1234, precision="bf16, mxfp8", device="cpu", threads=2)


def step_line(step, loss, **more):
    return line(type="step", step=step, loss=loss, lr=1e-3 / step, grad_norm=1 + 1 / step, tokens=64 * step, tok_s=1000 + step, **more)


def cell(step, module, role, decibels, amax=3.5, **more):
    return line(type="precision", step=step, module=module, role=role, sqnr_db=decibels, clipped=0.25, flushed=0.125, amax=amax, scales={"126": 3, "127": 1}, **more)


def metrics_of_a():
    lines = start()
    for step in range(1, 201):
        lines += start(step - 1) if step in (81, 121) else ""
        lines += step_line(step, 2 + 8 / step)
        lines += line(type="eval", step=step, loss=2.5 + 8 / step) if step % 20 == 0 else ""
        if step % 50 == 0:
            lines += cell(step, "layers.0.mlp.up", "input", 30 - step / 50) + cell(step, "output", "input", None if step == 50 else 20.0)
            lines += cell(step, "layers.0.mlp.up", "weight", 25.0, worst_expert={"expert": 3, "sqnr_db": 17.25}) + cell(step, "output", "weight", None, None)
    return lines + "".join(line(type="sample", step=step, prompt="p <u>", text=f"t{step}{END}") for step in range(1, 15))


def metrics_of_b():
    moe = [{"layer": 1, "imbalance": 1.5, "dropped": 0.125, "balance_loss": 1.0625, "sequence_balance_loss": None, "z_loss": None, "load": [30, 70]}]
    return start() + "".join(step_line(step, None if step in (10, 12) else 3 + 8 / step, skipped=step in (10, 12), moe=moe) for step in range(1, 101))


class Elements(html.parser.HTMLParser):
    """A flat list of (tag, attributes, text inside)."""
    EMPTY = {"meta", "input", "br", "link"}

    def __init__(self, page):
        super().__init__()
        self.all, self.open = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.all.append([tag, dict(attrs), ""])
        if tag not in self.EMPTY:
            self.open.append(len(self.all) - 1)

    def handle_endtag(self, tag):
        while self.open and self.all[self.open.pop()][0] != tag:
            pass

    def handle_data(self, data):
        for index in self.open:
            self.all[index][2] += data

    def of(self, tag, **wanted):
        return [(attributes, text) for name, attributes, text in self.all
                if name == tag and all(attributes.get(key.replace("_", "-")) == value for key, value in wanted.items())]

    def texts(self, tag, **wanted):
        return [text for _, text in self.of(tag, **wanted)]

    def rows(self):
        """The texts of the cells of each row of a table."""
        rows = []
        for tag, _, text in self.all:
            if tag == "tr":
                rows.append([])
            elif tag in ("td", "th"):
                rows[-1].append(text)
        return rows

    def lines(self):
        """The path of each line of the charts by its class and label."""
        return {(attributes["class"], attributes["data-line"]): attributes["d"] for attributes, _ in self.of("path") if "data-line" in attributes}


def numbers(path):
    return [float(each) for each in re.findall(r"-?\d+(?:\.\d+)?", path.replace("h0", ""))]


class Page(unittest.TestCase):
    maxDiff = 2000

    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.folder = Path(cls.temporary.name)
        cls.write_run("a", metrics_of_a(), {"parallel": {"data": 4}, "optimizer": {"lr": 0.001, "beta1": 0.9}})
        cls.write_run(HOSTILE, metrics_of_b(), {"parallel": {"data": 1}, "optimizer": {"lr": 0.002, "beta1": 0.9}})
        cls.page = cls.report("two.html", "a", HOSTILE)

    @classmethod
    def write_run(cls, name, metrics, config=None):
        (cls.folder / name).mkdir()
        (cls.folder / name / "metrics.jsonl").write_text(metrics)
        if config:
            (cls.folder / name / "config.json").write_text(json.dumps(config))

    @classmethod
    def report(cls, output, *runs):
        subprocess.run([MANTISSA, "report", *runs, "--output", output], cwd=cls.folder, check=True, stdout=subprocess.DEVNULL)
        return cls.folder / output

    def open(self, page, fragment="", script="", width=WIDTH, flags=()):
        """Elements of the page after its script ran, and this one, which may set document.body.dataset.found."""
        if script:
            text = page.read_text().replace("</body>", f"<script type=\"module\">{script}</script></body>")
            page = self.folder / "scripted.html"
            page.write_text(text)
        with tempfile.TemporaryDirectory() as profile:
            run = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}", f"--window-size={width},900",
                                  "--enable-logging=stderr", "--virtual-time-budget=5000", *flags, "--dump-dom", page.as_uri() + fragment],
                                 capture_output=True, text=True, timeout=300)
        self.assertEqual([each for each in run.stderr.splitlines() if "CONSOLE" in each], [])
        elements = Elements(run.stdout)
        self.assertTrue(elements.of("body"), run.stderr)
        self.assertIn("hidden", elements.of("p", id="problem")[0][0])
        return elements

    def found(self, page, script, **options):
        return json.loads(self.open(page, script=f"document.body.dataset.found = JSON.stringify((() => {{ {script} }})());", **options).of("body")[0][0]["data-found"])


class TwoRuns(Page):
    def test_all_series_are_drawn_over_each_other_with_a_legend(self):
        page = self.open(self.page)
        self.assertEqual([attributes["data-chart"] for attributes, _ in page.of("figure") if "data-chart" in attributes], ["loss", "lr", "grad_norm", "tok_s", "imbalance"])
        lines = page.lines()
        self.assertEqual(set(lines), {("line run0", "a training"), ("line dashed run0", "a validation"), ("line run1", f"{HOSTILE} training"),
                                      ("line run0", "a"), ("line run1", HOSTILE)})
        for path in lines.values():
            self.assertRegex(path, r"^M[\d.]+ [\d.]+h0(L[\d.]+ [\d.]+)+")
        self.assertEqual(lines["line run1", f"{HOSTILE} training"].count("M"), 3, "two losses were not finite")
        self.assertEqual(len([1 for attributes, _ in page.of("circle") if attributes["class"] == "dot run0"]), 10)
        self.assertEqual(page.texts("label")[:2], ["a 4 ranks", HOSTILE])
        self.assertEqual(sorted({attributes["data-restart"] for attributes, _ in page.of("path") if "data-restart" in attributes}), ["120", "80"])

    def test_tables_have_the_figures_of_each_run(self):
        page = self.open(self.page)
        rows = page.rows()
        self.assertIn(["a", "bf16, mxfp8", "200 of 400", "2, at steps 80, 120", "12800", "1234", "2.04", "2.54", "2.54", "1200", "4", "cpu, 2 threads"], rows)
        self.assertIn(["setting", "a", HOSTILE], rows)
        self.assertIn(["optimizer.lr", "0.001", "0.002"], rows)
        self.assertNotIn("optimizer.beta1", [row[0] for row in rows])
        self.assertIn(["1", "1.5", "1.4", "1", "12.5%", "1.063", "-"], rows)  # the layer with experts
        self.assertEqual(page.texts("summary")[:2], ["step 14", "step 13"])
        self.assertIn("the newest 12 of 14", page.texts("p"))
        self.assertEqual([attributes["data-map"] for attributes, _ in page.of("figure") if "data-map" in attributes], ["0 input", "0 weight"])
        self.assertEqual([text for text in page.texts("li")][:2], ["layers.0.mlp.up", "output"])
        self.assertEqual(page.texts("div", **{"class": "key"}), ["20 dB29 dB, or exact"])

    def test_texts_of_runs_are_no_markup(self):
        page = self.open(self.page)
        self.assertEqual(page.texts("title")[0], f"mantissa report: a {HOSTILE}")
        self.assertFalse(page.of("i") or page.of("u"))
        self.assertEqual(page.texts("pre")[0], f"p <u>t14{END}")
        self.assertEqual(len(page.of("script")), 2)

    def test_the_fragment_hides_runs_zooms_smooths_and_takes_logarithms(self):
        page = self.open(self.page, "#hide=1&smooth=0.9&log=loss&steps=50..100")
        lines = page.lines()
        self.assertEqual(set(lines), {("line raw run0", "a training"), ("line run0", "a training"), ("line dashed run0", "a validation"), ("line raw run0", "a"), ("line run0", "a")})
        loss = page.of("figure", data_chart="loss")[0][1]
        self.assertRegex(loss, "log.*50.*60.*70.*80.*90.*100.*step")
        self.assertEqual([attributes["aria-pressed"] for attributes, text in page.of("button") if text == "log"], ["true", "false", "false", "false", "false"])
        self.assertNotIn("disabled", page.of("button", id="all")[0][0])
        self.assertIn("no values", page.of("figure", data_chart="imbalance")[0][1])
        self.assertEqual(page.texts("div", **{"class": "ends"}), ["step 50step 100"] * 2)

    def test_colors_of_maps_are_those_of_their_errors(self):
        pixels = self.found(self.page, """
          return [...document.querySelectorAll("canvas")].map(canvas => {
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return [canvas.width, canvas.height, ...Array.from({length: data.length / 4}, (_, i) => data.slice(4 * i, 4 * i + 3).join(","))];
          });""")
        least, most, red = "68,1,84", "253,231,37", "213,0,50"
        self.assertEqual(pixels[0][:2] + [pixels[0][2]] + pixels[0][6:], [4, 2, most, most, least, least, least])  # 29 dB; exact, then 20 dB
        self.assertEqual(pixels[1][6:], [red] * 4)

    def test_values_show_under_the_pointer_and_by_keys(self):
        tips = self.found(self.page, """
          const svg = () => document.querySelector("[data-chart=loss] svg"), tip = document.getElementById("tip"), tips = [];
          const note = () => tips.push(tip.hidden ? "" : [...tip.querySelectorAll("b, tr, div")].map(row => row.textContent).join("; "));
          const key = (target, name) => { target.dispatchEvent(new KeyboardEvent("keydown", {key: name})); note(); };
          const box = svg().getBoundingClientRect();
          svg().dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 64 + 0.401 * (box.width - 76), clientY: box.top + 50}));
          note();
          svg().dispatchEvent(new PointerEvent("pointerleave"));
          note();
          svg().focus();
          key(svg(), "Home"); key(svg(), "ArrowRight"); key(svg(), "End");
          const map = document.querySelectorAll("canvas")[1];
          map.focus();
          key(map, "ArrowRight"); key(map, "ArrowDown");
          return tips;""")
        self.assertIn(f"; {HOSTILE} training3.09", tips[0])
        self.assertRegex(tips[0], r"step 8[01]; a training2\.\d+; a validation2\.6step 80; .*; a: restart at step 80")
        self.assertEqual(tips[1], "")
        self.assertTrue(tips[2].startswith(f"step 1; a training10; {HOSTILE} training11"), tips[2])
        self.assertTrue(tips[3].startswith("step 2; a training6; "), tips[3])
        self.assertEqual(tips[4], "step 200; a training2.04; a validation2.54")
        self.assertEqual(tips[5], "layers.0.mlp.up weight; step 100: 25 dB; clipped 25%, flushed 12.5%, amax 3.5; scales 2^-1: 75%, 2^0: 25%; worst expert 3: 17.25 dB")
        self.assertEqual(tips[6], "output weight; step 100: NaN or Inf")

    def test_dragging_zooms_all_charts_and_a_switch_hides_a_run(self):
        fragments = self.found(self.page, """
          Element.prototype.setPointerCapture = () => {};  // there is no such pointer
          const svg = () => document.querySelector("[data-chart=lr] svg"), box = svg().getBoundingClientRect(), fragments = [];
          const drag = (from, to) => {
            const target = svg(), at = share => ({clientX: box.left + 64 + share * (box.width - 76)});
            for (const [name, share] of [["pointerdown", from], ["pointermove", to], ["pointerup", to]]) target.dispatchEvent(new PointerEvent(name, at(share)));
          };
          const note = () => fragments.push(location.hash);
          drag(0.75, 0.25); note();
          svg().dispatchEvent(new KeyboardEvent("keydown", {key: "+"})); note();
          svg().dispatchEvent(new KeyboardEvent("keydown", {key: "-"})); note();
          svg().dispatchEvent(new MouseEvent("dblclick")); note();
          document.querySelector("#runs input").click(); note();
          document.querySelector("[data-chart=loss] button").click(); note();
          return [...fragments, ...[...document.querySelectorAll("#runs input")].map(box => box.checked), document.querySelectorAll(".run0.line").length];""")
        self.assertEqual(fragments, ["#steps=50..151", "#steps=75..126", "#steps=49..152", "", "#hide=0", "#hide=0&log=loss", False, True, 0])

    def test_fits_a_narrow_window_and_dark_colors(self):
        measure = """
          const svg = document.querySelector("svg"), style = getComputedStyle(document.body);
          return [document.documentElement.scrollWidth <= innerWidth, svg.getBoundingClientRect().right <= innerWidth, style.backgroundColor];"""
        self.assertEqual(self.found(self.page, measure, width=500), [True, True, "rgb(255, 255, 255)"])
        self.assertEqual(self.found(self.page, measure, flags=["--blink-settings=preferredColorScheme=0"])[2], "rgb(22, 22, 22)")


class OtherRuns(Page):
    def labels_inside(self, page):
        labels = [(attributes, text) for attributes, text in page.of("text")]
        right = max(float(attributes["viewbox"].split()[2]) for attributes, _ in page.of("svg"))
        for attributes, text in labels:
            anchor, width, x = attributes["text-anchor"], DIGIT * len(text), float(attributes["x"])
            left = x - (width if anchor == "end" else width / 2)
            self.assertGreaterEqual(left, 0, text)
            self.assertLessEqual(left + width, right, text)
        self.assertGreater(len(labels), 4)

    def test_a_long_run_is_thinned_as_it_is_drawn_and_keeps_its_spike(self):
        self.write_run("long", start() + "".join(step_line(step, 50.0 if step == 77777 else 1.0) for step in range(1, 100001)))
        page = self.open(self.report("long.html", "long"))
        path = page.lines()["line run0", "long training"]
        self.assertLess(len(path), 40000)
        self.assertEqual(min(numbers(path)[1::2]), 10.0, "the top of the chart is reached")
        self.labels_inside(page)
        self.assertIn("precision.report_interval turns them on", page.texts("section", id="precision")[0])
        self.assertIn("the run folder has no config.json", page.texts("pre"))

    def test_extreme_steps_and_values_have_finite_places(self):
        last = 2**63 - 1
        for name, points in {"late": [(last - 1, 1.0), (last, 2.0)], "large": [(0, -1.7e308), (1, 1.7e308), (2, 1.0)], "wide": [(0, -1e300), (last, 1e300)],
                             "narrow": [(1, 1.0), (2, 1.0 + 1e-15)], "tiny": [(5, 5e-324), (6, 0.0)], "single": [(7, -3.0)], "none": [(1, None)]}.items():
            steps = "".join(line(type="step", step=step, loss=loss, lr=loss, grad_norm=1, tokens=1, tok_s=1, skipped=True) for step, loss in points)
            self.write_run(name, start() + steps + cell(1, "m", "input", -1.7e308) + cell(2, "m", "input", 1.7e308))
            for fragment in ("", "#log=loss,lr,grad_norm"):
                page = self.open(self.report("extreme.html", name), fragment)
                for tag, attributes, _ in page.all:
                    if tag in ("path", "line", "text", "circle", "rect"):
                        self.assertFalse(re.search("NaN|Infinity", " ".join(map(str, attributes.values()))), (name, attributes))
                self.labels_inside(page)

    def test_an_analysis_has_its_tables_and_a_grid_of_layers(self):
        def weight(module, decibels):
            return {"module": module, "bytes": 2000000, "sqnr_db": decibels, "amax": 1.5, "clipped": 0.125, "flushed": 0.25, "signal": 100.0, "noise": 1.0}

        losses = {"loss": 2.5, "kl": 0.25, "equal_greedy": 0.5}
        size = {"bytes": 3000000, "bits_per_weight": 4.25}
        analysis = {"model": HOSTILE, "step": 7, "data": END, "seq_len": 12, "targets": 72, "high": {**size, "loss": 2.0, "kl": 0.0, "equal_greedy": 1.0},
                    "recipes": [{"recipe": "r1", "linears": size, "model": size, **losses, "problem": "too <narrow>",
                                 "weights": [weight("layers.0.mlp.up", 20.0), weight("layers.2.mlp.up", 30.0), weight("output", None)]},
                                {"recipe": "r2", "linears": size, "model": size, **losses, "weights": []},
                                {"recipe": "r3", "linears": size, "model": size, "fits": False, "problem": "too wide", "weights": []}],
                    "parts": [{"modules": ["a"], "recipe": "r1", "bytes": 1, **losses}, {"modules": ["b", "c"], "recipe": "r1", "bytes": 1, **losses, "kl": 0.5}],
                    "proposal": {"bits_per_weight": 5, "predicted_kl": 0.5, **losses, "file": {"precision": {"x": END}}}}
        (self.folder / "m.json").write_text(json.dumps(analysis))
        page = self.open(self.report("analysis.html", "m.json"))
        self.assertEqual(page.texts("title")[0], f"mantissa report: {HOSTILE}")
        self.assertIn("hidden", page.of("div", id="view")[0][0])
        rows = page.rows()
        self.assertIn(["high", "-", "3 MB", "-", "2.00000", "7.389", "+0.00%", "0.00000", "100%"], rows)
        self.assertIn(["r1too <narrow>", "4.250", "3 MB", "20.00", "2.50000", "12.182", "+64.87%", "0.25000", "50%"], rows)
        self.assertIn(["r3too wide", "4.250", "3 MB", "-", "-", "-", "-", "-", "-"], rows)
        self.assertEqual([row[0] for row in rows if row[1:2] == ["r1"]], ["b ... c (2)", "a"], "the most sensitive part first")
        self.assertEqual([attributes["data-errors"] for attributes, _ in page.of("figure") if "data-errors" in attributes], ["r1"])
        cells = [(attributes["title"].split(",")[0], attributes["style"]) for attributes, _ in page.of("td") if "title" in attributes]
        self.assertEqual([title for title, _ in cells], ["layers.0.mlp.up: 20 dB", "layers.2.mlp.up: 30 dB", "output: exact"])
        self.assertEqual(cells[1][1], cells[2][1], "the largest ratio and no error at all have one color")
        self.assertNotEqual(cells[0][1], cells[1][1])
        grid = next(row for row in rows if row[0] == "module, by layer")
        self.assertEqual(len(grid), 4, "three layers")
        self.assertIn(END, page.texts("pre")[0])
        self.assertIn("5 bits per weight of the linears: loss 2.50000, perplexity 12.182 (+64.87%), KL 0.25000, predicted 0.50000, equal greedy 50%", page.texts("p"))
        self.assertEqual([text for text in page.texts("h2")], [f"What recipes cost {HOSTILE}"], "no section of runs")
        self.open(self.report("both.html", "m.json", "a"))

    def test_a_page_that_was_thinned_says_so(self):
        text = self.page.read_text()
        opening = '<script type="application/json" id="metrics">'
        before, rest = text.split(opening)
        metrics, behind = rest.split("</script>", 1)
        data = json.loads(metrics)
        data["runs"][0]["series"]["loss"]["points"] = 5000000
        data["runs"][0]["maps"][0]["steps"] = 40
        (self.folder / "cut.html").write_text(before + opening + json.dumps(data).replace("<", "\\u003c") + "</script>" + behind)
        page = self.open(self.folder / "cut.html")
        self.assertIn("1 series (200 of 5000000 points)", page.texts("p", id="thinned")[0])
        self.assertIn("4 of 40 reports", page.texts("figcaption")[5])


if __name__ == "__main__":
    BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not BROWSER:
        print("SKIPPED: no chromium")
        sys.exit(77)
    MANTISSA = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
