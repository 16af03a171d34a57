"""Shared by the simulator's tests: programs that others wrote."""

import sys
import types
import warnings
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

# As in tests/conftest.py: importable without a folder on sys.path.
_spec = spec_from_file_location("handmade", Path(__file__).parent / "handmade.py")
assert _spec is not None
assert _spec.loader is not None
sys.modules["handmade"] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["handmade"])


@pytest.fixture(scope="session")
def flash_attention_forward() -> Any:
    """The class of flash-attn-4's forward kernel for SM100.

    Importing it imports quack's tuner, which needs Triton: a GB of which nothing runs here. Without Triton, an empty
    tuner takes its place, only while that import lasts.
    """
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    if find_spec("flash_attn") is None:
        pytest.skip("needs flash-attn-4")
    stand_in = types.ModuleType("quack.autotuner")
    vars(stand_in).update(AutotuneConfig=lambda *args, **options: None, autotune=lambda *args, **options: lambda f: f)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses names that cutlass is about to drop
        if find_spec("triton") is None:
            patch.setitem(sys.modules, stand_in.__name__, stand_in)
        from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100
    return FlashAttentionForwardSm100
