"""One thing to simulate: who prefills, who decodes, how KV moves between them, what is asked and what is promised."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from hawk.errors import InvalidArgument
from hawk.serving.calibration import Calibration, load_calibration
from hawk.serving.device import Device, Rates
from hawk.serving.figures import Figure, number
from hawk.serving.model import load_served
from hawk.serving.transfer import Configuration, Transfer
from hawk.serving.workload import MOST_REQUESTS, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.serving.model import ServedModel

MOST_INSTANCES = 100_000
FirstToken = Literal["prefill", "transfer", "step"]
Routing = Literal["round-robin", "least-loaded", "two-choices"]


def _count(value: object, field: str, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidArgument("no such number", field=field, got=value, expected=f"{low}..{high}")


@dataclass(frozen=True, slots=True)
class Slo:
    """What is promised: seconds to the first token, and for each token after it."""

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        number(self.ttft, "slo.ttft", 1e-9)
        number(self.tpot, "slo.tpot", 1e-9)


SLOS = {"chatbot": Slo(2.0, 0.2), "summarization": Slo(15.0, 0.2)}
"""The paper's, section 5.3."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Instances that prefill, each on `tp` devices.

    max_tokens    tokens of prompts that are computed together; a longer prompt goes alone
    chunk         None: whole prompts; else tokens of one step, long prompts in several, short ones together
    kv_tokens     tokens of KV that an instance keeps, until decode instances have them; None: what its memory holds
    per_node      instances that share one link
    takes         where devices are not always as quick: seconds that work takes from a time on, both in seconds, which
                  would take so many at the device's own pace; of all instances
    """

    device: Device
    tp: int = 1
    instances: int = 1
    max_tokens: int = 8192
    chunk: int | None = None
    kv_tokens: int | None = None
    per_node: int = 1
    takes: Callable[[float, float], float] | None = None

    def __post_init__(self) -> None:
        _count(self.tp, "prefill.tp", 1, 1024)
        _count(self.instances, "prefill.instances", 1, MOST_INSTANCES)
        _count(self.max_tokens, "prefill.max_tokens", 1, 1 << 30)
        _count(self.per_node, "prefill.per_node", 1, 1024)
        if self.chunk is not None:
            _count(self.chunk, "prefill.chunk", 1, 1 << 30)
        if self.kv_tokens is not None:
            _count(self.kv_tokens, "prefill.kv_tokens", 1, 1 << 40)


@dataclass(frozen=True, slots=True)
class Decode:
    """Instances that decode, each on `tp` devices.

    kv_tokens     tokens of KV that an instance holds; None: what its memory holds beside the weights
    max_batch     requests that it decodes together
    per_node      instances that share one link
    """

    device: Device
    tp: int = 1
    instances: int = 1
    kv_tokens: int | None = None
    max_batch: int = 256
    per_node: int = 1

    def __post_init__(self) -> None:
        _count(self.tp, "decode.tp", 1, 1024)
        _count(self.instances, "decode.instances", 1, MOST_INSTANCES)
        _count(self.max_batch, "decode.max_batch", 1, 1 << 20)
        _count(self.per_node, "decode.per_node", 1, 1024)
        if self.kv_tokens is not None:
            _count(self.kv_tokens, "decode.kv_tokens", 1, 1 << 40)


@dataclass(frozen=True)
class Scenario:
    """A simulation.

    transfer      None: KV is there at once, for what is not about transfers
    rate          requests a second; None: a trace's own times
    requests      how many are simulated; None: all of a trace
    warm_up       part of them, the first, that is left out of what is reported
    first_token   when a user sees the first token: at the end of "prefill", when the KV has arrived ("transfer": the
                  paper's way, where its TTFT has the transfer in it), or after the decode instance's first "step",
                  which then makes the first token once more, as engines do that stream from there
    overhead      seconds from a request's arrival until an instance knows of it: proxies and HTTP
    router        to prefill instances when a request comes, to decode instances when its prefill begins or has ended
    """

    prefill: Prefill
    decode: Decode
    workload: Workload
    transfer: Transfer | None = field(default_factory=Transfer)
    model: str = "llama-3.1-70b"
    rate: float | None = 1.0
    requests: int | None = 2000
    warm_up: float = 0.1
    seed: int = 0
    slo: Slo = SLOS["chatbot"]
    first_token: FirstToken = "transfer"
    overhead: float = 0.0
    router: Routing = "two-choices"
    name: str = ""

    def __post_init__(self) -> None:
        if self.rate is not None:
            number(self.rate, "rate", 1e-9, 1e9)
        if self.requests is not None:
            _count(self.requests, "requests", 1, MOST_REQUESTS)
        _count(self.seed, "seed", 0, (1 << 63) - 1)
        number(self.warm_up, "warm_up", 0.0, 0.95)
        number(self.overhead, "overhead")
        if not self.workload.recorded and (self.rate is None or self.requests is None):
            missing = "rate" if self.rate is None else "requests"
            raise InvalidArgument("needed without a trace", field=missing, got=None, expected="a number")
        for name, value, known in (
            ("first_token", self.first_token, ("prefill", "transfer", "step")),
            ("router", self.router, ("round-robin", "least-loaded", "two-choices")),
        ):
            if value not in known:
                raise InvalidArgument("unknown choice", field=name, got=value, expected=" or ".join(known))

    @property
    def served(self) -> ServedModel:
        """The model."""
        return load_served(self.model)

    def rates(self) -> tuple[Rates, Rates]:
        """Of a prefill and of a decode instance, with the KV that their memories or the scenario say."""
        model = self.served
        bytes_of = (0.0, 0.0)
        if self.transfer is not None and None in (self.prefill.device.table, self.decode.device.table):
            bytes_of = self.transfer.kv_bytes(model, self.prefill.tp, self.decode.tp)
        before = self.prefill.device.rates(model, self.prefill.tp, bytes_of[0])
        after = self.decode.device.rates(model, self.decode.tp, bytes_of[1])
        if self.prefill.kv_tokens is not None:
            before = replace(before, kv_tokens=self.prefill.kv_tokens)
        if self.decode.kv_tokens is not None:
            after = replace(after, kv_tokens=self.decode.kv_tokens)
        return before, after

    def at(self, rate: float) -> Scenario:
        """The same at another rate."""
        return replace(self, rate=rate)


ASSUMED = {
    "tokens of a prefill step": Figure(2048, "tokens", "assumed", "vLLM's own for a server on an A100"),
    "largest batch": Figure(32, "requests", "assumed", "Table 1's; NPU and GPU alike"),
    "warm-up": Figure(0.1, "1", "assumed", "part of the requests that is not reported"),
}
"""What `paper_scenario` takes that the paper's text does not say."""

DECODERS = {"gg": "a100", "gn": "p150a", "ggh": "h100"}
"""The paper's decode devices: GG, GN and GGH (section 5.4.3)."""


def paper_scenario(
    configuration: Configuration,
    workload: str,
    rate: float,
    *,
    calibration: Calibration | None = None,
    decoder: str | None = None,
    requests: int = 2000,
    seed: int = 0,
) -> Scenario:
    """The paper's system (section 5.1): one instance of four A100, one of four decode devices, 200 Gb/s, Llama 3.1 70B.

    workload    "chatbot" or "summarization", with the paper's SLO
    decoder     a device in place of the configuration's own: "h100" gives GGH-Direct
    """
    if workload not in SLOS:
        raise InvalidArgument("unknown workload", field="workload", got=workload, expected=" or ".join(SLOS))
    found = calibration or load_calibration("paper")
    transfer = Transfer(configuration, found)
    device = decoder or DECODERS["gg" if configuration.startswith("gg") else "gn"]
    return Scenario(
        prefill=Prefill(found.device("a100"), tp=4, chunk=int(ASSUMED["tokens of a prefill step"].value)),
        decode=Decode(found.device(device), tp=4, max_batch=int(ASSUMED["largest batch"].value)),
        transfer=transfer,
        workload=Workload.named(workload),
        rate=rate,
        requests=requests,
        warm_up=ASSUMED["warm-up"].value,
        seed=seed,
        slo=SLOS[workload],
        name=f"{configuration}{'/' + decoder if decoder else ''} {workload} {rate:g}/s",
    )
