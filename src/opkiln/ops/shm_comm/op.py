"""What ``shm_comm`` is compiled from. Imports no torch: commands know the op by it."""

from __future__ import annotations

from opkiln.authoring.library import library

kit = library(
    "shm_comm",
    "cpu.cpp",
    schemas=(
        (
            "shm_join(Tensor host, SymInt fd, SymInt rank, SymInt size, SymInt slot, "
            "SymInt milliseconds) -> SymInt"
        ),
        "shm_leave(Tensor host, SymInt group) -> ()",
        'shm_all_reduce(Tensor x, SymInt group, str op="sum") -> Tensor',
        'shm_all_reduce_(Tensor(a!) x, SymInt group, str op="sum") -> ()',
        'shm_reduce_scatter(Tensor x, SymInt group, str op="sum") -> Tensor',
        ('shm_reduce_scatter_into(Tensor(a!) out, Tensor x, SymInt group, str op="sum") -> ()'),
        "shm_all_gather(Tensor x, SymInt group) -> Tensor",
        "shm_all_gather_into(Tensor(a!) out, Tensor x, SymInt group) -> ()",
    ),
    functions="opkiln.ops.shm_comm.functions",
    namespace="opkiln",
)
