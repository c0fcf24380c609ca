"""vLLM's own server, started with our worker extension and our middleware.

command.py, installation.py and serve.py run in our environment; the rest, with serving/updates.py and
weights/check.py, inside vLLM's: there, only the standard library, torch, safetensors, starlette, orjson and what vLLM
itself brings may be imported.
"""
