"""Names of GPU architectures: what a compute capability is called, and whose cubins run where.

What a kernel looks like on one of them is tiles.py's and render.py's choice, which of them can be compiled for
nvrtc.py's.
"""

from __future__ import annotations


def arch_of(compute_capability: str) -> str:
    """The architecture to compile for: "9.0" is "sm_90a", with the instructions that exist on it alone."""
    arch = "sm_" + compute_capability.replace(".", "")
    return "sm_90a" if arch == "sm_90" else arch


def arch_number(arch: str) -> int:
    """90 of "sm_90a"."""
    return int("".join(filter(str.isdigit, arch)))


def usable_archs(arch: str) -> list[str]:
    """The architectures whose cubins run on `arch`, best first: itself and older ones of the same major."""
    number = arch_number(arch)
    return [arch, *(f"sm_{older}" for older in range(number - 1, number // 10 * 10 - 1, -1))]
