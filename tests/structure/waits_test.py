#!/usr/bin/env python3
"""waits_test.py SOURCE_DIR [--self-test]: every wait in src ends (docs/architecture.md, "Waits").

A call that waits without a limit of its own needs a comment `// Ends: ...` that says what ends it, on
its line or one of the four above. The store of the rendezvous is read through comm/store.h only.

Prints FILE:LINE and a sentence for each violation and exits with 1. --self-test plants violations and
expects the test to find each. src/bench is left out.
"""
import pathlib
import re
import sys

REASON = re.compile(r"//.*\bEnds: \S")
ABOVE = 4  # lines
# What waits without a limit. Group "name", if there is one, is compared with the file's futures.
UNLIMITED = [
    re.compile(r"\.wait\((?:lock|guard|held)\b"),  # Condition::wait
    re.compile(r"\b\w*(?:thread|worker|copier|grower|heart|watch|watchdog|loader|reaper|other)\w*\.join\(\)"),
    re.compile(r"std::thread\([^;]*\)\.join\(\)"),
    re.compile(r"\bbefore\.join\(\)"),
    re.compile(r"\bwaitpid\([^;]*, 0\)"),
    re.compile(r"\bpoll\([^;]*-1\)"),
    re.compile(r"\bacquire\(\)"),
    re.compile(r"\bMPI_(?:Wait|Barrier|Recv|Send|Bcast|Comm_create_group|Comm_free|Finalize)\("),
    re.compile(r"\bsleep_for\("),  # in a loop that polls
    re.compile(r"\b(?P<name>\w+)\.(?:get|wait)\(\)"),
]
FUTURE = re.compile(r"std::(?:shared_)?future<[^;]*> (\w+)")
STORE = re.compile(r"(?:store_?|prefixed)->(?:get|get_to_str|wait|add|check|compareSet)\(")
STORE_FILES = {"src/comm/store.cpp"}
STORE_ROOMS = ("src/comm", "src/checkpoint", "src/train", "src/cli", "src/planted")
SELF = {"src/base/mutex.h"}  # wraps the calls


def sources(root):
    for path in sorted((root / "src").rglob("*")):
        parts = path.relative_to(root / "src").parts
        if path.suffix in (".h", ".cpp") and parts[0] != "bench":
            yield path


def check_file(name, text):
    lines = text.splitlines()
    futures = set(FUTURE.findall(text))
    for at, line in enumerate(lines):
        code = line.split("//")[0]
        if STORE.search(code) and name.startswith(STORE_ROOMS) and name not in STORE_FILES:
            yield f"{name}:{at + 1}: waits forever for a stopped store; use fetch() or BoundedStore."
        if name in SELF:
            continue
        for pattern in UNLIMITED:
            found = pattern.search(code)
            if not found or ("name" in pattern.groupindex and found["name"] not in futures):
                continue
            if not any(map(REASON.search, lines[max(at - ABOVE, 0):at + 1])):
                yield f"{name}:{at + 1}: say what ends this wait: // Ends: ..."
            break


PLANTED = [
    ("  changed_.wait(lock, [&] { return done_; });", "say what ends"),
    ("  thread_.join();", "say what ends"),
    ("  if (worker_.joinable()) worker_.join();", "say what ends"),
    ("  while (waitpid(pid, &status, 0) < 0) {\n  }", "say what ends"),
    ("  poll(&one, 1, -1);", "say what ends"),
    ("  poll(&one, 1, waits ? 100 : -1);", "say what ends"),
    ("  while (!done()) std::this_thread::sleep_for(kTick);", "say what ends"),
    ("  std::future<int> answer = ask();\n  return answer.get();", "say what ends"),
    ("  const std::string text = store->get_to_str(key);", "stopped store"),
    ("  store_->add(key, 1);", "stopped store"),
    ("  // Ends: soon." + "\n  more();" * 4 + "\n  thread_.join();", "say what ends"),
    ("  thread_.join();  // Ends: the thread has stopped.", ""),
    ("  // Its work is short. Ends: the thread has stopped.\n  thread_.join();", ""),
    ("  // Ends: by its limit.\n  changed_.wait(lock, [&]() FSDP_REQUIRES(mutex_) {\n"
     "    return done_;\n  });", ""),
    ("  changed_.wait_for(lock, limit, done);", ""),
    ("  stream_.wait(device_);\n  list.get();", ""),
]


def self_test():
    failures = 0
    for text, expected in PLANTED:
        found = list(check_file("src/planted.cpp", text + "\n"))
        if bool(found) != bool(expected) or (expected and expected not in found[0]):
            failures += 1
            print(f"planted: {text!r}\n  expected: {expected!r}\n  found: {found}")
    return failures


def main(arguments):
    if not arguments or arguments[1:] not in ([], ["--self-test"]):
        print("usage: waits_test.py SOURCE_DIR [--self-test]", file=sys.stderr)
        return 2
    if arguments[1:]:
        return 1 if self_test() else 0
    root, count = pathlib.Path(arguments[0]).resolve(), 0
    for path in sources(root):
        for violation in check_file(str(path.relative_to(root)), path.read_text()):
            print(violation)
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
