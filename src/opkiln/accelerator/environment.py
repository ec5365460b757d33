"""What launchers need: the communication library and the variables of the environment."""

from __future__ import annotations

from opkiln.accelerator.identity import Identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence
    from typing import Any, ClassVar


class Environment(Identity):
    """Nothing here reads or writes this process's environment."""

    COMMUNICATION: ClassVar[str] = "gloo"
    EXPORTED: ClassVar[tuple[str, ...]] = ()
    VISIBLE: ClassVar[tuple[str, ...]] = ()

    def communication_backend_name(self) -> str:
        """The backend of ``torch.distributed`` for this device: ``nccl``."""
        return self.COMMUNICATION

    def communication_backend_version(self) -> tuple[int, ...] | None:
        """The version of that backend's library; None where torch has no way to ask."""
        return None

    def export_envs(self) -> list[str]:
        """Beginnings of the variables' names that a launcher hands on to other machines."""
        return list(self.EXPORTED)

    def visible_devices_envs(self) -> list[str]:
        """The variables that say which devices a process may use."""
        return list(self.VISIBLE)

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int | str]
    ) -> None:
        """Name these devices in an environment that is being made for a child."""
        for name in self.VISIBLE:
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Call this once the device is initialized: at once, where it is or needs not be."""
        queue = getattr(self.module(), "_lazy_call", None)
        if queue is None:
            callback()
        else:
            queue(callback)
