"""A strict simulator of sm_100a: runs compiled CuTe DSL functions on CPU tensors, in place, with no GPU and no driver.

    from wanfp4 import simulator

    with simulator.device("sm_100a", seed=1, track=True) as gpu:
        gpu.register(q=q, k=k, v=v, o=o)
        compiled = cute.compile(kernel, …)
        compiled(…)
        print(gpu.report())

What it models, and how far to trust it: docs/simulator.md.
"""

from wanfp4.simulator.device import Device, Simulator, device
from wanfp4.simulator.errors import HostError
from wanfp4.simulator.findings import (
    BoundsError,
    DeadlockError,
    DescriptorError,
    Place,
    PoisonError,
    ProtocolError,
    RaceError,
    SimulationError,
    UnknownInstruction,
)
from wanfp4.simulator.report import LaunchReport

__all__ = [
    "BoundsError",
    "DeadlockError",
    "DescriptorError",
    "Device",
    "HostError",
    "LaunchReport",
    "Place",
    "PoisonError",
    "ProtocolError",
    "RaceError",
    "SimulationError",
    "Simulator",
    "UnknownInstruction",
    "device",
]
