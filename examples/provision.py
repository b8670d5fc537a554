"""A server is ordered at most once, even when the program dies right after the order went out.

The provider is a directory here. A crash leaves the order in doubt; `verify` looks whether the server is there.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import keepstep as ks

PROVIDER = Path("provider")


def ordered(name: str) -> ks.Done | ks.NotDone:
    """What becomes of the doubt: the provider knows whether the server was ordered."""
    return ks.Done(f"10.0.0.{len(name)}") if (PROVIDER / name).exists() else ks.NotDone()


@ks.step(at_most_once=True, verify=ordered)
def order_server(name: str) -> str:
    (PROVIDER / name).touch(exist_ok=False)  # a second order would be a second bill: it fails here
    if os.environ.get("CRASH"):
        os.kill(os.getpid(), signal.SIGKILL)  # after the order, before its checkpoint
    return f"10.0.0.{len(name)}"


@ks.step(retry=ks.Retry(attempts=10, base_seconds=0.05, factor=1))
async def ping(address: str) -> None:
    pings = PROVIDER / "pings"
    with pings.open("a") as file:
        file.write(f"{address}\n")
    if len(pings.read_text().splitlines()) < 3:
        raise ConnectionError(f"{address} is still booting")


@ks.workflow
async def provision(name: str) -> str:
    address = await order_server(name)
    async with ks.timeout(60):
        await ping(address)
    return address


def program() -> None:
    PROVIDER.mkdir(exist_ok=True)
    print(ks.run(provision, "mail", url="provision.db", run_id="provision-mail"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "program"]
        killed = subprocess.run(command, cwd=folder, env={**os.environ, "CRASH": "1"}, check=False)
        assert killed.returncode == -signal.SIGKILL
        again = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        print("killed after the order went out; recovered with", again.stdout.strip())
        assert again.stdout == "10.0.0.4\n"


if __name__ == "__main__":
    program() if sys.argv[1:] else main()
