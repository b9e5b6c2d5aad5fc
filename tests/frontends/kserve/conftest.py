from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frontends.kserve.ports import Ports


@pytest.fixture(scope="package")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    made = Ports(tmp_path_factory.mktemp("models"))
    yield made
    made.stop()
