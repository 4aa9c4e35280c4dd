"""Runs ComfyUI's main.py in an environment whose torchvision was built for another torch.

    python launch_comfyui.py COMFYUI/main.py [ComfyUI's options]

PyPI's torchvision links to CUDA libraries. Beside a CPU torch its compiled operators cannot load and importing it stops
at two operators that nobody declared. Declaring them is enough for the parts written in Python, all that ComfyUI uses.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch


def declare_missing_operators() -> torch.library.Library | None:
    """Declares torchvision's two operators where the library itself fails to. The result must be kept alive."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
    else:
        return None
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


if __name__ == "__main__":
    declared = declare_missing_operators()
    main = Path(sys.argv[1]).resolve()
    sys.argv = [str(main), *sys.argv[2:]]
    sys.path[0] = str(main.parent)
    runpy.run_path(str(main), run_name="__main__")
