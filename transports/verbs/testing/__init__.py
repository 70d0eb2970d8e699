"""RDMA devices without hardware: the seam of `_device` kept by sockets and threads, in one process or several.

    driver = FakeDriver()
    transport = VerbsTransport(VerbsConfig(...), driver=driver)

They keep the rules that a transport can get wrong: queue pairs have states and are connected by number, packet number
and GID; keys are checked for range, rights, protection domain and queue pair at every piece of a READ or WRITE;
immediate data take a receive each, and break the queue pair that finds none; send slots come free only when a later
completion was polled; whatever is posted to a broken queue pair is flushed, unsignalled requests and receives as well;
completion queues overrun; an event comes only for a completion after `arm`; a responder refuses more outstanding READs
than it agreed to.  Rates and times mean nothing.
"""

from __future__ import annotations

from hawk.transports.verbs.testing._driver import LIMITS, PORT, FakeDevice, FakeDriver
from hawk.transports.verbs.testing._faults import Faults

__all__ = ["LIMITS", "PORT", "FakeDevice", "FakeDriver", "Faults"]
