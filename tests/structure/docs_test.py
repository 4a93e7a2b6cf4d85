#!/usr/bin/env python3
"""docs_test.py SOURCE_DIR: what the documents say about the code is what the code says.

The README's C++ is part of an example, its environment variables are those that are read, its
commands exist; the errors that docs/hangs.md explains are errors of the code; links lead somewhere.
Prints FILE:LINE and a sentence for each violation and exits with 1.
"""
import pathlib
import re
import sys

INTERNAL = {"FSDP_RUN"}  # set by the launcher for its ranks, not by people


def blocks(text, language):
    """(line, text) of each fenced block in `language`."""
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S):
        yield text[:match.start()].count("\n") + 1, match[1]


def words(text):
    return " ".join(text.split())


class Check:
    def __init__(self, root):
        self.root = root
        self.documents = {path: path.read_text() for path in
                          sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])}
        self.readme = root / "README.md"
        sources = sorted(p for p in (root / "src").rglob("*") if p.suffix in {".h", ".cpp"})
        # Literals that are cut into lines are one text to who reads them.
        self.code = re.sub(r'"\s*\n\s*"', "", "\n".join(p.read_text() for p in sources))
        self.wrapper = (root / "fsdp").read_text()
        self.violations = []

    def report(self, path, line, sentence):
        self.violations.append(f"{path.relative_to(self.root)}:{line}: {sentence}")

    def run(self):
        self.check_examples()
        self.check_variables()
        self.check_commands()
        self.check_errors()
        self.check_links()
        return self.violations

    def check_examples(self):
        examples = [words(p.read_text()) for p in (self.root / "examples").rglob("*.cpp")]
        found = list(blocks(self.documents[self.readme], "cpp"))
        if not found:
            self.report(self.readme, 1, "has no C++ example.")
        for line, text in found:
            if not any(words(text) in example for example in examples):
                self.report(self.readme, line, "this C++ is not part of a file in examples/.")

    def check_variables(self):
        read = set(re.findall(r'(?:getenv|text|integer|flag)\("(FSDP_[A-Z_]+)"', self.code))
        read |= set(re.findall(r"\$\{?(FSDP_[A-Z_]+)", self.wrapper))
        rows = {}
        for number, line in enumerate(self.documents[self.readme].splitlines(), 1):
            match = re.match(r"\| `(FSDP_[A-Z_]+)` \|", line)
            if match:
                rows[match[1]] = number
        for name in sorted(read - INTERNAL - set(rows)):
            self.report(self.readme, 1, f"has no row for {name}, which is read.")
        for name in sorted(set(rows) - read):
            self.report(self.readme, rows[name], f"{name} is not read by anything.")

    def check_commands(self):
        known = set(re.findall(r'add_subcommand\(\s*"([a-z]+)"', self.code))
        known |= set(re.findall(r"^  ([a-z]+)\) \w+ \"\$\{@:2\}\"", self.wrapper, re.M))
        for path, text in self.documents.items():
            for number, line in enumerate(text.splitlines(), 1):
                for name in re.findall(r"(?:^\./|`(?:\./)?)fsdp ([a-z]+)\b", line):
                    if name not in known:
                        self.report(path, number, f"there is no command fsdp {name}.")

    def check_errors(self):
        path = self.root / "docs/hangs.md"
        found = 0
        for number, line in enumerate(self.documents[path].splitlines(), 1):
            if line.startswith("## `"):
                found += 1
                if line[4:].rstrip("`") not in self.code:
                    self.report(path, number, f"no error has the words {line[3:]}.")
        if found == 0:
            self.report(path, 1, "explains no error.")

    def check_links(self):
        for path, text in self.documents.items():
            for number, line in enumerate(text.splitlines(), 1):
                for target in re.findall(r"\]\(([^)#]+)[^)]*\)", line):
                    if "://" not in target and not (path.parent / target).exists():
                        self.report(path, number, f"the link to {target} leads nowhere.")


def main(arguments):
    if len(arguments) != 1:
        print("usage: docs_test.py SOURCE_DIR", file=sys.stderr)
        return 2
    violations = Check(pathlib.Path(arguments[0]).resolve()).run()
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
