"""Implement a torchrun rendezvous (handler `bert-dp-file`) that does not listen on all interfaces.

torchrun's own backends (c10d, static, etcd-v2) open a TCPStore that listens on all interfaces, even with
--standalone. On one node, there is only one agent, so a FileStore is enough. On several nodes, node 0's agent
serves a TCPStore on a socket that the launcher has bound to one address. Only torchrun's process imports this
module; the launcher does not.
"""

import datetime
from collections.abc import Callable
from typing import Any

ARRIVE = datetime.timedelta(minutes=5)  # time limit for agents to connect, after all launchers have connected


def handler_factory() -> Callable[[Any], Any]:
    """Return the function that creates rendezvous handlers. torchrun registers that function at start-up."""
    from torch.distributed import FileStore, Store, TCPStore
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class StaticRendezvous(StaticTCPRendezvous):
        """Rendezvous handler with a given store. `host`, `port`: the workers' MASTER_ADDR and MASTER_PORT."""

        def __init__(self, store: Store, run_id: str, node: int, nodes: int, host: str, port: int):
            super().__init__(host, port, node, nodes, run_id, timeout=0)
            self._store = store  # otherwise, the base class opens a store that listens on all interfaces

        def get_backend(self) -> str:
            return "bert-dp-file"

        @property
        def use_agent_store(self) -> bool:
            return self.master_port != 0  # on one node (port 0), workers rendezvous through another file

    def make(params: RendezvousParameters) -> StaticRendezvous:
        """Create a handler. The endpoint is a FileStore's path on one node, else a TCPStore's HOST:PORT."""
        nodes = params.get_as_int("nodes")
        if nodes is None:  # one node; use_agent_store explains port 0
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
