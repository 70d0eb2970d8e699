import pytest

from tests.unit.retile.cuda.on_cpu import Kernels


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return Kernels(tmp_path_factory.mktemp("kernels"))
