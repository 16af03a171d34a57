"""Triton's interpreter in a process of its own, which functions can be sent to.

Whether kernels are interpreted is decided by TRITON_INTERPRET when triton is first imported, for the whole process, and
other tests' processes import triton as it is. So the child is started with the variable, and everything that touches
kernels happens there: functions of importable modules and their arguments come through a pipe, results go back.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import traceback
from typing import Any


class Interpreter:
    """A child process; `call("module:function", …)` runs there and returns, or raises what was raised."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError with the child's traceback when the function raises."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        pickle.dump((function, args, kwargs), self._child.stdin)
        self._child.stdin.flush()
        result, error = pickle.load(self._child.stdout)
        if error is not None:
            raise RuntimeError(error)
        return result

    def close(self) -> None:
        """Ends the child."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait(60)
        self._child.stdout.close()


def _serve() -> None:
    # What the kernels print must not get between the results.
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        result = error = None
        try:
            module, _, name = function.partition(":")
            result = getattr(importlib.import_module(module), name)(*args, **kwargs)
        except Exception:  # noqa: BLE001 - the parent raises it
            error = traceback.format_exc()
        pickle.dump((result, error), results)
        results.flush()


if __name__ == "__main__":
    _serve()
