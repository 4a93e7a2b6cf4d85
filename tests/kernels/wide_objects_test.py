"""wide_objects_test.py OBJECT...: what the objects of kernels/cpu/adamw_*.cpp define.

Two of them are compiled for CPUs with wider registers than the machine may have. If one defined a
function that other files define too (an inline function, a template), the linker could pick that
copy for all of them, and it would crash on a smaller CPU. So each may define its one pass and
nothing shared. On x86_64 none may fuse a product with a sum, or the widths would differ in their
last bits.
"""
import re
import subprocess
import sys


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def problems(path):
    width = re.search(r"adamw_(\d+)", path).group(1)
    listed = output("nm", "-C", "--defined-only", path).splitlines()
    symbols = [line.split(maxsplit=2) for line in listed if "DW.ref." not in line]  # no code
    shared = [name for _, kind, name in symbols if kind not in "tTrRdDbB"]
    outside = [name for _, kind, name in symbols if kind in "TRDB"]
    code = output("objdump", "-d", path)
    if shared:
        yield f"{path} defines functions that other files may be linked to: {shared}"
    if len(outside) > 1 or any(f"adamw_{width}(" not in name for name in outside):
        yield f"{path} defines more than its pass: {outside}"
    if "x86-64" in code and re.search(r"\bvfn?m(add|sub)", code):
        yield f"{path} fuses products with sums; -ffp-contract=off is missing in src/CMakeLists.txt"
    if width == "16" and not outside:
        yield f"{path} has no pass"


found = [problem for path in sys.argv[1:] for problem in problems(path)]
if len(sys.argv) < 4:
    found.append(f"expected three objects, not {sys.argv[1:]}")
print("\n".join(found) or "only the passes, and nothing fused")
sys.exit(bool(found))
