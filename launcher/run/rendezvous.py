"""torchrun's rendezvous on a file: no socket on any interface. Entry point `torchrun.handlers: bert-dp-file`.

torchrun's own backends (c10d, static, etcd) open a TCPStore that listens on every interface, also with
--standalone. One node needs only a place for one agent to keep its keys, so a FileStore serves.
Loaded inside the torchrun process, never by the launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def handler_factory() -> Callable[[Any], Any]:
    """Return the function RendezvousParameters -> RendezvousHandler; torchrun calls this at its start."""
    from torch.distributed import FileStore, PrefixStore
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    class FileRendezvous(RendezvousHandler):
        """One agent, one node; `--rdzv-endpoint` is the path of the store file."""

        def __init__(self, path: str, run_id: str):
            self._store = FileStore(path, 1)
            self._run_id = run_id
            self._round = 0

        def get_backend(self) -> str:
            return "bert-dp-file"

        @property
        def use_agent_store(self) -> bool:
            return False  # workers meet in a file of their own

        def next_rendezvous(self) -> RendezvousInfo:
            self._round += 1
            store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
            # MASTER_ADDR / MASTER_PORT of the workers' environment; nothing listens there
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return self._run_id

        def shutdown(self) -> bool:
            return True

    return lambda params: FileRendezvous(params.endpoint, params.run_id)
