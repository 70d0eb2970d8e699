"""A simulator of serving with prefill and decode apart: what a cluster promises, needs and costs.

`simulate(Scenario(...))` runs one scenario and gives an `Outcome`; `sweep` runs many over all cores, `knee` finds
the rate up to which a promise is kept.  docs/evaluation.md tells the model and what it leaves out.  It stands on SimPy
(extra `evaluate`), which is imported when a simulation begins.
"""

from hawk.serving.calibration import Calibration, calibration_names, load_calibration
from hawk.serving.device import Device, Rates, device_names, load_device
from hawk.serving.engine import simulate
from hawk.serving.figures import Figure
from hawk.serving.model import ServedModel, load_served, served_names
from hawk.serving.outcome import Outcome
from hawk.serving.scenario import SLOS, Decode, Prefill, Scenario, Slo, paper_scenario
from hawk.serving.sweep import Knee, knee, sweep
from hawk.serving.transfer import CONFIGURATIONS, Configuration, Cost, Moved, Side, Transfer
from hawk.serving.workload import Lengths, Workload

__all__ = [
    "CONFIGURATIONS",
    "SLOS",
    "Calibration",
    "Configuration",
    "Cost",
    "Decode",
    "Device",
    "Figure",
    "Knee",
    "Lengths",
    "Moved",
    "Outcome",
    "Prefill",
    "Rates",
    "Scenario",
    "ServedModel",
    "Side",
    "Slo",
    "Transfer",
    "Workload",
    "calibration_names",
    "device_names",
    "knee",
    "load_calibration",
    "load_device",
    "load_served",
    "paper_scenario",
    "served_names",
    "simulate",
    "sweep",
]
