"""Triton's message classes, from the tritonclient package: the only importer of them.

They are taken and not generated again: a second copy of the same messages in one process would collide with
the client's in protobuf's descriptor pool.
"""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import model_config_pb2 as _model_config
from tritonclient.grpc import service_pb2 as _service
from tritonclient.grpc import service_pb2_grpc as _service_grpc

# The generated modules have no types, so all that comes out of them is Any, on purpose and only from here.
model_config_pb2: Any = _model_config
service_pb2: Any = _service
service_pb2_grpc: Any = _service_grpc
