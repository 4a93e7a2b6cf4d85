#!/usr/bin/env python3
"""docker_test.py BUILD_DIR SOURCE_DIR: what can be known of the Dockerfile without a Docker engine.

- Its steps are commands of ./fsdp, and the packages come before the sources.
- What it copies exists, isn't ignored by .dockerignore, and is enough for CMake.
- Builds, runs and the history stay out.

Prints a line for each fact and exits with 1 if one doesn't hold.
"""
import fnmatch
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

PLAIN = {"rm", "cmake", "install"}  # programs that every image has once the packages are there


def instructions(text):
    """(keyword, argument) of each instruction; comments are dropped, continued lines joined."""
    text = re.sub(r"^#.*\n", "", text, flags=re.M)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            keyword, _, argument = line.strip().partition(" ")
            yield keyword, argument.strip()


class Ignored:
    """Is a path below the root left out by .dockerignore?"""

    def __init__(self, text):
        self.patterns = [line.strip().rstrip("/") for line in text.splitlines()
                         if line.strip() and not line.startswith("#")]

    def __call__(self, path):
        parts = pathlib.PurePosixPath(path).parts
        heads = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return any(self.matches(pattern, head) for pattern in self.patterns for head in heads)

    @staticmethod
    def matches(pattern, path):
        if pattern.startswith("**/"):
            return fnmatch.fnmatchcase(path.rpartition("/")[2], pattern[3:])
        return pattern.count("/") == path.count("/") and fnmatch.fnmatchcase(path, pattern)


class Check:
    def __init__(self, build, source):
        self.build, self.source = build, source
        self.steps = list(instructions((source / "Dockerfile").read_text()))
        self.ignored = Ignored((source / ".dockerignore").read_text())
        self.failures = 0

    def fact(self, holds, sentence, detail=""):
        print(f"{'ok' if holds else 'NOT'}: {sentence}{'' if holds else f': {detail}'}")
        self.failures += not holds

    def all(self, keyword):
        return [argument for name, argument in self.steps if name == keyword]

    def cache_variable(self, name):
        found = re.search(rf"^{name}:\w+=(.*)$", (self.build / "CMakeCache.txt").read_text(), re.M)
        return found[1] if found else ""

    def run(self):
        self.check_order()
        self.check_commands()
        self.check_environment()
        self.check_ignored()
        self.check_copies()
        return self.failures

    def check_order(self):
        kinds = [(name, argument) for name, argument in self.steps if name in {"COPY", "RUN"}]
        self.fact(kinds[0] == ("COPY", "fsdp ./") and kinds[1][0] == "RUN"
                  and kinds[1][1].startswith("./fsdp deps"),
                  "packages and LibTorch need nothing but the script", kinds[:2])
        bases = re.findall(r"^BASE=(\S+:\S+)$", "\n".join(self.all("ARG")), re.M)
        self.fact(self.all("FROM") == ["${BASE}"] and len(bases) == 1,
                  "the base is an argument whose default has a tag", (self.all("FROM"), bases))

    def check_commands(self):
        script = (self.source / "fsdp").read_text()
        code = "\n".join(path.read_text() for path in (self.source / "src/cli").glob("*.cpp"))
        known = set(re.findall(r"^  ([a-z]+)\) \w+ \"\$\{@:2\}\"", script, re.M))
        known |= set(re.findall(r'add_subcommand\(\s*"([a-z]+)"', code))
        self.fact({"deps", "doctor", "train"} <= known, "the commands are known", known)
        commands = [command.split() for line in self.all("RUN") for command in line.split(" && ")]
        self.fact(any(words[0] == "./fsdp" for words in commands), "there are steps to look at")
        for words in commands:
            holds = words[1] in known if words[0] == "./fsdp" else words[0] in PLAIN
            self.fact(holds, f"{' '.join(words[:2])} is a command", words)
        targets = (self.source / "src/CMakeLists.txt").read_text()
        programs = re.findall(r"^fsdp_program\(\w+ (\S+)", targets, re.M)
        entry = [json.loads(argument) for argument in self.all("ENTRYPOINT")]
        self.fact(len(entry) == 1 and len(entry[0]) == 1 and entry[0][0] in programs,
                  "the image starts an installed program", (entry, programs))

    def check_environment(self):
        pages = (self.source / "docs/environment.md").read_text()
        names = [name for line in self.all("ENV") for name in re.findall(r"(\w+)=", line)
                 if name.startswith(("FSDP_", "XDG_"))]
        self.fact("FSDP_FLAVOUR" in names, "the kind of LibTorch is chosen", names)
        for name in names:
            self.fact(f"| `{name}` |" in pages, f"{name} is a variable of the script")

    def check_ignored(self):
        for path in [".git/config", "build/release/bin/fsdp", "runs/demo/run.json",
                     "bench/peers/__pycache__/peer.pyc"]:
            self.fact(self.ignored(path), f"{path} stays out")

    def check_copies(self):
        with tempfile.TemporaryDirectory() as folder:
            tree = pathlib.Path(folder) / "tree"
            for argument in self.all("COPY"):
                *names, target = argument.split()
                for name in names:
                    path = self.source / name
                    self.fact(path.exists() and not self.ignored(name), f"{name} is there to copy")
                    if path.is_dir():
                        shutil.copytree(path, tree / target, ignore=self.left_out)
                    elif path.exists():
                        (tree / target).mkdir(parents=True, exist_ok=True)
                        shutil.copy2(path, tree / target / path.name)
            self.check_configures(tree)

    def left_out(self, folder, names):
        relative = pathlib.Path(folder).relative_to(self.source)
        return [name for name in names if self.ignored(str(relative / name))]

    def check_configures(self, tree):
        """CMake has all it needs in `tree`, and so have the rules of the install step."""
        options = re.findall(r"FSDP_CMAKE_ARGS=(\S+)", "\n".join(self.all("ENV")))
        build = tree / "build/release"
        done = subprocess.run(
            ["cmake", "-S", tree, "-B", build, "-G", "Ninja", "-DFSDP_CUDA=OFF", "-DFSDP_MPI=OFF",
             f"-DFSDP_LIBTORCH={(self.build / 'package/torch').resolve()}",
             f"-DCMAKE_PREFIX_PATH={self.cache_variable('CMAKE_PREFIX_PATH')}",
             f"-DCMAKE_CXX_COMPILER={self.cache_variable('CMAKE_CXX_COMPILER')}", *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.fact(done.returncode == 0, "CMake configures what is copied", done.stdout)
        listed = subprocess.run(["ninja", "-C", build, "-t", "commands", "fsdp_programs"],
                                capture_output=True, text=True).stdout
        files = [file for file in re.findall(r" -c (\S+)", listed) if str(build) not in file]
        self.fact(files and all(pathlib.Path(file).exists() for file in files),
                  "the sources that it compiles are there", files)
        rules = "\n".join(path.read_text() for path in build.rglob("cmake_install.cmake"))
        files = [file for file in re.findall(rf'"({tree}/[^"]+)"', rules) if str(build) not in file]
        missing = [file for file in files if not pathlib.Path(file).exists()]
        self.fact(len(files) >= 3 and not missing, "the files that it installs are there", missing)


def main(arguments):
    if len(arguments) != 2:
        print("usage: docker_test.py BUILD_DIR SOURCE_DIR", file=sys.stderr)
        return 2
    failures = Check(*(pathlib.Path(name).resolve() for name in arguments)).run()
    if failures:
        print(f"{failures} facts do not hold")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
