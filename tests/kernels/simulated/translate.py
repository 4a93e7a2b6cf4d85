"""Turns CUDA sources into C++ that simulate.h can run on the CPU: translate.py FOLDER OUT

Writes OUT/NAME.cpp for each FOLDER/NAME.cu and FOLDER/NAME.cpp, and OUT/kernels/cuda/NAME.cuh for
each header with device code. Files that call cuBLASLt are left out.

In a .cu only the launches aren't C++: kernel<<<grid, block, shared, stream>>>(arguments) becomes a
call of simulate::launch. A few known instructions of inline assembly are replaced. A .cpp registers
kernels with LibTorch for CUDA tensors: its CUDA headers become cuda_of_torch.h, and its registration
becomes a function that the tests call.
"""
import re
import sys
from pathlib import Path

ASSEMBLY = [
    (r'asm\("ex2\.approx\.ftz\.f32[^;]*;"\s*:\s*"=f"\((\w+)\)\s*:\s*"f"\((\w+)\)\);', r"\1 = exp2f(\2);"),
    (r'asm\("rcp\.approx\.ftz\.f32[^;]*;"\s*:\s*"=f"\((\w+)\)\s*:\s*"f"\((\w+)\)\);', r"\1 = 1.0f / \2;"),
]
REGISTRATION = [
    (r"#include <(c10|ATen)/cuda/\w+\.h>", ""),
    (r"TORCH_LIBRARY_IMPL\(fsdp, CUDA, m\)", "void register_simulated(torch::Library& m)"),
    (r"set_cuda_updates\(&kTable\)", "set_simulated_updates(&kTable)"),
]


def closing(text, at):
    """The index after the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise SystemExit(f"unbalanced bracket: {text[at:at + 80]!r}")


def kernel_start(text, end):
    """Where the kernel expression (name or name<arguments>) that ends at `end` begins."""
    i = end
    while text[i - 1].isspace():
        i -= 1
    if text[i - 1] == ">":
        depth = 0
        while True:
            i -= 1
            depth += (text[i] == ">") - (text[i] == "<")
            if depth == 0:
                break
    while re.match(r"[\w:]", text[i - 1]):
        i -= 1
    return i


def replaced(text, patterns):
    for pattern, meaning in patterns:
        text = re.sub(pattern, meaning, text)
    return text


def kernels(text):
    text = replaced(text, ASSEMBLY)
    if re.search(r"\basm\b", text):
        raise SystemExit("unknown inline assembly: add it to translate.py")
    while (at := text.find("<<<")) >= 0:
        start = kernel_start(text, at)
        shape_end = text.index(">>>", at)
        arguments_end = closing(text, text.index("(", shape_end))
        shape = text[at + 3:shape_end]
        kernel = text[start:at].strip() + text[shape_end + 3:arguments_end]
        launch = f"::simulate::launch(::simulate::Shape({shape}), [=] {{ {kernel}; }})"
        text = text[:start] + launch + text[arguments_end:]
    return text


def write(path, text):
    if not path.exists() or path.read_text() != text:  # an unchanged file isn't compiled again
        path.write_text(text)


def main(folder, out):
    (out / "kernels/cuda").mkdir(parents=True, exist_ok=True)
    for header in sorted(folder.glob("*.cuh")):
        write(out / "kernels/cuda" / header.name, kernels(header.read_text()))
    for source in sorted(folder.glob("*.c[up]*")):
        text = source.read_text()
        if "cublasLt.h" in text:  # a library's products
            continue
        if source.suffix == ".cu":
            first, text = "simulate.h", kernels(text)
        elif source.suffix == ".cpp":
            first, text = "cuda_of_torch.h", replaced(text, REGISTRATION)
        else:
            continue
        write(out / f"{source.stem}.cpp", f'#include "kernels/simulated/{first}"\n#line 1 "{source.name}"\n{text}')


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
