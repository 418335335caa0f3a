"""Kernels of notebooks whose addresses nobody else can take.

Over TCP a kernel is told five ports that are free and binds them about a second later. A rank
that starts in between may be given one of them, and the kernel dies before it answers. Sockets
in a folder of this process are nobody else's. Windows keeps TCP.
"""

import os
import tempfile
import uuid
from pathlib import Path

from jupyter_client import KernelManager

FOLDER = tempfile.TemporaryDirectory(prefix="kernels-", ignore_cleanup_errors=True)


class Kernel(KernelManager):
    """A KernelManager over sockets in FOLDER, whose kernel's error messages reach the test."""

    def __init__(self, **options):
        if os.name != "nt":
            connection_file = str(Path(FOLDER.name) / f"{uuid.uuid4().hex[:8]}.json")
            options |= {"transport": "ipc", "connection_file": connection_file}
        super().__init__(**options)

    def start_kernel(self, **options):
        options.pop("stderr", None)  # nbval throws it away; pytest shows it where a test fails
        return super().start_kernel(**options)
