"""vLLM's own server, started with our worker extension and our middleware.

command.py and installation.py run in our environment, the rest inside vLLM's: there, only the standard library,
torch, safetensors, starlette, orjson and what vLLM itself brings may be imported.
"""
