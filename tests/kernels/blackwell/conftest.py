"""Makes the helper module of these tests importable, where the compiler that it needs is installed."""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

if find_spec("cutlass") is not None:
    _spec = spec_from_file_location("sm100_cases", Path(__file__).parent / "sm100_cases.py")
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["sm100_cases"] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["sm100_cases"])
