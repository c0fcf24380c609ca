"""How many times slower than two idle cores a machine may be before a test gives up waiting.

Tests wait for what they wait for, never for seconds to pass, so patience costs nothing where all is well.
"""

import os

PATIENCE = float(os.environ.get("TANDEM_TEST_PATIENCE", "5"))
