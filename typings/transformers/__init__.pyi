# For pyright. transformers names the modules of all its models: to look one name up, it would read thousands of files.
from typing import Any

def __getattr__(name: str) -> Any: ...
