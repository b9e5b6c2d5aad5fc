from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frontends.kserve.models import Live
from tritium import backends


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends.BACKENDS, "mirror", "tests.frontends.kserve.models:Mirror")
        live = Live(tmp_path_factory.mktemp("repository"), body_timeout_s=0.5, write_timeout_s=0.5)
        yield live
        live.stop()
