"""Shared by all tests: helper modules are importable by their names, and torch keeps to one thread."""

import importlib.util
import sys
from pathlib import Path

import hypothesis
import torch

# A first call may compile or allocate: deadlines would make tests depend on the machine.
hypothesis.settings.register_profile("wanfp4", deadline=None)
hypothesis.settings.load_profile("wanfp4")

# Tensors here are small: on a busy machine, waiting for a second thread takes 15 ms an operation, longer than the work.
torch.set_num_threads(1)

# Neither the root nor tests/ may go on sys.path: their kernels/ folders would be found as Hugging Face's `kernels`.
_HELPERS = (
    "tiny.py",
    "page.py",
    "kernels/naive.py",
    "kernels/interpreter.py",
    "kernels/emulated_cases.py",
    "kernels/hopper_images.py",
    "quality/map_cases.py",
    "quality/search_cases.py",
    "simulator/programs.py",
    "simulator/cases.py",
    "simulator/lanes.py",
    "simulator/effects.py",
    "simulator/asynchronous.py",
    "simulator/tensors.py",
    "simulator/tensor_core.py",
    "simulator/handwritten.py",
    "simulator/proof.py",
)
for _path in _HELPERS:
    _name = Path(_path).stem
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).parent / _path)
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
