#!/usr/bin/env python3
"""plot.py [--results DIR] [--out DIR]: draws the charts of docs/images from raw lines.

`fsdp bench train --write` and `fsdp bench offload --write` leave pages in bench/results. Each holds
its raw lines: "== ROW, WHAT, N ranks: COMMAND" and below it one JSON object. A row of a chart is a
pair of them, ours and the fastest of FSDP2's. The two bars of a pair share a scale on which FSDP2's
has a fixed length, so lengths compare within a pair and not between rows.

Writes NAME-light.svg and NAME-dark.svg for each chart. Exits with 1 and a sentence where a page, a
row or a number is missing.
"""
import argparse
import dataclasses
import html
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FONT = '-apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif'
WIDTH = 840  # what GitHub shows without scaling


class PlotError(Exception):
    def __init__(self, message, hint):
        super().__init__(f"{message}\n  HINT: {hint}")


# ---- drawing ----

# Text has a contrast of 4.5 or more on GitHub's two backgrounds. Colours are Okabe and Ito's, which
# colour-blind readers can tell apart; every coloured thing also has a label.
PALETTES = {
    "light": {"ink": "#1f2328", "muted": "#59636e", "line": "#d1d9e0", "soft": "#eef1f4",
              "ours": "#0072b2", "peer": "#aab4bf", "back": "#ffffff",
              "blue": "#0072b2", "blue-soft": "#cfe6f5", "orange": "#a84300",
              "orange-soft": "#fbdcc6", "green": "#00694d", "green-soft": "#c5ebde",
              "purple-soft": "#f2d9e7", "purple": "#8f3d6b"},
    "dark": {"ink": "#f0f6fc", "muted": "#9198a1", "line": "#3d444d", "soft": "#1c2128",
             "ours": "#56b4e9", "peer": "#59636e", "back": "#0d1117",
             "blue": "#6cc0f0", "blue-soft": "#0f3a56", "orange": "#f5a26b",
             "orange-soft": "#572b12", "green": "#4fd3ad", "green-soft": "#0b4434",
             "purple-soft": "#4d2440", "purple": "#e7a6cb"},
}


