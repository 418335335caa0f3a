# SPDX-License-Identifier: Apache-2.0
"""torch.compile for the layers of a stage: one kernel where there would be many.

Each layer is compiled separately; all layers have the same code and shapes, so torch compiles once.
Two features cannot be combined with it. A compiled backward computes all gradients at once, so it
cannot be split. Selective recomputation replaces a function inside the layers while they run.
"""

import shutil
import subprocess

import torch
from torch.utils._triton import has_triton

BACKENDS = ("inductor", "aot_eager", "eager")


def add_compile_flag(parser):
    what = "compile the layers: inductor makes kernels; the others help to find out what goes wrong"
    parser.add_argument("--compile", nargs="?", const=BACKENDS[0], choices=BACKENDS, help=what)


def check_compile(arguments, schedule):
    """Reject flags that cannot be combined with --compile, and a machine without a compiler."""
    a = arguments
    if a.compile is None:
        return
    if "I" in schedule.kinds:
        raise SystemExit(
            f"--compile with --schedule {a.schedule}: a compiled backward does not come in halves; "
            "use a schedule whose backwards are whole, or leave --compile out"
        )
    if a.recompute == "selective":
        raise SystemExit(
            "--compile with --recompute selective: use --recompute none, layer or stage"
        )
    on_gpu = a.device != "cpu" and torch.cuda.is_available()
    if a.compile == "inductor" and not (has_triton() if on_gpu else has_compiler()):
        missing = "the package triton" if on_gpu else "a C++ compiler"
        raise SystemExit(
            f"--compile needs {missing} on this machine; install it, or leave --compile out"
        )


def has_compiler():
    """Return whether torch would find a C++ compiler."""
    from torch._inductor import config

    named = config.cpp.cxx if isinstance(config.cpp.cxx, tuple) else (config.cpp.cxx,)
    for compiler in filter(None, named):
        if shutil.which(compiler):
            done = subprocess.run([compiler, "--version"], capture_output=True, check=False)
            if done.returncode == 0:
                return True
    return False


def compile_layers(part, backend):
    """Compile the layers of a stage's part in place; `backend` None leaves them as they are.

    Names and weights do not change. The number of rows may differ between calls, as it does when
    a text is generated.
    """
    if backend:
        for layer in part.layers.values():
            layer.compile(backend=backend)
