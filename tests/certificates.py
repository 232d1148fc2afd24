"""Certificates for tests: an authority of their own, and what it vouches for."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def certificate(
    folder: Path,
    *,
    openssl: str = "openssl",
    name: str = "localhost",
    other_names: str = "DNS:localhost,IP:127.0.0.1,IP:::1",
) -> tuple[Path, Path]:
    """An authority of its own, and a server's certificate that it signed for these names: the
    paths of the authority's file and of the server's chain, whose key is beside it (.key)."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, chain = folder / "authority.pem", folder / "server.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _run(openssl, "req", "-x509", *curve, "-days", "2", "-subj", "/CN=stoker test authority",
         "-keyout", authority.with_suffix(".key"), "-out", authority)  # fmt: skip
    _run(openssl, "req", *curve, "-subj", f"/CN={name}", "-keyout", chain.with_suffix(".key"),
         "-out", folder / "server.csr")  # fmt: skip
    (folder / "names").write_text(f"subjectAltName=DNS:{name}" + f",{other_names}\n" * bool(other_names))
    _run(openssl, "x509", "-req", "-in", folder / "server.csr", "-CA", authority, "-CAcreateserial",
         "-CAkey", authority.with_suffix(".key"), "-days", "2", "-extfile", folder / "names",
         "-out", chain)  # fmt: skip
    return authority, chain


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
