"""The tests in interpreted/ need Triton's interpreter, which is chosen when a kernel is defined:
they run in a Python of their own, started by test_interpreted.py.
"""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
