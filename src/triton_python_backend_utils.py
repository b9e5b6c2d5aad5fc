"""The module that Triton's Python models import; it works inside a model that Tritium runs."""

from tritium.backends.pb_utils import *  # noqa: F403
from tritium.backends.pb_utils import __all__ as __all__
