"""`hawk-agent`: one process per node that owns its memories and moves caches; also usable embedded."""

from hawk.agent.core import Agent
from hawk.agent.run import run

__all__ = ["Agent", "run"]
