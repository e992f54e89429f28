"""`acl.rt.*`, put together."""

from __future__ import annotations

from edged.twin.acl.callbacks import CallbackCalls
from edged.twin.acl.copies import MemoryCalls
from edged.twin.acl.device import DeviceCalls, TimeoutCalls
from edged.twin.acl.streams import StreamCalls


class Rt(DeviceCalls, TimeoutCalls, StreamCalls, MemoryCalls, CallbackCalls):
    """The runtime namespace."""
