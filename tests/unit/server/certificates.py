"""A CA and a certificate it signed, made by openssl, for tests of TLS."""

import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path

from server.rpc.credentials import SecurityConfig


class Certificates:
    """A CA and one certificate it signed for 127.0.0.1."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._openssl(
            [
                "req",
                "-x509",
                "-keyout",
                "ca.key",
                "-out",
                "ca.pem",
                "-subj",
                "/CN=ca",
                "-days",
                "2",
            ],
        )
        (directory / "san").write_text("subjectAltName=IP:127.0.0.1\n")
        self.sign("node")

    def sign(self, name: str, file: str = "", *, days: int = 2) -> SecurityConfig:
        """A new key and certificate with this common name, in files called `file`, else `name`;
        with `days` below 0 it has ended.
        """
        file = file or name
        self._openssl(
            ["req", "-new", "-keyout", f"{file}.key", "-out", f"{file}.csr", "-subj", f"/CN={name}"]
        )
        self._openssl(
            [
                *("x509", "-req", "-in", f"{file}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
                *("-CAcreateserial", "-out", f"{file}.pem", "-days", str(days), "-extfile", "san"),
            ]
        )
        path = self.directory
        return SecurityConfig(
            ca_path=str(path / "ca.pem"),
            cert_path=str(path / f"{file}.pem"),
            key_path=str(path / f"{file}.key"),
        )

    def encrypted_key(self, pass_phrase: str) -> str:
        """The node's key, encrypted; returns its path."""
        encrypted = ("-aes256", "-passout", f"pass:{pass_phrase}")
        self._openssl(["pkey", "-in", "node.key", *encrypted, "-out", "encrypted.key"])
        return str(self.directory / "encrypted.key")

    def _openssl(self, arguments: Sequence[str]) -> None:
        fresh = ["-newkey", "rsa:2048", "-nodes"] if arguments[0] == "req" else []
        subprocess.run(
            ["openssl", *arguments, *fresh], cwd=self.directory, check=True, capture_output=True
        )

    def security(self, *, ca: bool) -> SecurityConfig:
        path = self.directory
        ca_path = str(path / "ca.pem") if ca else ""
        return SecurityConfig(
            ca_path=ca_path, cert_path=str(path / "node.pem"), key_path=str(path / "node.key")
        )

    def client(self, *, certificate: bool) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.directory / "ca.pem"))
        if certificate:
            context.load_cert_chain(self.directory / "node.pem", self.directory / "node.key")
        return context
