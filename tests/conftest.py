"""Shared by all tests: `tiny` is importable, and torch keeps to two threads."""

import importlib.util
import sys
from pathlib import Path

import torch

torch.set_num_threads(min(2, torch.get_num_threads()))

# Neither the root nor tests/ may go on sys.path: their kernels/ folders would be found as Hugging Face's `kernels`.
_spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _spec is not None
assert _spec.loader is not None
tiny = importlib.util.module_from_spec(_spec)
sys.modules["tiny"] = tiny
_spec.loader.exec_module(tiny)