def number(value):
    """Coordinates: at most three decimals, none that say nothing."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


class Drawing:
    """An SVG. Colours are names of PALETTES, so the same calls draw both variants."""

    def __init__(self, palette, width, height, title, description):
        self.palette = PALETTES[palette]
        self.head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                     f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="title desc" '
                     f"font-family='{FONT}'>\n"
                     f'<title id="title">{html.escape(title)}</title>\n'
                     f'<desc id="desc">{html.escape(description)}</desc>\n')
        self.parts = []

    def color(self, name):
        return self.palette.get(name, name)

    def element(self, tag, content=None, **attributes):
        text = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
                       for key, value in attributes.items() if value is not None)
        end = "/>" if content is None else f">{content}</{tag}>"
        self.parts.append(f"<{tag}{text}{end}")

    def rect(self, x, y, width, height, fill, radius=2, stroke=None, tip=None, **more):
        content = None if tip is None else f"<title>{html.escape(tip)}</title>"
        self.element("rect", content, x=number(x), y=number(y), width=number(width),
                     height=number(height), rx=radius, fill=self.color(fill),
                     stroke=stroke and self.color(stroke), **more)

    def line(self, x1, y1, x2, y2, stroke="line", width=1, **more):
        self.element("line", None, x1=number(x1), y1=number(y1), x2=number(x2), y2=number(y2),
                     stroke=self.color(stroke), stroke_width=width, **more)

    def path(self, d, stroke="none", fill="none", width=1, **more):
        self.element("path", None, d=d, stroke=self.color(stroke), fill=self.color(fill),
                     stroke_width=width, **more)

    # `text` may be several pieces, (text, color, weight), one after the other.
    def text(self, x, y, text, color="ink", size=13, weight=None, anchor=None):
        pieces = [(text, color, weight)] if isinstance(text, str) else text
        spans = []
        for index, (piece, ink, bold) in enumerate(pieces):
            more = ' dx="7"' if index else ""
            more += f' font-weight="{bold}"' if bold else ""
            spans.append(f'<tspan fill="{self.color(ink)}"{more}>{html.escape(piece)}</tspan>')
        self.element("text", "".join(spans), x=number(x), y=number(y), font_size=size,
                     text_anchor=anchor)

    def svg(self):
        return self.head + "\n".join(self.parts) + "\n</svg>\n"


# ---- raw lines ----

@dataclasses.dataclass
class Raw:
    what: str      # "Llama 953M, fsdp.cpp, graph"
    command: str
    line: int      # in the page
    values: dict

    def flag(self, name, default=None):
        match = re.search(rf"--{name}[ =](\S+)", self.command)
        return match[1] if match else default


class Page:
    """A page of bench/results."""

    def __init__(self, path):
        self.path = path
        try:
            self.text = path.read_text(errors="replace")
        except OSError as error:
            raise PlotError(f"{path}: {error.strerror}.",
                            "pass the folder of the result pages by --results, or measure: "
                            "bench/reproduce.sh.") from None
        self.lines = []
        rows = self.text.splitlines()
        for index, row in enumerate(rows):
            if head := re.match(r"== (.+), \d+ ranks?: (.+)$", row):
                self.lines.append(self.raw(index, head, rows[index + 1:index + 2]))

    def raw(self, index, head, below):
        place = f"{self.path}:{index + 2}"
        hint = "a raw line is one JSON object below its \"== \" line; measure again with --write."
        try:
            values = json.loads(below[0]) if below else None
        except json.JSONDecodeError as error:
            raise PlotError(f"{place}: \"{head[1]}\" isn't JSON: {error}.", hint) from None
        if not isinstance(values, dict):
            raise PlotError(f"{place}: \"{head[1]}\" has no raw line.", hint)
        for key in ("step_ms", "peak_alloc_mb", "world"):
            value = values.get(key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or \
                    not 0 < value < math.inf:
                raise PlotError(f"{place}: \"{head[1]}\": {key} is {json.dumps(value)}.",
                                "it must be a number above 0; measure again with --write.")
        return Raw(head[1], head[2], index + 2, values)

    def pair(self, row, ours):
        """Our line and FSDP2's fastest."""
        mine = [raw for raw in self.lines if raw.what == f"{row}, {ours}"]
        peers = [raw for raw in self.lines if raw.what.startswith(f"{row}, FSDP2")]
        for found, name in ((mine, f"{row}, {ours}"), (peers, f"{row}, FSDP2")):
            if not found:
                raise PlotError(f"{self.path}: has no raw line of \"{name}\".",
                                "measure that row with --peer, or take it out of CHARTS in "
                                "bench/plot.py.")
        return mine[0], min(peers, key=lambda raw: raw.values["step_ms"])

    def fact(self, name):
        """A cell of the table that the page begins with."""
        match = re.search(rf"^\| {name} \| (.+?) \|$", self.text, re.M)
        if not match:
            raise PlotError(f"{self.path}: has no row \"{name}\" in its first table.",
                            "bench writes it with --write; keep it.")
        return match[1]


# ---- charts ----

@dataclasses.dataclass
class Row:
    name: str           # in the raw lines
    title: str
    note: str           # {tokens}: of a step, all ranks
    ours: str = "fsdp.cpp, graph"


@dataclasses.dataclass
class Chart:
    name: str           # of the files in docs/images
    page: str
    title: str
    peer: str           # what FSDP2 ran with
    rows: list


CHARTS = [
    Chart("h200-train", "h200.md", "Training beside FSDP2",
          "torch.compile and cuDNN attention; its fastest variant per row",
          [Row("Llama 117M, 2 ranks", "Llama 117M", "2 ranks that share the GPU"),
           Row("Llama 182M", "Llama 182M", "{tokens} tokens"),
           Row("Llama 953M", "Llama 953M", "{tokens} tokens"),
           Row("MLP 8 x 20480 fp32", "MLP 3.4B, float32", "8 linears, batch {batch}"),
           Row("Llama 3.6B, selective", "Llama 3.6B", "{tokens} tokens, selective recompute"),
           Row("Llama 3.6B, full", "Llama 3.6B", "{tokens} tokens, full recompute"),
           Row("Qwen2.5 0.5B", "Qwen2.5 0.5B", "{tokens} tokens"),
           Row("Qwen2.5 1.5B", "Qwen2.5 1.5B", "{tokens} tokens"),
           Row("Qwen2.5 3B", "Qwen2.5 3B", "{tokens} tokens")]),
    Chart("h200-offload", "h200-offload.md", "Offload to host memory beside FSDP2",
          "CPUOffloadPolicy and, for Llama, torch.compile",
          [Row("Llama 953M, clip", "Llama 953M", "{tokens} tokens, clipped",
               "fsdp.cpp, everything"),
           Row("Llama 953M, no clip", "Llama 953M", "{tokens} tokens, not clipped",
               "fsdp.cpp, everything"),
           Row("MLP 8 x 20480 fp32, clip", "MLP 3.4B, float32", "8 linears, batch {batch}, clipped",
               "fsdp.cpp, everything")]),
]

