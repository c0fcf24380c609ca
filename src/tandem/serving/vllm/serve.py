"""`inference --engine vllm`: check what can be checked, then become vLLM's server."""

import errno
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import tandem
from tandem.config.inference import InferenceConfig
from tandem.data.tokenizer import Tokenizer
from tandem.models.files import within_positions
from tandem.models.shards import read_tensor_headers
from tandem.serving.vllm.command import build_command, build_environment, is_headless
from tandem.serving.vllm.installation import Installation, find_vllm
from tandem.serving.vocabulary import compare_vocabularies
from tandem.utils.devices import free_memory_bytes, refuse_missing_gpu
from tandem.utils.errors import UserError
from tandem.utils.files import read_table
from tandem.utils.ports import handed_over, holder_of, listen, listen_or_refuse

logger = logging.getLogger(__name__)

LONG_CONTEXT = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # by which vLLM serves more than the model has positions


def become_server(config: InferenceConfig) -> NoReturn:
    """Replaces this process. Raises UserError before anything is started."""
    api_key = config.server.resolve_api_key()
    vllm = check_vllm(config)
    model_config = check_model_files(config.model.name)
    if "auto_map" in model_config and not config.model.trust_remote_code:
        told = "brings Python code, which is not run; if vLLM refuses the model, that may be why"
        logger.warning("model.name = '%s' %s (--model.trust-remote-code)", config.model.name, told)
    if not os.environ.get(LONG_CONTEXT):
        config = within_positions(config, config.model.name)
    tokenizer = Tokenizer.of(config.model)
    if isinstance(vocab_size := model_config.get("vocab_size"), int):
        compare_vocabularies(tokenizer, vocab_size, config.model.name)
    command = build_command(config, vllm, model_config, free_memory_bytes())
    environment = build_environment(config, api_key, import_path(vllm), dict(os.environ))
    if not is_headless(config):
        # Held through vLLM's imports, which take many seconds.
        listening = listen_or_refuse(config.server.host, config.server.port, "server.port")
        listening.set_inheritable(True)
        environment |= handed_over(listening)
        refuse_stale_rpc_port(config)
    sys.stdout.flush()
    os.execve(command[0], command, environment)


def refuse_stale_rpc_port(config: InferenceConfig) -> None:
    """vLLM's head would wait for ever on a port that engines of an earlier start still hold."""
    address, port = (config.vllm.flags.get(f"data-parallel-{name}") for name in ("address", "rpc-port"))
    if address is None or port is None:
        return
    try:
        listen(str(address), int(port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"--data-parallel-rpc-port {port} is in use on {address}{holder_of(int(port))}; end that process, or "
                "give another port on every node"
            ) from error


def check_vllm(config: InferenceConfig) -> Installation:
    """The vLLM that would serve; it must run where the configuration wants it to."""
    vllm = find_vllm(config.vllm.python)
    if config.device != "auto" and (config.device == "cpu") != vllm.is_cpu:
        kind = "CPU" if vllm.is_cpu else "GPU"
        raise UserError(f"device = {config.device!r}, but vLLM {vllm.version} of {vllm.python} is the {kind} build")
    refuse_missing_gpu(config.device, "device", vllm.python)
    return vllm


def check_model_files(model_dir: Path) -> dict[str, object]:
    """The config.json of a directory that vLLM can load; of which architecture, vLLM knows best."""
    for name, what in (("config.json", "model"), ("tokenizer.json", "tokenizer")):
        if not (model_dir / name).exists():
            raise UserError(f"model.name = {str(model_dir)!r} holds no {what}: there is no {name} in it")
    if not any(model_dir.glob("*.safetensors")):
        raise UserError(f"model.name = {str(model_dir)!r} holds no weights: there is no *.safetensors in it")
    try:
        read_tensor_headers(model_dir)
    except (OSError, ValueError) as error:
        raise UserError(f"model.name = {str(model_dir)!r} holds no weights that can be read: {error}") from error
    return read_table(model_dir / "config.json")


def import_path(vllm: Installation) -> Path:
    """A directory that holds this package and nothing else: what else lies in its folder in our environment must not
    take the place of vLLM's own packages."""
    package = Path(tandem.__file__).resolve().parent
    if package.parent.name != "site-packages" or vllm.python == Path(sys.executable):
        return package.parent
    folder = Path(tempfile.mkdtemp(prefix="tandem-import-"))
    (folder / package.name).symlink_to(package)
    return folder
