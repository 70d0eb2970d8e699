"""The contract's asserts live in the package; pytest explains them only when told to before they are imported."""

import pytest

pytest.register_assert_rewrite(
    "hawk.transports.testing._helpers",
    "hawk.transports.testing._moving",
    "hawk.transports.testing._access",
    "hawk.transports.testing._ends",
)
