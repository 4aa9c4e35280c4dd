"""Makes the pack importable as `speculative_ar` for every test."""

from __future__ import annotations

import pack

pack.register()
