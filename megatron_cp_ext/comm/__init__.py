"""Every byte on the wire goes through this floor, and is counted here."""

from megatron_cp_ext.comm.collectives import (
    all_gather,
    all_to_all,
    reduce_scatter,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from megatron_cp_ext.comm.places import during, innermost, steps
from megatron_cp_ext.comm.topology import CommGroup
from megatron_cp_ext.comm.traffic import Traffic
from megatron_cp_ext.comm.transfer import Transfer, start_transfer
from megatron_cp_ext.comm.wire import HostStagingWire, SilentWire, Wire, connect

__all__ = [
    "CommGroup",
    "HostStagingWire",
    "SilentWire",
    "Traffic",
    "Transfer",
    "Wire",
    "all_gather",
    "all_to_all",
    "connect",
    "during",
    "innermost",
    "reduce_scatter",
    "start_all_gather",
    "start_all_to_all",
    "start_reduce_scatter",
    "start_transfer",
    "steps",
]