PANELS = [  # field, heading, left edge
    ("step_ms", "Time per step", 222),
    ("peak_alloc_mb", "Peak GPU memory", 530),
]
FULL = 178     # length of FSDP2's bars, unless one of ours would then be longer than LONGEST
LONGEST = 212
BAR = 12
ROW = 45
TOP = 50       # of the first row


def digits(value):
    """Three significant digits."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def shown(field, value, beside):
    """A value with its unit, which is that of the value beside it, too."""
    if field == "peak_alloc_mb":
        return f"{digits(value / 1000)} GB"
    return f"{digits(value)} ms" if min(value, beside) < 1000 else f"{digits(value / 1000)} s"


def note(row, peer):
    """The batch, from FSDP2's flags: our command has it as JSON."""
    batch, seq = int(peer.flag("batch", 1)), int(peer.flag("seq", 1))
    tokens = batch * seq * int(peer.flag("accumulate", 1)) * peer.values["world"]
    return row.note.format(tokens=f"{tokens:,}", batch=batch)


def draw_pair(out, row, field, ours, peer, left, top, full):
    """Two bars, ours above; FSDP2's is `full` long."""
    for kind, name, value, other, y, color, weight in (
            ("ours", "fsdp.cpp", ours, peer, top, "ink", 600),
            ("peer", "FSDP2", peer, ours, top + BAR + 3, "muted", None)):
        length = full * value / peer
        figure = shown(field, value, other)
        out.rect(left, y, length, BAR, kind, tip=f"{row.title}, {name}: {figure}",
                 data_row=row.name, data_kind=kind, data_field=field)
        label = [(figure, color, weight)]
        if kind == "ours":
            label.append((f"{ours / peer:.2f}×", "ours", None))
        out.text(left + length + 6, y + 10.5, label, size=12)


def draw(chart, page, palette):
    pairs = [(row, *page.pair(row.name, row.ours)) for row in chart.rows]
    machine = page.fact("machine").split(",")[0]
    torch = re.match(r"(torch [\d.]+)", pairs[0][2].values.get("peer", "torch"))
    software = torch[1] if torch else "PyTorch"
    fields = [field for field, _, _ in PANELS]

    def told(raw, other):
        return " and ".join(shown(field, raw.values[field], other.values[field])
                            for field in fields)

    summary = "; ".join(f"{row.title}, {note(row, peer)}: fsdp.cpp {told(ours, peer)}, "
                        f"FSDP2 {told(peer, ours)}" for row, ours, peer in pairs)
    full = min([FULL] + [LONGEST * peer.values[field] / ours.values[field]
                         for _, ours, peer in pairs for field in fields])
    bottom = TOP + ROW * len(pairs)
    out = Drawing(palette, WIDTH, bottom + 50, f"{chart.title} on an {machine}", summary + ".")

    out.rect(0, 14, 11, 11, "ours")
    out.text(17, 24, "fsdp.cpp", weight=600)
    out.rect(88, 14, 11, 11, "peer")
    out.text(105, 24, "FSDP2", color="muted")
    for field, heading, left in PANELS:
        out.text(left, 24, heading, size=14, weight=600)

    for index, (row, ours, peer) in enumerate(pairs):
        top = TOP + ROW * index
        out.text(0, top + 10.5, row.title, weight=600)
        out.text(0, top + 26, note(row, peer), color="muted", size=12)
        for field, _, left in PANELS:
            draw_pair(out, row, field, ours.values[field], peer.values[field], left, top, full)

    out.text(0, bottom + 20, f"One {machine}, {page.fact('date')}. FSDP2 ({software}) with "
             f"{chart.peer}.", color="muted", size=12)
    out.text(0, bottom + 38, f"Each pair of bars has its own scale. GB: 1000 MiB of LibTorch's "
             f"allocator. Raw lines: bench/results/{chart.page}", color="muted", size=12)
    return out.svg()


def write(name, pictures, folder):
    """`pictures` maps a palette to its SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    for palette, svg in pictures.items():
        (folder / f"{name}-{palette}.svg").write_text(svg)


def main(arguments):
    parser = argparse.ArgumentParser(description="Draws the charts of docs/images from raw lines.")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "bench/results",
                        help="folder of the result pages (bench/results)")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs/images",
                        help="folder to write to (docs/images)")
    options = parser.parse_args(arguments)
    try:
        pages = {chart.page: Page(options.results / chart.page) for chart in CHARTS}
        drawn = {chart.name: {palette: draw(chart, pages[chart.page], palette)
                              for palette in PALETTES} for chart in CHARTS}
    except PlotError as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 1
    for name, pictures in drawn.items():
        write(name, pictures, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
