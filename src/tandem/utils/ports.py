"""Whether a port can be had, and the nearest one that can."""

import socket

from tandem.utils.errors import UserError


def port_is_free(host: str, port: int) -> bool:
    try:
        bind(host, port).close()
    except OSError:
        return False
    return True


def nearest_free_port(host: str, port: int) -> int | None:
    """The next free port above `port`, if there is one within reach."""
    return next((p for p in range(port + 1, min(port + 200, 65535) + 1) if port_is_free(host, p)), None)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address; it does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last owner has just ended is free; one that somebody listens on is not.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def bind_or_refuse(host: str, port: int, option: str) -> socket.socket:
    """Bind, or raise UserError with the option's name and a port that would do."""
    try:
        return bind(host, port)
    except OSError as error:
        free = nearest_free_port(host, port)
        hint = f"; port {free} is free" if free else ""
        raise UserError(f"{option} = {port} cannot be bound on {host}: {error.strerror}{hint}") from error
