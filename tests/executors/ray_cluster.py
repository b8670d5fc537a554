"""A Ray cluster for tests, in processes of its own: a head, and a second node if a test asks for one.

As a program, it holds the cluster until its standard input ends. So nothing of it outlives the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: The cluster's own secret: nothing else on this machine can reach it, and none is written into the home folder.
AUTH = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}
ENVIRONMENT = {**AUTH, "RAY_USAGE_STATS_ENABLED": "0"}
MEMORY = 80 << 20


class RayCluster:
    """A cluster that runs until `close`. `nodes` has the ids of its processes, by the kind of each."""

    def __init__(self, port: int = 0) -> None:
        # The paths of its sockets must be short, whatever TMPDIR is.
        self._folder = tempfile.TemporaryDirectory(prefix="r", dir="/tmp")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, self._folder.name, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | ENVIRONMENT,
            text=True,
        )
        self.nodes: list[dict[str, int]] = []
        self.address = ""
        self._ask("head")

    def _ask(self, what: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith("{"):
            assert line, "the cluster did not start"
        answer: dict[str, Any] = json.loads(line)
        self.address = answer["address"]
        self.nodes.append(answer["processes"])

    def add_node(self, name: str) -> dict[str, int]:
        """Start another node, which has one of the resource `name`. Return the ids of its processes."""
        self._ask(name)
        return self.nodes[-1]

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()


def main() -> None:
    folder, port = sys.argv[1], int(sys.argv[2])
    from ray._private import parameter
    from ray._private.node import Node

    nodes: list[Any] = []
    try:
        for line in sys.stdin:
            name = line.strip()
            settings = parameter.RayParams(
                temp_dir=folder,
                num_cpus=2 if name == "head" else 1,
                resources={} if name == "head" else {name: 1},
                object_store_memory=MEMORY,
                include_dashboard=False,
                include_log_monitor=False,
                dashboard_agent_listen_port=0,
                gcs_server_port=port or None,
                gcs_address=nodes[0].gcs_address if nodes else None,
            )
            node = Node(settings, head=not nodes, shutdown_at_exit=False, spawn_reaper=True, default_worker=False)
            nodes.append(node)
            pids = {kind: group[0].process.pid for kind, group in node.all_processes.items() if group}
            print(json.dumps({"address": nodes[0].gcs_address, "processes": pids}), flush=True)
    finally:
        for node in reversed(nodes):
            node.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    main()
