#!/usr/bin/env python3
"""docs_test.py SOURCE_DIR: what the documents say about the code is what the code says.

- The README is short, and its C++ and that of docs/library.md is part of an example.
- docs/environment.md has the variables that are read, docs/commands.md the commands that exist.
- docs/commands.md has the exit codes of src/base/exit_code.h.
- Errors explained in docs/hangs.md are errors of the code; names in docs/tour.md are in its files.
- Links, their anchors and pictures exist; docs/README.md leads to every page.

Prints FILE:LINE and a sentence for each violation and exits with 1.
"""
import pathlib
import re
import sys

INTERNAL = {"FSDP_RUN", "FSDP_STATUS_FD", "FSDP_MEMORY_DIR"}  # set by the launcher for its ranks, not by people
README_LINES = 160
FROM_EXAMPLES = ["README.md", "docs/library.md"]
IDENTIFIER = re.compile(r"`([A-Za-z_]\w*(?:::[A-Za-z_]\w*)*)(?:\(\))?`")


def blocks(text, language):
    """(line, text) of each fenced block in `language`."""
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S):
        yield text[:match.start()].count("\n") + 1, match[1]


def words(text):
    return " ".join(text.split())


def anchors(text):
    """Of a page's headings, as GitHub makes them."""
    found, counts = set(), {}
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S),
                              re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = counts[slug] = counts.get(slug, -1) + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


