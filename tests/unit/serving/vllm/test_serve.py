"""What is checked before this process becomes vLLM's server."""

import os
import socket

import pytest

from tandem.config.inference import InferenceConfig
from tandem.serving.vllm.serve import refuse_stale_rpc_port
from tandem.utils.errors import UserError


def test_a_port_that_an_earlier_start_holds_is_named_with_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stale:
        port = stale.getsockname()[1]
        flags = {"data-parallel-address": "127.0.0.1", "data-parallel-rpc-port": str(port)}
        config = InferenceConfig.model_validate({"model": {"name": "m"}, "engine": "vllm", "vllm": {"flags": flags}})
        with pytest.raises(UserError, match=rf"rpc-port {port} is in use on 127\.0\.0\.1 by pid {os.getpid()} "):
            refuse_stale_rpc_port(config)
    refuse_stale_rpc_port(config)
