"""What `npu_agents` and `verbs_agents` show, as far as every run shall show it, by one pair of agents.

Starting an agent takes half a minute in a guest.  The decode side's memory is behind the module hawk_npu throughout, so
that its channels also see agents killed and links cut.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.lab.guest.npu_agents", "tests.lab.guest.verbs_agents")

from tests.lab.guest import npu_agents, verbs_agents  # noqa: E402  # after what pytest shall know of them
from tests.lab.guest.npu_agents import side  # noqa: E402

__all__ = ["side"]

test_the_doctor_knows_the_module = npu_agents.test_the_doctor_knows_the_module
test_the_main_job_ends_behind_the_module = npu_agents.test_the_main_job_ends_behind_the_module
test_the_doctor_moves_a_few_bytes = verbs_agents.test_the_doctor_moves_a_few_bytes_from_the_peer
test_an_offer_is_withdrawn_from_one_of_two_jobs = verbs_agents.test_an_offer_is_withdrawn_from_one_of_two_jobs
test_the_prefill_agent_is_killed = verbs_agents.test_the_prefill_agent_is_killed_in_mid_batch_and_comes_back
test_the_link_goes_down_and_comes_up_again = verbs_agents.test_the_link_goes_down_and_comes_up_again
test_an_agent_that_ends_gives_everything_back = npu_agents.test_an_agent_that_ends_gives_everything_back
