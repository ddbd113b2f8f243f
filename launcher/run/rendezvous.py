"""torchrun's rendezvous without a socket on every interface. Entry point `torchrun.handlers: bert-dp-file`.

torchrun's own backends (c10d, static, etcd) open a TCPStore that listens on every interface, also with
--standalone. One node needs only a place for one agent to keep its keys, so a FileStore serves; over several
nodes node 0's agent serves a TCPStore at a socket that the launcher has bound to one address.
Loaded inside the torchrun process, never by the launcher.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

ARRIVE = datetime.timedelta(minutes=5)  # for the other agents, whose launchers were all there


def handler_factory() -> Callable[[Any], Any]:
    """Return the function RendezvousParameters -> RendezvousHandler; torchrun calls this at its start."""
    from torch.distributed import FileStore, Store, TCPStore
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class StaticRendezvous(StaticTCPRendezvous):
        """Uses the given store and node number. `host`, `port`: the workers' MASTER_ADDR and MASTER_PORT."""

        def __init__(self, store: Store, run_id: str, node: int, nodes: int, host: str, port: int):
            super().__init__(host, port, node, nodes, run_id, timeout=0)
            self._store = store  # else the base class would open one on every interface

        def get_backend(self) -> str:
            return "bert-dp-file"

        @property
        def use_agent_store(self) -> bool:
            return self.master_port != 0  # else workers meet in a file of their own

    def make(params: RendezvousParameters) -> StaticRendezvous:
        """Read the endpoint: the path of a store file on one node, HOST:PORT of the store over several."""
        nodes = params.get_as_int("nodes")
        if nodes is None:  # nothing listens at port 0
            return StaticRendezvous(FileStore(params.endpoint, 1), params.run_id, 0, 1, "127.0.0.1", 0)
        node, bound = params.get_as_int("node"), params.get_as_int("socket")
        host, _, port = params.endpoint.rpartition(":")
        store = TCPStore(
            host,
            int(port),
            is_master=bound is not None,
            timeout=ARRIVE,
            wait_for_workers=False,
            master_listen_fd=bound,
        )
        return StaticRendezvous(store, params.run_id, node or 0, nodes, host, int(port))

    return make
