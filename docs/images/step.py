#!/usr/bin/env python3
"""step.py [--out DIR]: draws step-light.svg and step-dark.svg: a unit, and a step of one rank.

The schedule is that of docs/how-it-works.md (fsdp explain): five blocks, a ring of three buffers,
one gather ahead. plot_test.py compares the two.
"""
import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))
from plot import PALETTES, WIDTH, Drawing, write  # noqa: E402

HEIGHT = 508
LEFT = 118                # of everything but the names of lanes
LENGTH = 16.5             # of the step, in units of one block's forward
UNIT = (WIDTH - 1 - LEFT) / LENGTH
RANKS = 4
PARAMETERS = ["up.weight", "gate.weight", "down.weight"]
TINTS = {"light": ["#dcedf9", "#b5d8f1", "#8dc3e8"], "dark": ["#12334b", "#1a4c70", "#236796"]}

# The step: (event, block, from, to). A gather starts when the block before it starts to compute, a
# reduction when the block's backward is done.
GATHER, FORWARD, BACKWARD, REDUCE = 0.72, 1.0, 1.6, 0.95


def schedule():
    events = [("gather", 0, 0, GATHER)]
    now = GATHER + 0.06
    for block in range(5):
        events.append(("forward", block, now, now + FORWARD))
        if block < 4:
            events.append(("gather", block + 1, now, now + GATHER))
        now += FORWARD
    now += 0.12
    for block in reversed(range(5)):
        events.append(("backward", block, now, now + BACKWARD))
        if block in (2, 1):  # the block before this one was resharded in forward
            events.append(("gather", block - 1, now, now + GATHER))
        now += BACKWARD
        events.append(("reduce", block, now, now + REDUCE))
    events.append(("update", None, now + REDUCE + 0.1, LENGTH))
    return events


# Which block each buffer of the ring holds, one after the other: (block, its gather).
RING = [[(0, 0), (3, 0), (0, 1)], [(1, 0), (4, 0), (1, 1)], [(2, 0)]]


def x_of(time):
    return LEFT + time * UNIT


def heading(out, y, text, more):
    out.text(0, y, text, size=15, weight=600)
    out.text(WIDTH, y, more, size=12, color="muted", anchor="end")


def lane(out, y, text, height):
    out.text(0, y + height / 2 + 4.5, text, size=12.5, color="muted")


def box(out, x, y, width, height, fill, stroke, label, color="ink", size=12, weight=None, **more):
    out.rect(x, y, width, height, fill, radius=3, stroke=stroke, **more)
    out.text(x + width / 2, y + height / 2 + size * 0.36, label, size=size, color=color,
             weight=weight, anchor="middle")


def draw_unit(out, tints, top):
    heading(out, top + 12, "A unit is one flat buffer, cut into a shard per rank",
            "here a block of three weights on four ranks")
    span = WIDTH - 1 - LEFT
    third, quarter = span / 3, span / RANKS
    weights, flat, shards = top + 32, top + 74, top + 122

    lane(out, weights, "parameters", 24)
    for index, name in enumerate(PARAMETERS):
        x = LEFT + index * third
        box(out, x + 12, weights, third - 24, 24, tints[index], "blue", name)
        for side, at in ((12, x), (third - 12, x + third)):
            out.path(f"M{x + side:.1f} {weights + 27} L{at:.1f} {flat - 3}", "line", width=1)

    lane(out, flat, "flat buffer", 24)
    for index in range(3):
        out.rect(LEFT + index * third, flat, third, 24, tints[index], radius=0)
    out.rect(LEFT, flat, span, 24, "none", radius=3, stroke="blue")
    for cut in range(1, RANKS):
        x = LEFT + cut * quarter
        out.line(x, flat - 4, x, flat + 28, "ink", 1.4, stroke_dasharray="3 2.5")

    lane(out, shards, "shards", 24)
    for rank in range(RANKS):
        x, width = LEFT + rank * quarter + 9, quarter - 18
        for index in range(3):  # the part of each parameter in this shard
            begin = max(rank * quarter, index * third)
            end = min((rank + 1) * quarter, (index + 1) * third)
            if begin < end - 0.01:
                scale = width / quarter
                out.rect(x + (begin - rank * quarter) * scale, shards, (end - begin) * scale, 24,
                         tints[index], radius=0)
        box(out, x, shards, width, 24, "none", "blue", f"rank {rank}")
        for side, at in ((9, 0), (quarter - 9, quarter)):
            left = LEFT + rank * quarter
            out.path(f"M{left + at:.1f} {flat + 27} L{left + side:.1f} {shards - 3}", "line")
    out.text(LEFT, shards + 43, "A rank keeps its shard of parameters, gradients and optimizer "
             "states. The rest comes and goes.", size=12, color="muted")


