"""How logits are cut into chunks, and how many of those are kept for the backward pass. Needs no GPU."""

MAX_ROWS = 4096  # enough to fill a GPU
CHUNK_SHARE, KEPT_SHARE = 1 / 48, 1 / 16  # of a GPU's memory: one chunk, and all that is kept
ROW_MULTIPLE = 128


def plan_chunks(num_tokens: int, row_bytes: int, memory_bytes: int) -> tuple[int, int]:
    """Rows of a chunk, all about equal, and how many chunks may be kept for the backward pass."""
    most = min(MAX_ROWS, int(memory_bytes * CHUNK_SHARE) // row_bytes)
    most = max(1, most // ROW_MULTIPLE * ROW_MULTIPLE or most)
    num_chunks = max(1, -(-num_tokens // most))
    rows = -(-num_tokens // num_chunks)
    rows = min(most, max(1, -(-rows // ROW_MULTIPLE)) * ROW_MULTIPLE)
    return rows, int(memory_bytes * KEPT_SHARE) // (rows * row_bytes)
