"""What is not wanted any more is not computed: what a client has cancelled, or has left behind."""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest
import torch
from djinn_transport_tcp.client import SocketConnection, Wish, connect, reach
from tcp_support import raw_socket

from djinn.kinds.transport import ConnectOptions
from djinn.model.program import ConstantArgument, Program, Step, Template, TensorArgument