def draw_step(out, top):
    events = schedule()
    end = {(event, block): to for event, block, _, to in events}
    heading(out, top + 12, "A step, as each rank runs it",
            "five blocks, a ring of three buffers, time from left to right")
    over = end["reduce", 0]
    gathers, ring, compute, reduces, kept = top + 50, top + 86, top + 182, top + 220, top + 258

    borders = [0, next(f for e, b, f, _ in events if (e, b) == ("backward", 4)) - 0.06, over + 0.05]
    for name, begin in zip(("forward", "backward", "update"), borders):
        x = x_of(begin)
        out.text(x + (5 if begin else 1), top + 38, name, size=12.5, weight=600)
        if begin:
            bottom = compute + 30 if name == "backward" else kept - 6
            out.line(x, top + 28, x, bottom, "line", 1, stroke_dasharray="2 3")

    lane(out, gathers, "all-gather", 22)
    lane(out, compute, "compute", 26)
    lane(out, reduces, "reduce-scatter", 22)
    lane(out, kept, "kept shards", 24)
    styles = {"gather": (gathers, 22, "blue-soft", "blue"),
              "forward": (compute, 26, "soft", "muted"),
              "backward": (compute, 26, "soft", "muted"),
              "reduce": (reduces, 22, "orange-soft", "orange")}
    for event, block, begin, to in events:
        if event == "update":
            continue
        y, height, fill, stroke = styles[event]
        box(out, x_of(begin) + 1, y, (to - begin) * UNIT - 2, height, fill, stroke, str(block),
            data_event=event, data_block=block, data_from=begin)

    # What the ring holds: from the start of a gather until the buffer goes to another block.
    starts = {}
    for event, block, begin, to in events:
        if event == "gather":
            starts.setdefault(block, []).append((begin, to))
    for index, tenants in enumerate(RING):
        y = ring + index * 29
        lane(out, y, f"buffer {index + 1}", 24)
        for place, (block, which) in enumerate(tenants):
            begin, whole = starts[block][which]
            leaves = over
            if place + 1 < len(tenants):
                after, again = tenants[place + 1]
                leaves = starts[after][again][0]
            x, width = x_of(begin) + 1, (leaves - begin) * UNIT - 2
            out.rect(x, y, width, 24, "none", radius=3, stroke="blue", stroke_dasharray="2 2")
            x, width = x_of(whole), (leaves - whole) * UNIT - 1
            box(out, x, y, width, 24, "blue-soft", "blue", f"block {block}" if width > 50
                else str(block), data_event="whole", data_block=block, data_from=begin,
                data_buffer=index)

    update = next(item for item in events if item[0] == "update")
    out.rect(x_of(0) + 1, kept, (update[2] - 0.05) * UNIT - 2, 24, "none", radius=3, stroke="blue")
    out.text(x_of(0) + 10, kept + 16.5, "1/4 of every block: parameters and optimizer states; "
             "gradients once they are reduced", size=12)
    box(out, x_of(update[2]) + 1, kept, (update[3] - update[2]) * UNIT - 2, 24, "green-soft",
        "green", "AdamW")

    # What to see in it.
    remark(out, x_of(borders[1]) + 5, gathers + 15.5, "4, 3 and 2 are still whole", "blue")
    remark(out, x_of(starts[0][1][1]) + 8, gathers + 15.5, "gathered again", "blue")
    remark(out, x_of(end["backward", 4]) - 8, reduces + 15.5,
           "the mean over ranks; a rank gets its 1/4", "orange", "end")
    remark(out, WIDTH - 1, kept + 41, "updates this rank's shards; nothing is sent", "green", "end")
    remark(out, LEFT, kept + 41, "dashed: the gather is under way", "muted")


def remark(out, x, y, text, color, anchor=None):
    out.text(x, y, text, size=11.5, color=color, anchor=anchor)


def draw(palette):
    out = Drawing(palette, WIDTH, HEIGHT, "A unit and a step",
                  "A unit's parameters are packed into one flat buffer, which is cut into one "
                  "shard per rank. In forward each block is all-gathered into one of three buffers "
                  "while the block before it computes; the block used least recently is resharded "
                  "to make room. Backward gathers again what was resharded, and reduce-scatters "
                  "each block's gradient when it is complete. The optimizer updates the rank's "
                  "shards and sends nothing.")
    draw_unit(out, TINTS[palette], 4)
    draw_step(out, 196)
    return out.svg()


def main(arguments):
    parser = argparse.ArgumentParser(description="Draws the picture of a step.")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs/images",
                        help="folder to write to (docs/images)")
    options = parser.parse_args(arguments)
    write("step", {palette: draw(palette) for palette in PALETTES}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