class Check:
    def __init__(self, root):
        self.root = root
        self.documents = {path: path.read_text() for path in
                          sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])}
        self.readme = root / "README.md"
        self.environment = root / "docs/environment.md"
        sources = sorted(p for p in (root / "src").rglob("*") if p.suffix in {".h", ".cpp"})
        # Literals that are cut into lines are one text to who reads them.
        self.code = re.sub(r'"\s*\n\s*"', "", "\n".join(p.read_text() for p in sources))
        self.wrapper = (root / "fsdp").read_text()
        self.violations = []

    def report(self, path, line, sentence):
        self.violations.append(f"{path.relative_to(self.root)}:{line}: {sentence}")

    def run(self):
        self.check_length()
        self.check_examples()
        self.check_variables()
        self.check_commands()
        self.check_errors()
        self.check_exit_codes()
        self.check_tour()
        self.check_links()
        self.check_pictures()
        self.check_index()
        return self.violations

    def check_length(self):
        lines = self.documents[self.readme].count("\n")
        if lines > README_LINES:
            self.report(self.readme, README_LINES + 1,
                        f"has {lines} lines; {README_LINES} are enough, details go to docs/.")

    def check_examples(self):
        examples = [words(p.read_text()) for p in (self.root / "examples").rglob("*.cpp")]
        for name in FROM_EXAMPLES:
            path = self.root / name
            found = list(blocks(self.documents[path], "cpp"))
            if not found:
                self.report(path, 1, "has no C++ example.")
            for line, text in found:
                if not any(words(text) in example for example in examples):
                    self.report(path, line, "this C++ is not part of a file in examples/.")

    def check_variables(self):
        read = set(re.findall(r'(?:getenv|text|integer|flag)\("(FSDP_[A-Z_]+)"', self.code))
        read |= set(re.findall(r"\$\{?(FSDP_[A-Z_]+)", self.wrapper))
        rows = {}
        for number, line in enumerate(self.documents[self.environment].splitlines(), 1):
            match = re.match(r"\| `(FSDP_[A-Z_]+)` \|", line)
            if match:
                rows[match[1]] = number
        for name in sorted(read - INTERNAL - set(rows)):
            self.report(self.environment, 1, f"has no row for {name}, which is read.")
        for name in sorted(set(rows) - read):
            self.report(self.environment, rows[name], f"{name} is not read by anything.")

    def check_commands(self):
        made = re.findall(r'(\w+)(?:\.|->)add_subcommand\(\s*"([a-z]+)"', self.code)
        made += re.findall(r'Flags flags\(\s*(\w+), "([a-z]+)"', self.code)
        scripts = re.findall(r"^  ([a-z]+)\) \w+ \"\$\{@:2\}\"", self.wrapper, re.M)
        known = {name for _, name in made} | set(scripts)
        page = self.root / "docs/commands.md"
        rows = re.findall(r"^\| `\./fsdp ([a-z ]+)", self.documents[page], re.M)
        wanted = {name if parent == "app" else f"{parent} {name}" for parent, name in made
                  if parent in {"app", "bench"}}
        for name in sorted((wanted | set(scripts)) - {"bench"}):
            if not any(row.strip() == name or row.startswith(name + " ") for row in rows):
                self.report(page, 1, f"has no row for fsdp {name}.")
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

    def check_exit_codes(self):
        """The table has the codes of src/base/exit_code.h."""
        page = self.root / "docs/commands.md"
        header = (self.root / "src/base/exit_code.h").read_text()
        codes = set(re.findall(r"^  kExit\w+ = (\d+),", header, re.M))
        table = self.documents[page].split("## Exit codes")[-1].split("\n## ")[0]
        rows = set(re.findall(r"\d+", " ".join(re.findall(r"^\| ([\d, +N]+) \|", table, re.M))))
        for code in sorted(codes - rows, key=int):
            self.report(page, 1, f"has no row for exit code {code}.")
        for code in sorted(rows - codes, key=int):
            self.report(page, 1, f"has a row for exit code {code}, which no command returns.")

    def check_tour(self):
        """Every name in a section is in the files that the section links, or in their headers."""
        path = self.root / "docs/tour.md"
        text = self.documents[path]
        stops = 0
        for section in re.split(r"^(?=## )", text, flags=re.M)[1:]:
            stops += bool(re.match(r"## \d\. .*\.cpp\)", section))
            first = text[:text.index(section)].count("\n") + 1
            lines = section.splitlines()
            for number, line in enumerate(lines, first):
                # A row of a table stands for itself.
                scope = line if line.startswith("|") else section
                files = [path.parent / target for target in
                         re.findall(r"\]\((\.\./(?:src|include)/[^)#]+)", scope)]
                files += [file.with_suffix(".h") for file in files]
                code = "\n".join(file.read_text() for file in files if file.exists())
                for name in IDENTIFIER.findall(line) if code else []:
                    for word in name.split("::"):
                        if not re.search(rf"\b{word}\b", code):
                            self.report(path, number, f"{name} is in none of the files named here.")
        if stops != 5:
            self.report(path, 1, f"has {stops} numbered stops with a file; five are promised.")

    def check_links(self):
        for path, text in self.documents.items():
            for number, line in enumerate(text.splitlines(), 1):
                for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", line):
                    if "://" in target:
                        continue
                    file = (path.parent / target).resolve() if target else path
                    if not file.exists():
                        self.report(path, number, f"the link to {target} leads nowhere.")
                    elif anchor and file.suffix == ".md" and \
                            anchor not in anchors(file.read_text()):
                        self.report(path, number, f"{target} has no heading for #{anchor}.")

    def check_pictures(self):
        for path, text in self.documents.items():
            for number, line in enumerate(text.splitlines(), 1):
                for file in re.findall(r'(?:src|srcset)="([^"]+)"', line):
                    if not (path.parent / file).exists():
                        self.report(path, number, f"there is no picture {file}.")
                if "<img" in line and not re.search(r'alt="[^"]{20,}"', line):
                    self.report(path, number, "this picture has no alt text.")
            for picture in re.findall(r"<picture>.*?</picture>", text, re.S):
                light = re.search(r'src="([^"]+)-light\.svg"', picture)
                dark = re.search(r'dark\)" srcset="([^"]+)-dark\.svg"', picture)
                if not light or not dark or light[1] != dark[1]:
                    number = text[:text.index(picture)].count("\n") + 1
                    self.report(path, number, "this picture is not one for light and one for dark.")

    def check_index(self):
        index = self.root / "docs/README.md"
        linked = {(index.parent / target).resolve() for target in
                  re.findall(r"\]\(([^)#]+)", self.documents[index])}
        for page in sorted(self.root.glob("docs/*.md")):
            if page != index and page not in linked:
                self.report(index, 1, f"doesn't lead to docs/{page.name}.")


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
