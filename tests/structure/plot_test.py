#!/usr/bin/env python3
"""plot_test.py SOURCE_DIR: the pictures in docs/images show what raw lines and documents say.

Runs bench/plot.py and docs/images/step.py into a temporary folder. Prints one line per fact and
exits with 1 if one doesn't hold.
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml

SVG = "{http://www.w3.org/2000/svg}"
CHARTS = {"h200-train": "h200.md", "h200-offload": "h200-offload.md"}
NAMES = [*CHARTS, "step"]
failures = 0


def fact(sentence, holds, why=""):
    global failures
    failures += not holds
    print(f"{'ok' if holds else 'NOT'}: {sentence}" + (f"\n  {why}" if why and not holds else ""))


def run(script, *arguments):
    return subprocess.run([sys.executable, str(script), *map(str, arguments)], capture_output=True,
                          text=True, timeout=60)


def raw_lines(page):
    """{what: values} of a page, read without the help of plot.py."""
    found = {}
    lines = page.read_text().splitlines()
    for head, below in zip(lines, lines[1:]):
        if match := re.match(r"== (.*), \d+ ranks?: ", head):
            found[match[1]] = json.loads(below)
    return found


def bars(svg):
    """{(row, field): {kind: length}}"""
    found = {}
    for rect in xml.parse(svg).iter(SVG + "rect"):
        if "data-kind" in rect.attrib:
            place = found.setdefault((rect.get("data-row"), rect.get("data-field")), {})
            place[rect.get("data-kind")] = float(rect.get("width"))
    return found


def check_committed(committed, fresh):
    for name in NAMES:
        for palette in ("light", "dark"):
            file = f"{name}-{palette}.svg"
            same = (committed / file).exists() and \
                (committed / file).read_bytes() == (fresh / file).read_bytes()
            fact(f"docs/images/{file} is what its script makes", same,
                 "HINT: run bench/plot.py and docs/images/step.py, look at the result, commit it.")
    known = {f"{name}-{palette}.svg" for name in NAMES for palette in ("light", "dark")}
    fact("docs/images has no other picture", {p.name for p in committed.glob("*.svg")} == known)


def check_shape(fresh):
    for name in NAMES:
        texts = []
        for palette in ("light", "dark"):
            path = fresh / f"{name}-{palette}.svg"
            root = xml.parse(path).getroot()
            texts.append(re.sub(r"#[0-9a-f]{6}", "#", path.read_text()))
            width = float(root.get("width"))
            outside = []
            for text in root.iter(SVG + "text"):
                size, x = float(text.get("font-size")), float(text.get("x"))
                length = size * 0.58 * len("".join(text.itertext()))  # a wide font's
                share = {"end": 0, "middle": 0.5}.get(text.get("text-anchor"), 1)
                if x + length * share > width + 1:
                    outside.append("".join(text.itertext()))
            fact(f"{path.name} is well-formed, fits GitHub's width, and no text leaves it",
                 root.tag == SVG + "svg" and width <= 850 and not outside, outside)
            fact(f"{path.name} says in words what it shows",
                 len(root.findtext(SVG + "desc", "")) > 100)
        fact(f"{name}: light and dark differ in colours only", texts[0] == texts[1])


def check_lengths(source, fresh):
    for name, page in CHARTS.items():
        raw = raw_lines(source / "bench/results" / page)
        drawn = bars(fresh / f"{name}-light.svg")
        wrong = []
        for (row, field), length in drawn.items():
            mine = [v[field] for what, v in raw.items()
                    if what in (f"{row}, fsdp.cpp, graph", f"{row}, fsdp.cpp, everything")]
            peers = [v for what, v in raw.items() if what.startswith(f"{row}, FSDP2")]
            peer = min(peers, key=lambda values: values["step_ms"])[field]
            if len(mine) != 1 or abs(length["ours"] / length["peer"] - mine[0] / peer) > 1e-4:
                wrong.append((row, field, length))
        fact(f"{name}: lengths of bars are in proportion to the raw numbers", drawn and not wrong,
             wrong)
        fact(f"{name}: FSDP2's bars are of one length",
             len({length["peer"] for length in drawn.values()}) == 1)


def check_new_numbers(source, top):
    """A page with another number makes another bar."""
    results = top / "results"
    results.mkdir()
    for page in CHARTS.values():
        (results / page).write_text((source / "bench/results" / page).read_text())
    page = results / "h200.md"
    before = raw_lines(page)["Llama 953M, fsdp.cpp, graph"]["step_ms"]
    page.write_text(page.read_text().replace(f'"step_ms":{before},', f'"step_ms":{before / 2},'))
    out = run(source / "bench/plot.py", "--results", results, "--out", top / "half")
    lengths = [bars(folder / "h200-train-light.svg")["Llama 953M", "step_ms"]
               for folder in (top / "fresh", top / "half")] if out.returncode == 0 else []
    ratios = [length["ours"] / length["peer"] for length in lengths]
    fact("half the time is half the bar", ratios and abs(ratios[1] / ratios[0] - 0.5) < 1e-4,
         out.stderr)
    return results


def check_errors(source, results, top):
    good = {page: (results / page).read_text() for page in CHARTS.values()}
    head = "== Llama 953M, fsdp.cpp, graph, 1 rank"
    value = re.search(r'"step_ms":[^,]+', good["h200.md"])[0]

    def fails(sentence, wanted, edit):
        broken = edit(good["h200.md"])
        if broken is None:
            (results / "h200.md").unlink()
        else:
            (results / "h200.md").write_text(broken)
        out = run(source / "bench/plot.py", "--results", results, "--out", top / "none")
        told = out.stderr
        fact(sentence, out.returncode == 1 and wanted in told and "HINT: " in told and
             "h200.md" in told and "Traceback" not in told and not (top / "none").exists(),
             told or "it did not fail")
        (results / "h200.md").write_text(good["h200.md"])

    fails("a page that is missing is an error", "No such file", lambda text: None)
    fails("a row that is missing is an error", "Llama 953M, fsdp.cpp, graph",
          lambda text: text.replace(head, head.replace("953M", "954M")))
    fails("a peer that is missing is an error", "Llama 182M, FSDP2",
          lambda text: text.replace("== Llama 182M, FSDP2", "== Llama 182M, FSDP9"))
    fails("a raw line that was cut off is an error with its place", "isn't JSON",
          lambda text: text.replace('"params":953223168', ""))
    fails("a raw line that is no object is an error", "has no raw line",
          lambda text: re.sub(rf"(?m)^({re.escape(head)}.*)$", r"\1\n17", text))
    for bad in ("null", "0", "-3", '"fast"', "true", "NaN", "Infinity"):
        fails(f"a time of {bad} is an error", "step_ms",
              lambda text: text.replace(value, f'"step_ms":{bad}', 1))
    fails("a page without its date is an error", '"date"',
          lambda text: re.sub(r"(?m)^\| date .*\n", "", text))


def check_step(source, fresh):
    """The picture has the events of docs/how-it-works.md, which is the output of fsdp explain."""
    told = re.findall(r"^ +\d+ +(gather|reduce) +blocks\.(\d)\b",
                      (source / "docs/how-it-works.md").read_text(), re.M)
    root = xml.parse(fresh / "step-light.svg").getroot()
    rects = [r for r in root.iter(SVG + "rect") if "data-event" in r.attrib]
    for event in ("gather", "reduce"):
        shown = sorted((float(r.get("data-from")), r.get("data-block")) for r in rects
                       if r.get("data-event") == event)
        order = [block for _, block in shown]
        fact(f"the picture's {event}s are those of docs/how-it-works.md, in their order",
             order and order == [block for name, block in told if name == event], order)
    moved = re.findall(r"^ +\d+ +\w+ +blocks\.(\d) .* (?:to|for) blocks\.(\d)",
                       (source / "docs/how-it-works.md").read_text(), re.M)
    ring = sorted((float(r.get("data-from")), r.get("data-buffer"), r.get("data-block"))
                  for r in rects if r.get("data-event") == "whole")
    passed = []
    for index, (_, buffer, block) in enumerate(ring):
        last = [b for _, other, b in ring[:index] if other == buffer]
        passed += [(last[-1], block)] if last else []
    fact("its buffers go from block to block as there", passed and passed == moved,
         f"{passed} {moved}")


def main(arguments):
    if len(arguments) != 1:
        print("usage: plot_test.py SOURCE_DIR", file=sys.stderr)
        return 2
    source = pathlib.Path(arguments[0]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        top = pathlib.Path(folder)
        fresh = top / "fresh"
        for script in ("bench/plot.py", "docs/images/step.py"):
            out = run(source / script, "--out", fresh)
            fact(f"{script} draws", out.returncode == 0, out.stderr)
        if failures:
            return 1
        check_committed(source / "docs/images", fresh)
        check_shape(fresh)
        check_lengths(source, fresh)
        check_step(source, fresh)
        check_errors(source, check_new_numbers(source, top), top)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
