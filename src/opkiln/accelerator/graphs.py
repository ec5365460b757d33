"""Graphs: work that is recorded once and replayed."""

from __future__ import annotations

from opkiln.accelerator.identity import Identity
from opkiln.errors import AcceleratorError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any


class Graphs(Identity):
    """``create_graph`` says whether there are any: it gives None where there are none."""

    def create_graph(self) -> Any:
        """An empty graph; None where the device, or its module of torch, has none."""
        kind = getattr(self.module(), f"{self.device_type.upper()}Graph", None)
        return None if kind is None else kind()

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        """In the ``with`` block, work is recorded and not done.

        Raises AcceleratorError where there are no graphs: a block that ran, and a replay that did
        nothing, would be wrong without a word.
        """
        self._must_be_a_graph(graph)
        named = {"pool": pool, "stream": stream}
        given = {name: value for name, value in named.items() if value is not None}
        context: AbstractContextManager[Any] = self.module().graph(graph, **given)
        return context

    def replay_graph(self, graph: Any) -> None:
        """Do what was recorded. Raises AcceleratorError where there are no graphs."""
        self._must_be_a_graph(graph)
        graph.replay()

    def _must_be_a_graph(self, graph: Any) -> None:
        if graph is None:
            raise AcceleratorError(
                f"there are no graphs on {self.name}",
                why="create_graph() gave None: do the work directly where it does",
            )
