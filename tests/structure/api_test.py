#!/usr/bin/env python3
"""api_test.py SOURCE_DIR: the API reference is complete and true.

Every public header begins with a file comment and is on the main page (docs/api.dox). The tables
there list every method of Sharded, with the same marks ("Collective.", "Waits for the device.") as
its comment. Doxygen, which checks that every public name is documented, has no warnings. Prints
FILE:LINE and a sentence for each violation and exits with 1; with 77 if doxygen isn't installed.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile


class Check:
    def __init__(self, root):
        self.root = root
        self.page = root / "docs/api.dox"
        self.headers = sorted((root / "include").rglob("*.h"))
        self.violations = []

    def report(self, path, line, sentence):
        self.violations.append(f"{path.relative_to(self.root)}:{line}: {sentence}")

    def run(self):
        self.check_headers()
        self.check_marks()
        return self.violations

    def check_headers(self):
        listed = re.findall(r'^\| @ref \S+ "(fsdp/\S+)"', self.page.read_text(), re.M)
        for path in self.headers:
            lines = path.read_text().splitlines() + ["", ""]
            if lines[0] != "/// @file" or not lines[1].startswith("/// "):
                self.report(path, 1, 'doesn\'t begin with "/// @file" and a description.')
            name = str(path.relative_to(self.root / "include"))
            if name.count("/") == 1 and name != "fsdp/fsdp.h" and name not in listed:
                self.report(self.page, 1, f"its list of headers lacks {name}.")
        for name in listed:
            if not (self.root / "include" / name).exists():
                self.report(self.page, 1, f"lists {name}, which doesn't exist.")

    def check_marks(self):
        header = self.root / "include/fsdp/fully_shard.h"
        methods = sharded_methods(header.read_text())
        rows = table_rows(self.page.read_text())
        if not methods:
            self.report(header, 1, "no method of Sharded was found.")
        for name, (line, marks) in methods.items():
            if name not in rows:
                self.report(header, line, f"docs/api.dox has no row for Sharded::{name}().")
            elif rows[name][1] != marks:
                self.report(self.page, rows[name][0],
                            f"{name}(): the row says {rows[name][1]}, the header {marks}.")
        for name in sorted(set(rows) - set(methods)):
            self.report(self.page, rows[name][0], f"Sharded has no method {name}().")


def mark(comment, words):
    """no, yes, or the condition between the mark's words and its full stop."""
    match = re.search(rf"(?:^| ){words}\b([^.]*)\.", comment)
    return (match[1].strip() or "yes") if match else "no"


def sharded_methods(text):
    """{name: (line, (collective, waits))} of the public methods of class Sharded."""
    start = text.find("class Sharded {")
    body = text[start:text.find("\n protected:", start)]
    first = text[:start].count("\n") + 1
    methods, comment = {}, []
    for number, line in enumerate(body.splitlines(), first):
        line = line.strip()
        if line.startswith("///"):
            comment.append(line.removeprefix("///").strip())
            continue
        match = re.search(r"\b([a-z]\w*)\(", line)
        if match and comment and not line.startswith("explicit"):
            whole = " ".join(comment)
            methods[match[1]] = (number, (mark(whole, "Collective"),
                                          mark(whole, "Waits for the device")))
        comment = []
    return methods


def table_rows(text):
    """{name: (line, (collective, waits))} of the tables on the main page."""
    rows = {}
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip() for cell in line.split("|")]
        match = re.match(r"@ref fsdp::Sharded::(\w+) ", cells[1] if len(cells) > 1 else "")
        if match:
            rows[match[1]] = (number, (cells[2], cells[3]))
    return rows


def doxygen_warnings(root):
    settings = (root / "docs/Doxyfile").read_text()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["doxygen", "-"], cwd=root, text=True, capture_output=True,
                              input=f'{settings}\nOUTPUT_DIRECTORY = "{folder}"\n')
        if not (pathlib.Path(folder) / "api/index.html").exists():
            return [f"docs/Doxyfile:1: doxygen wrote no index.html. {done.stderr}"]
    lines = done.stderr.replace(f"{root}/", "").splitlines()
    return lines or ([] if done.returncode == 0 else ["docs/Doxyfile:1: doxygen failed."])


def main(arguments):
    if len(arguments) != 1:
        print("usage: api_test.py SOURCE_DIR", file=sys.stderr)
        return 2
    root = pathlib.Path(arguments[0]).resolve()
    violations = Check(root).run()
    doxygen = shutil.which("doxygen")
    if doxygen:
        violations += doxygen_warnings(root)
    for violation in violations:
        print(violation)
    if violations:
        return 1
    if not doxygen:
        print("doxygen isn't installed: what it checks is skipped.")
        return 77
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
