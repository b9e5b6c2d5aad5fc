"""TLS on the gRPC port: handshakes with certificates made for the test, one-sided and mutual."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import InferenceServerException

from tritium.errors import TritiumError
from tritium.frontends.grpc import GrpcFrontend
from tritium.frontends.grpc_transport import transport
from tritium.serving.server import Server
from tritium.settings import ServerSettings

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the command openssl is not installed")

NAMES = "DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM files."""

    cert: Path
    key: Path


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def authority(folder: Path, name: str) -> Pair:
    """One that signs itself."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    extensions = (
        "-addext",
        "basicConstraints=critical,CA:TRUE",
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
    )
    openssl(
        *("req", "-x509", *curve, "-keyout", pair.key, "-out", pair.cert, "-days", 2, "-subj", f"/CN={name}"),
        *extensions,
    )
    return pair


def signed(folder: Path, name: str, by: Pair) -> Pair:
    """One that ``by`` vouches for."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName={NAMES}\n")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-new", *curve, "-keyout", pair.key, "-out", request, "-subj", f"/CN={name}")
    signer = ("-CA", by.cert, "-CAkey", by.key, "-CAcreateserial", "-days", 2)
    openssl("x509", "-req", "-in", request, "-out", pair.cert, *signer, "-extfile", extensions)
    return pair


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("certificates")
    root, stranger = authority(folder, "root"), authority(folder, "stranger")
    found = {"root": root, "stranger": stranger, "alone": authority(folder, "alone")}
    found |= {name: signed(folder, name, root) for name in ("server", "client")}
    return found | {"impostor": signed(folder, "impostor", stranger)}


@asynccontextmanager
async def listening(settings: ServerSettings) -> AsyncIterator[str]:
    server = Server()
    await server.start()
    front = GrpcFrontend(server, transport=transport(settings))
    port = await front.start(port=0)
    try:
        yield f"localhost:{port}"
    finally:
        await front.stop(0)
        await server.drain(0)


async def live(address: str, root: Path | None, pair: Pair | None = None) -> bool:
    """Whether the handshake succeeds and the server answers."""
    files = {"root_certificates": None if root is None else str(root)}
    if pair is not None:
        files |= {"private_key": str(pair.key), "certificate_chain": str(pair.cert)}
    async with grpcclient.InferenceServerClient(address, ssl=True, **files) as client:  # type: ignore[arg-type]
        return await client.is_server_live(client_timeout=10)


async def test_a_certificate_that_signs_itself(pairs: dict[str, Pair]) -> None:
    alone = pairs["alone"]
    settings = ServerSettings(grpc_use_ssl=True, grpc_server_cert=str(alone.cert), grpc_server_key=str(alone.key))
    async with listening(settings) as address:
        assert await live(address, alone.cert)
        # Who trusts somebody else, or nobody, or speaks plainly, does not get through.
        for root in (pairs["root"].cert, None):
            with pytest.raises(InferenceServerException, match=r"UNAVAILABLE|CERTIFICATE|handshake"):
                await live(address, root)
        async with grpcclient.InferenceServerClient(address) as client:
            with pytest.raises(InferenceServerException):
                await client.is_server_live(client_timeout=5)
        # A client's certificate is not asked for.
        assert await live(address, alone.cert, pairs["impostor"])


async def test_mutual_tls(pairs: dict[str, Pair]) -> None:
    root, server = pairs["root"].cert, pairs["server"]
    settings = ServerSettings(
        grpc_use_ssl_mutual=True,
        grpc_server_cert=str(server.cert),
        grpc_server_key=str(server.key),
        grpc_root_cert=str(root),
    )
    async with listening(settings) as address:
        assert await live(address, root, pairs["client"])
        for pair in (None, pairs["impostor"]):
            with pytest.raises(InferenceServerException):
                await live(address, root, pair)
        # The same through the library that everybody else uses.
        credentials = grpc.ssl_channel_credentials(
            root.read_bytes(), pairs["client"].key.read_bytes(), pairs["client"].cert.read_bytes()
        )
        async with grpc.aio.secure_channel(address, credentials) as channel:
            await channel.channel_ready()


def test_files_that_make_no_tls(pairs: dict[str, Pair], tmp_path: Path) -> None:
    (tmp_path / "garbage.pem").write_text("no certificate\n")
    garbage, server = str(tmp_path / "garbage.pem"), pairs["server"]
    for cert, key in ((garbage, str(server.key)), (str(server.cert), str(pairs["client"].key))):
        settings = ServerSettings(grpc_use_ssl=True, grpc_server_cert=cert, grpc_server_key=key)
        with pytest.raises(TritiumError, match="are no certificate and its key"):
            transport(settings)
    settings = ServerSettings(
        grpc_use_ssl_mutual=True,
        grpc_server_cert=str(server.cert),
        grpc_server_key=str(server.key),
        grpc_root_cert=garbage,
    )
    with pytest.raises(TritiumError, match=r"--grpc-root-cert .* holds no certificates"):
        transport(settings)
