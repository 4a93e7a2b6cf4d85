#!/usr/bin/env python3
"""browser_test.py FSDP [FOLDER]: pages work in a real browser (chromium, headless).

Makes runs with hostile names, writes their reports and the page of fsdp explain, and opens each by
file:// in light and dark. There must be no message on the console, no request for anything else, a
drawing in every chart, values on hover, and other colours in the dark. Screenshots go to FOLDER if
one is given. Prints one line per fact; exits with 1 if one doesn't hold and with 77 if there is no
chromium.
"""
import base64
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

LIMIT = 60  # seconds for the browser's answer to a command
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">&'\""
failures = 0


def fact(sentence, holds, why=""):
    global failures
    failures += not holds
    print(f"{'ok' if holds else 'NOT'}: {sentence}" + (f"\n  {why}" if why and not holds else ""))


class Browser:
    """Chromium, driven through its debugging pipe: JSON messages that end in a zero byte."""

    def __init__(self, program, folder):
        to_browser, self.out = os.pipe()
        self.into, from_browser = os.pipe()

        def hand_over():  # the browser reads from 3 and writes to 4
            read, write = os.dup(to_browser), os.dup(from_browser)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--disable-background-networking", "--remote-debugging-pipe",
             f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=hand_over, close_fds=False, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        os.set_blocking(self.into, False)
        self.buffer, self.number, self.events, self.session = b"", 0, [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def receive(self, until):
        while b"\0" not in self.buffer:
            try:
                part = os.read(self.into, 1 << 20)
                if not part:
                    raise RuntimeError("the browser is gone")
                self.buffer += part
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError("the browser doesn't answer")
                time.sleep(0.005)
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT
        while True:
            answer = self.receive(until)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def value(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def open(self, page, dark, width=1280):
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=page.as_uri())
        until = time.monotonic() + LIMIT
        while self.value("document.readyState") != "complete" or \
                self.value("location.href") != page.as_uri():
            if time.monotonic() > until:
                raise TimeoutError(f"{page} doesn't load")

    def messages(self):
        """What the page logged or threw."""
        return [json.dumps(event["params"])[:400] for event in self.events if event.get("method") in
                ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")]

    def requests(self):
        return [event["params"]["request"]["url"] for event in self.events
                if event.get("method") == "Network.requestWillBeSent"]

    def screenshot(self, file):
        height = min(self.value("document.documentElement.scrollHeight"), 12000)
        width = self.value("innerWidth")
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip={
            "x": 0, "y": 0, "width": width, "height": height, "scale": 1})
        file.write_bytes(base64.b64decode(picture["data"]))

    def hover(self, selector):
        """The tip's text with the pointer in the middle of an element."""
        self.value(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = self.value(f"(r => [r.x + r.width / 2, r.y + r.height / 2])"
                         f"(document.querySelector({selector!r}).getBoundingClientRect())")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        return self.value("(t => t && t.style.display === 'block' ? t.textContent : '')"
                          "(document.getElementById('tip'))")

    def close(self):
        os.close(self.out)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def write_lines(file, objects):
    file.write_text("".join(json.dumps(one) + "\n" for one in objects))


def make_run(root, steps, shift):
    root.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        line = {"step": step, "loss": 6 / math.sqrt(step + shift) + 0.1 * math.sin(step),
                "grad_norm": 1 + 0.3 * math.cos(step), "lr": 3e-4 * step / steps,
                "tokens": 4096 * step, "tokens_per_s": 1e5 + step, "memory_mb": 900,
                "step_ms": 40 + math.sin(step), "data_ms": 1, "comm_ms": 6,
                "skipped": step == 30}
        if step == 30:
            line["loss"] = "NaN"
        if step % 20 == 0:
            line["eval_loss"] = 5 / math.sqrt(step)
        lines.append(line)
    write_lines(root / "metrics.jsonl", lines)
    held = {"parameters": 1 << 20, "gradients": 1 << 20, "optimizer": 2 << 20, "activations": 5 << 20}
    planned = {"parameters": 1 << 20, "gradients": 1 << 20, "states": 2 << 20, "activations": 4 << 20}
    write_lines(root / "events.jsonl", [
        {"time": 1.7e9, "step": 0, "event": "start", "model": HOSTILE, "ranks": 2, "device": HOSTILE},
        {"time": 1.7e9, "step": 3, "event": "memory", "held": held, "planned": planned},
        {"time": 1.7e9, "step": 9, "event": "warning", "name": HOSTILE, "text": HOSTILE,
         "hint": HOSTILE},
        {"time": 1.7e9, "step": 30, "event": "skip", "text": HOSTILE},
        {"time": 1.7e9, "step": 40, "event": "checkpoint", "name": "step-40", "waited_ms": 12.5},
        {"time": 1.7e9, "step": 40, "event": "ranks", "ranks": [
            {"rank": rank, "host": HOSTILE, "step_ms": 40 + rank, "data_ms": 1, "comm_ms": 6 - rank,
             "memory_mb": 900} for rank in range(2)]},
        {"time": 1.7e9, "step": 50, "event": "resume", "ranks": 2},
        {"time": 1.7e9, "step": steps, "event": "end", "seconds": {"compute": 3, HOSTILE: 1}}])
    (root / "config.toml").write_text(
        f"[train]\nsteps = {steps}\nseed = {shift}\n[data]\ntrain = '{HOSTILE}'\n")
    bars = [{"begin": i, "end": i + 0.9, "name": HOSTILE, "kind": "forward", "colour": 0}
            for i in range(10)]
    (root / "profile.json").write_text(json.dumps({
        "step": 14, "world": 2, "traced_ms": 12, "step_ms": 10, "hidden_ms": 1,
        "families": [{"name": "products", "ms": 8, "calls": 40, "tflops": 300},
                     {"name": "communication, exposed", "ms": 3}, {"name": HOSTILE, "ms": 1}],
        "peak_tflops": 989, "advice": [HOSTILE],
        "units": [{"name": HOSTILE, "forward_ms": 3, "backward_ms": 6, "exposed_ms": 1}],
        "kernels": [{"name": HOSTILE, "family": "products", "ms": 8, "calls": 4}],
        "timeline": {"end": 12, "lanes": [{"name": "compute", "bars": bars}]}}))


def fsdp(binary, *arguments):
    done = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr)


def check(browser, page, name, shots):
    colours = set()
    for dark in (False, True):
        mode = "dark" if dark else "light"
        browser.open(page, dark)
        charts = browser.value("document.querySelectorAll('figure[data-chart]').length")
        drawn = browser.value("[...document.querySelectorAll('figure[data-chart] svg')]"
                              ".filter(s => s.querySelector('path, rect, circle')).length")
        fact(f"{name}, {mode}: every chart is drawn", charts > 0 and drawn == charts,
             f"{drawn} of {charts}")
        broken = browser.value("document.body.innerText.includes(\"can't be drawn\")")
        fact(f"{name}, {mode}: no chart is broken", not broken)
        wide = browser.value("document.documentElement.scrollWidth - innerWidth")
        fact(f"{name}, {mode}: nothing is wider than the window", wide <= 0, f"{wide} px")
        colours.add(browser.value("getComputedStyle(document.body).backgroundColor"))
        if shots:
            browser.screenshot(shots / f"{name}-{mode}.png")
        fact(f"{name}, {mode}: nothing on the console", not browser.messages(),
             "\n  ".join(browser.messages()))
        others = [url for url in browser.requests() if url != page.as_uri()
                  and not url.startswith("data:")]
        fact(f"{name}, {mode}: nothing else is requested", not others, str(others))
    fact(f"{name}: the dark page has other colours", len(colours) == 2, str(colours))
    title = browser.value("document.title")
    images = browser.value("document.images.length")
    fact(f"{name}: hostile text stays text", title != "taken" and images == 0, title)
    browser.open(page, False, width=420)
    wide = browser.value("document.documentElement.scrollWidth - innerWidth")
    fact(f"{name}: fits a phone", wide <= 0, f"{wide} px too wide")


def main():
    binary = sys.argv[1]
    shots = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if not program:
        print("skipped: there is no chromium (apt install chromium)")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        make_run(folder / "one <b>&", 100, 0)
        make_run(folder / "two", 200, 3)
        one, both, story = folder / "one.html", folder / "both.html", folder / "explain.html"
        fsdp(binary, "report", folder / "one <b>&", "-o", one)
        fsdp(binary, "report", folder / "one <b>&", folder / "two", "-o", both)
        fsdp(binary, "explain", "--html", story)
        browser = Browser(program, folder / "profile")
        try:
            for page, name in ((one, "a report"), (both, "two runs"), (story, "explain")):
                check(browser, page, name, shots)
            browser.open(one, False)
            tip = browser.hover("figure[data-chart='0'] svg")
            fact("hovering over the loss shows its value", "loss:" in tip and "step" in tip, tip)
            browser.open(both, False)
            browser.value("document.querySelector('.legend button').click()")
            tip = browser.hover("figure[data-chart='0'] svg")
            fact("a run that is switched off has no value", tip.count("one <b>&") == 1, tip)
            browser.value("document.querySelector('.tools button:not([hidden])').click()")
            fact("the scale can be logarithmic", not browser.messages(), str(browser.messages()))
        finally:
            browser.close()
    return 1 if failures else 0


sys.exit(main())
