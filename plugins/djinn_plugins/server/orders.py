"""The gateway's orders to a worker while sessions run, besides connections, limits and turns."""

from __future__ import annotations

import logging
import os
import sys
import threading

from djinn.errors import ConfigurationError
from djinn.wire.messages import Goodbye
from djinn_plugins.common.kinds.transport import Listener
from djinn_plugins.common.options import ListenOptions
from djinn_plugins.server.control import ControlMessage, Drain, Drained, EndSessions, Renew
from djinn_plugins.server.control_channel import Control
from djinn_plugins.server.draining import Drainable, drain
from djinn_plugins.server.grants import Grants
from djinn_plugins.server.reloading import RenewableListener

__all__ = ("Orders",)

_log = logging.getLogger("djinn.server")


class Orders:
    """Carries out the gateway's orders.

    Args:
        control: The channel to the gateway.
        server: Has the sessions.
        grants: Records the tokens that admitted them.
        listener: Where redirected clients connect, if there are any.

    Concurrency:
        The thread that reads the gateway's messages.
    """

    def __init__(self, control: Control, server: Drainable, grants: Grants, listener: Listener | None) -> None:
        self._control = control
        self._server = server
        self._grants = grants
        self._listener = listener

    def obey(self, message: ControlMessage, descriptor: int | None) -> None:
        """Carry out an order. None of them waits for a client or a program."""
        if isinstance(message, Drain):
            drain(self._server, self._drained)
        elif isinstance(message, EndSessions):
            goodbye = Goodbye(message.code, message.summary, message.hint)
            for session in self._grants.end(message.token, goodbye):
                # In its own thread: a client that does not read would delay the other sessions and the gateway's next
                # orders.
                threading.Thread(target=session.close, args=(goodbye,), daemon=True).start()
        elif isinstance(message, Renew) and descriptor is not None:
            try:
                self._renew(message, descriptor)
            finally:
                os.close(descriptor)

    def _renew(self, message: Renew, descriptor: int) -> None:
        if not isinstance(self._listener, RenewableListener):
            return
        folder = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
        try:
            self._listener.renew(ListenOptions(tls_cert=f"{folder}/{descriptor}", tls_client_ca=message.tls_client_ca))
        except ConfigurationError as error:
            _log.error("the certificate stays as it was: %s", error)  # no bug
        else:
            _log.info("new connections use another certificate")

    def _drained(self) -> None:
        try:
            self._control.send(Drained())
        except OSError as error:
            _log.info("the gateway does not hear that the last session has ended: %s", error)
